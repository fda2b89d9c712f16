"""How likely a displaced page is asked for again. Owns: `Wanted`, which estimates it from what comes back.

Rules: of the pages that workers remove, one in `SAMPLE` is watched, `LIMIT` at most. One that is stored again
somewhere was wanted; one that is forgotten before was not. Old observations fade.
"""

from __future__ import annotations

from typing import Final

from hotprefix.fleet.records import Keys

SAMPLE: Final = 8
LIMIT: Final = 4096
FADE: Final = 1024


class Wanted:
    """share: the estimate; one half before anything was seen."""

    __slots__ = ("_gone", "_lost", "_returned")

    def __init__(self) -> None:
        self._gone: dict[int, None] = {}
        self._returned = self._lost = 1.0

    @property
    def share(self) -> float:
        return self._returned / (self._returned + self._lost)

    def removed(self, keys: Keys) -> None:
        """These pages went from a worker's L1."""
        for key in keys:
            if key % SAMPLE == 0:
                self._gone[key] = None
        while len(self._gone) > LIMIT:
            del self._gone[next(iter(self._gone))]
            self._lost += 1.0
            self._fade()

    def stored(self, keys: Keys) -> None:
        """These pages came to a worker's L1."""
        if not self._gone:
            return
        for key in keys:
            if key % SAMPLE == 0 and key in self._gone:
                del self._gone[key]
                self._returned += 1.0
                self._fade()

    def _fade(self) -> None:
        if self._returned + self._lost > FADE:
            self._returned, self._lost = self._returned / 2, self._lost / 2
