"""Strict reading of a configuration. Owns: `Fields`, and the message about a key that is not read.

Rules:
1. A reader takes all values of a configuration through one `Fields`, which remembers the keys that were read,
   and ends with `finish`. A key that was not read, and is not known to be harmless, is refused by its name
   and value. So a key that changes what a model computes cannot be overlooked.
2. A key whose value is null counts as absent.
3. A value must be of the type asked for; text is never converted. A wrong value is a ModelLoadError.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from hotprefix.errors import ModelLoadError

_SHOWN, _MOST_SHOWN = 100, 3


class Fields:
    """The keys of `raw`. where: what messages call `raw` (a file, or a file and a key)."""

    def __init__(self, raw: Any, where: str) -> None:
        if not isinstance(raw, Mapping):
            raise ModelLoadError(f"{where}: {shown(raw)} is not an object with named values")
        self._raw: Mapping[str, Any] = raw
        self.where = where
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether the key is there, even with the value null. This does not count as reading it."""
        return key in self._raw

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is; `default` if the key is absent or null."""
        self._read.add(key)
        value = self._raw.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number. The key must be there if no default is given."""
        value = self._needed(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "a whole number")
        return value

    def number(self, key: str, default: float | None = None, above: float | None = None) -> float:
        """A finite number, greater than `above` if that is given. The key must be there if no default is
        given."""
        value = self._needed(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(key, "a finite number")
        if above is not None and not value > above:
            raise self.wrong(key, f"a number greater than {above:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._needed(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def items(self, key: str) -> list[Any] | None:
        """A list; None if the key is absent or null."""
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise self.wrong(key, "a list")
        return value

    def wrong(self, key: str, wanted: str) -> ModelLoadError:
        """The error for a value that cannot be used."""
        return ModelLoadError(f"{self.where}: {key}={shown(self._raw.get(key))}: give {wanted}")

    def finish(
        self, harmless: Collection[str] = (), only: Mapping[str, tuple[Any, ...]] | None = None
    ) -> None:
        """Refuse every key that was not read, with a ModelLoadError.

        harmless: keys that change no number, whatever their value. A name that ends in * stands for all keys
        that begin with it.
        only: keys that change no number at the given values.
        """
        only = only or {}
        starts = tuple(key[:-1] for key in harmless if key.endswith("*"))
        unknown = []
        for key, value in self._raw.items():
            if key in self._read or value is None or key in harmless or key.startswith(starts):
                continue
            if key in only:
                if not any(type(value) is type(fine) and value == fine for fine in only[key]):
                    wanted = " or ".join(shown(fine) for fine in only[key])
                    raise ModelLoadError(
                        f"{self.where}: {key}={shown(value)} is not supported, only {wanted} is: give "
                        "another model"
                    )
                continue
            unknown.append(f"{key}={shown(value)}")
        if unknown:
            more = f" and {len(unknown) - _MOST_SHOWN} more" if len(unknown) > _MOST_SHOWN else ""
            raise ModelLoadError(
                f"{self.where}: {', '.join(unknown[:_MOST_SHOWN])}{more}: hotprefix does not know "
                "whether this changes what the model computes; remove it if it does not, or give "
                "another model"
            )

    def _needed(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ModelLoadError(f"{self.where} lacks {key!r}: add it, or give another model")
        return value


def shown(value: Any) -> str:
    """A value in a message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
