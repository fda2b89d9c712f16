"""How figures are written. Owns: the one wording of times and counts in tables and charts.

Rules: a missing figure is a dash.
"""

from __future__ import annotations

DASH = "–"
_MS_BELOW = 0.9995  # seconds


def seconds(value: float) -> str:
    """412 ms below a second, 1.73 s from there."""
    return f"{value * 1000:.0f} ms" if value < _MS_BELOW else f"{value:.2f} s"


def whole(value: float | None) -> str:
    """Tokens, with a decimal only if the mean has one."""
    if value is None:
        return DASH
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"
