"""Figures for people. Owns: how one is written in a command's table. (JSON has them exactly.)"""

from __future__ import annotations

from typing import Any

DIGITS = 4


def readable(name: str, value: Any) -> str:
    """A figure as text. A number has thousands separators and, if it is not whole, DIGITS digits. If the name
    ends in `_share` it is in percent, if it ends in `_s` in seconds. Percentiles stand side by side, notes
    one below the other. What is missing is "-"."""
    if isinstance(value, dict):
        return "  ".join(f"{key} {readable(name, held)}" for key, held in value.items()) or "-"
    if isinstance(value, tuple):
        return "\n".join(map(str, value))
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if name.endswith("_share"):
        return f"{100 * value:.2f} %"
    return _number(value) + (" s" if name.endswith("_s") else "")


def _number(value: float) -> str:
    if value == int(value) or abs(value) >= 10 ** (DIGITS - 1):
        return f"{value:,.0f}"
    return f"{value:.{DIGITS}g}"
