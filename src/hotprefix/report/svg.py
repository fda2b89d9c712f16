"""Small inline charts. Owns: one kind of chart, the panel of horizontal bars, as an SVG string.

Rules: there is no script, no external asset and no fixed colour: CSS classes (`tone-*`, `muted`) make light
and dark both work. A panel is 360 units wide, which a phone shows at about 1:1. Bars start at zero. Every
value is also written out, and each run is a dot, so a mean never hides its spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 360
_ROW = 33
_TOP = 8
_BAR = 10


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    label, text: written left and right above the bar.
    value: the bar's length, >= 0.
    sd: the length of its whisker; None = there is none.
    points: its dots.
    tone: suffix of the CSS class that gives its colour.
    """

    label: str
    value: float
    text: str
    sd: float | None = None
    points: Sequence[float] = ()
    tone: str = "a"


def extent(bars: Sequence[Bar]) -> float:
    """The largest value that a panel must hold. If several panels share a scale, their `top` is the largest
    of these."""
    return max((max([b.value + (b.sd or 0.0), *b.points]) for b in bars), default=0.0)


def bar_panel(name: str, bars: Sequence[Bar], *, top: float, reference: float | None = None) -> str:
    """One panel.

    name: what a screen reader says.
    top: the value of a bar of full width.
    reference: the value of a mark across every bar (the baseline); None = no mark.
    """
    scale = (WIDTH - 8) / top if top > 0 else 0.0
    height = _TOP + _ROW * len(bars)
    body = [_bar(b, _TOP + _ROW * i, scale) for i, b in enumerate(bars)]
    if reference is not None:
        body += [_mark(_n(reference * scale), _TOP + _ROW * i) for i in range(len(bars))]
    return picture(name, height, body)


def picture(name: str, height: int, parts: Sequence[str]) -> str:
    """An SVG of these parts, WIDTH wide. name: what a screen reader says."""
    head = f'<svg class="bars" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(name)}">'
    return f"{head}{''.join(parts)}</svg>"


def _bar(bar: Bar, y: int, scale: float) -> str:
    middle = y + 14 + _BAR / 2
    parts = [
        f'<text x="0" y="{y + 9}">{escape(bar.label)}</text>',
        f'<text class="value" x="{WIDTH}" y="{y + 9}" text-anchor="end">{escape(bar.text)}</text>',
        f'<rect class="tone-{bar.tone}" x="0" y="{y + 14}" width="{_n(max(bar.value * scale, 1))}" '
        f'height="{_BAR}" rx="2"/>',
    ]
    if bar.sd:
        low, high = _n(max(bar.value - bar.sd, 0) * scale), _n((bar.value + bar.sd) * scale)
        parts.append(f'<line class="whisker" x1="{low}" x2="{high}" y1="{_n(middle)}" y2="{_n(middle)}"/>')
    parts += [f'<circle class="run" cx="{_n(p * scale)}" cy="{_n(middle)}" r="2"/>' for p in bar.points]
    return "".join(parts)


def _mark(x: str, y: int) -> str:
    """A line across one bar only, because a line through the whole panel would cut through the figures."""
    return f'<line class="reference" x1="{x}" x2="{x}" y1="{y + 12}" y2="{y + 16 + _BAR}"/>'


def _n(value: float) -> str:
    return f"{value:.1f}"
