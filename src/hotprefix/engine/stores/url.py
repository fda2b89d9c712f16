"""Reading store URLs. Owns: `Options`, `parse_bytes` and what may be shown of a URL.

Rules: an unknown, repeated or malformed option is a ConfigError that names the known options. No message
contains a password.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import SplitResult, parse_qsl

from hotprefix.errors import ConfigError

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("IB", 1024))
}
_TRUTH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def parse_bytes(text: str, param: str) -> int:
    """A size such as 10GB (powers of 1000), 512MiB (powers of 1024) or 1000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{param}={text!r} is no size: write it like 10GB or 512MiB", param=param)
    return int(float(match[1]) * unit)


class Options:
    """The options in a URL's query. shown: the URL without its query and password."""

    def __init__(self, url: SplitResult, known: Collection[str]) -> None:
        host = url.netloc.rpartition("@")[2]
        self.shown = f"{url.scheme}://{host}{url.path}"
        try:
            pairs = parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query))
        except ValueError as error:
            raise ConfigError(f"the options of {self.shown!r} are malformed: {error}", param="l3") from error
        self._values = dict(pairs)
        unknown = sorted(set(self._values) - set(known))
        if unknown or len(pairs) != len(self._values):
            raise ConfigError(
                f"{self.shown!r} has unknown or doubled options {unknown or [name for name, _ in pairs]}: "
                f"known are {sorted(known)}",
                param="l3",
            )

    def get(self, name: str, default: str) -> str:
        return self._values.get(name, default)

    def optional(self, name: str) -> str | None:
        return self._values.get(name)

    def flag(self, name: str, default: bool) -> bool:
        text = self._values.get(name)
        if text is None:
            return default
        if text.lower() not in _TRUTH:
            raise ConfigError(f"{name}={text!r} of {self.shown!r}: write 1 or 0", param=name)
        return _TRUTH[text.lower()]

    def seconds(self, name: str, default: float) -> float:
        text = self._values.get(name, str(default))
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise ConfigError(f"{name}={text!r} of {self.shown!r}: write seconds above 0", param=name)
        return value
