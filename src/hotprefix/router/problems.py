"""What is wrong with a peer. Owns: `Problems`, which counts it and says each kind once.

Rules: a peer may be wrong a thousand times a second. The log gets one line for each kind, and the counts tell
the rest. Kinds are few and fixed; what a peer sent is never one.
"""

from __future__ import annotations

import logging
from collections import Counter

from hotprefix.errors import shortened

MOST = 300


class Problems:
    """peer: how the log names it. counts: by kind."""

    def __init__(self, log: logging.Logger, peer: str) -> None:
        self._log, self._peer = log, peer
        self.counts: Counter[str] = Counter()
        self.last: str | None = None

    def tell(self, kind: str, detail: object, then: str) -> None:
        """detail: what was seen. then: what is done about it."""
        self.last = f"{kind}: {shortened(str(detail), MOST)}"
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            self._log.warning("%s: %s; %s (said once)", self._peer, self.last, then)
