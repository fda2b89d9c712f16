"""Charts of the inspect report. Owns: lines over time and a request's chain, as SVG strings.

Rules: those of `report.svg`: no script, no fixed colour, 360 units wide, scales from zero, figures written
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hotprefix.report.svg import WIDTH, picture

_HEIGHT = 120
_PLOT = 84
_MOST_POINTS = 360


def lines(name: str, series: Sequence[tuple[str, str, Sequence[float]]], labels: tuple[str, str]) -> str:
    """Lines over time.

    name: what a screen reader says.
    series: (label, tone, values at equal distances).
    labels: what stands at the left and at the right end.
    """
    top = max((max(values) for _, _, values in series if values), default=0.0) or 1.0
    parts = [f'<text class="value" x="{WIDTH}" y="10" text-anchor="end">top {top:,.0f}</text>']
    for at, (label, tone, values) in enumerate(series):
        x = 4 + at * 110
        parts.append(f'<rect class="tone-{tone}" x="{x}" y="3" width="8" height="8" rx="2"/>')
        parts.append(f'<text x="{x + 12}" y="11">{escape(label)}</text>')
        parts.append(f'<polyline class="line-{tone}" points="{_points(_thinned(values), top)}"/>')
    base = 20 + _PLOT
    parts.append(f'<line class="axis" x1="0" x2="{WIDTH}" y1="{base}" y2="{base}"/>')
    parts.append(f'<text class="value" x="0" y="{_HEIGHT - 3}">{escape(labels[0])}</text>')
    parts.append(
        f'<text class="value" x="{WIDTH}" y="{_HEIGHT - 3}" text-anchor="end">{escape(labels[1])}</text>'
    )
    return picture(name, _HEIGHT, parts)


def _thinned(values: Sequence[float]) -> list[float]:
    """At most _MOST_POINTS values. If several become one, it is the greatest of them."""
    size = -(-len(values) // _MOST_POINTS) or 1
    return [max(values[at : at + size]) for at in range(0, len(values), size)]


def _points(values: Sequence[float], top: float) -> str:
    if len(values) == 1:
        values = [values[0], values[0]]
    gap = WIDTH / (len(values) - 1) if values else 0.0
    return " ".join(f"{i * gap:.1f},{20 + _PLOT - v / top * _PLOT:.1f}" for i, v in enumerate(values))


def chain(name: str, spans: Sequence[tuple[str, float]], top: float) -> str:
    """One request's time as a row of spans.

    spans: (tone, seconds) of each.
    top: the seconds of the whole width.
    """
    scale = WIDTH / top if top > 0 else 0.0
    x, parts = 0.0, []
    for tone, seconds in spans:
        width = seconds * scale
        parts.append(
            f'<rect class="tone-{tone}" x="{x:.1f}" y="2" width="{max(width, 0.5):.1f}" height="12"/>'
        )
        x += width
    return picture(name, 16, parts)
