"""Charts of a replay. Owns: matplotlib drawings as inline SVG that follow the page's colours.

Rules: text stays text. Colours are the page's CSS variables, so light and dark both work: charts are drawn
with stand-ins, which are replaced afterwards. The same data give the same bytes. Ids carry the chart's name.
Bars begin at 0.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from hotprefix.report.figure_text import seconds
from hotprefix.report.replay.words import large

WIDTH: Final = 4.5  # inches of 72 units: about 1:1 on a phone
_STAND_INS: Final = {
    "#010101": "var(--ink)", "#020202": "var(--soft)", "#030303": "var(--line)", "#040404": "var(--good)",
    "#050505": "var(--bad)", "#060606": "var(--mark)", "#070707": "var(--band)", "#080808": "var(--card)",
    **{f"#0a0a{n:02x}": f"var(--s{n})" for n in range(8)},
}  # fmt: skip
_FAR: Final = 1.5  # changes beyond 150 % are cut
INK, SOFT, LINE, GOOD, BAD, MARK, BAND, CARD = list(_STAND_INS)[:8]
SERIES: Final = list(_STAND_INS)[8:]
_RC: Final[dict[Any, Any]] = {
    "svg.fonttype": "none", "font.size": 9.0, "font.family": "sans-serif", "text.color": INK,
    "axes.edgecolor": LINE, "axes.labelcolor": SOFT, "axes.spines.top": False, "axes.spines.right": False,
    "axes.linewidth": 0.8, "xtick.color": SOFT, "ytick.color": SOFT, "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.5, "ytick.labelcolor": INK, "axes.grid": False, "grid.color": LINE,
    "axes.facecolor": "none", "figure.facecolor": "none", "lines.linewidth": 1.6,
}  # fmt: skip


def intervals(
    name: str, rows: Sequence[tuple[str, float, float, float, str]], limits: Sequence[Sequence[float]]
) -> str:
    """Changes with their intervals, one a row.

    rows: (label, value, low, high, tone: good | bad | ""), in shares of the baseline.
    limits: for each row, the places at which its tolerance ends, in shares; drawn as ticks.
    """
    with rc_context({**_RC, "svg.hashsalt": name}):
        figure, axes = _figure(0.32 * len(rows) + 0.45)
        reach = (
            max(
                0.05,
                *(min(_FAR, abs(v)) for row in rows for v in row[1:4]),
                *(abs(v) for ends in limits for v in ends),
            )
            * 1.12
        )
        for at, (row, ends) in enumerate(zip(rows, limits, strict=True)):
            color = {"good": GOOD, "bad": BAD}.get(row[4], SOFT)
            axes.plot([max(row[2], -reach), min(row[3], reach)], [at, at], color=color, linewidth=2.4)
            axes.plot([max(-reach, min(reach, row[1]))], [at], "o", color=color, markersize=5)
            for end in ends:
                axes.plot([end, end], [at - 0.32, at + 0.32], color=MARK, linewidth=1.4)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(rows)), [row[0] for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(-reach, reach)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x * 100:+.0f} %"))
        return _svg(figure, name)


def stacked(name: str, rows: Sequence[tuple[str, Sequence[float]]], parts: Sequence[tuple[str, int]]) -> str:
    """Shares of a whole, one bar a row.

    rows: (label, shares).
    parts: (label, colour) of each share.
    """
    with rc_context({**_RC, "svg.hashsalt": name}):
        figure, axes = _figure(0.32 * len(rows) + 0.7)
        left = [0.0] * len(rows)
        for part, (label, color) in enumerate(parts):
            widths = [shares[part] for _, shares in rows]
            axes.barh(
                range(len(rows)),
                widths,
                left=left,
                height=0.62,
                color=_color(color),
                label=label,
            )
            for at, width in enumerate(widths):
                if width >= 0.09:
                    axes.text(left[at] + width / 2, at, f"{width * 100:.0f} %", ha="center", va="center",
                              color=CARD, fontsize=8)  # fmt: skip
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(rows)), [row[0] for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x * 100:.0f} %"))
        _legend(axes, len(parts))
        return _svg(figure, name)


def spans(name: str, rows: Sequence[tuple[str, Sequence[float | None], int]]) -> str:
    """Percentiles of a latency in seconds: a dot for each, and a line from the first to the last that is
    known. rows: (label, values, colour)."""
    with rc_context({**_RC, "svg.hashsalt": name}):
        figure, axes = _figure(0.32 * len(rows) + 0.45)
        for at, (_, values, color) in enumerate(rows):
            known = [v for v in values if v is not None]
            if known:
                axes.plot([min(known), max(known)], [at, at], color=_color(color), linewidth=2)
            for size, one in zip((4, 5.5, 7), values, strict=True):
                if one is not None:
                    axes.plot([one], [at], "o", color=_color(color), markersize=size)
        axes.set_yticks(range(len(rows)), [row[0] for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.grid(axis="x", linewidth=0.6)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel("seconds")
        return _svg(figure, name)


def lines(
    name: str, series: Mapping[str, tuple[Sequence[float], Sequence[float | None]]], unit: str, *,
    colors: Mapping[str, int], x: str = "virtual time, s", log_x: bool = False, points: bool = False,
    dashed: str = "", mark: float | None = None, band: tuple[str, str] | None = None,
) -> str:  # fmt: skip
    """Lines over time, or over another quantity.

    series: label -> (x, y).
    colors: the colour of each label.
    dashed: the label of a line that is drawn dashed and in ink.
    points: mark each value.
    mark: a value that gets a line across, by which charts with different axes can be compared.
    band: the labels of two lines with the same x; what lies between them is shaded.
    """
    with rc_context({**_RC, "svg.hashsalt": name}):
        figure, axes = _figure(2.1)
        for label, (xs, ys) in series.items():
            color = INK if label == dashed else _color(colors[label])
            axes.plot(xs, _floats(ys), color=color, label=label,
                      linestyle="--" if label == dashed else "-", marker="o" if points else None,
                      markersize=3.5)  # fmt: skip
        if band is not None:
            (xs, low), (_, high) = series[band[0]], series[band[1]]
            axes.fill_between(
                xs, _floats(low), _floats(high), color=_color(colors[band[1]]), alpha=0.15, linewidth=0
            )
        if log_x:
            axes.set_xscale("log", base=2)
            ticks = sorted({v for xs, _ in series.values() for v in xs})
            axes.set_xticks(ticks)
            axes.minorticks_off()
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: large(v)))
        axes.yaxis.set_major_formatter(
            FuncFormatter(
                lambda v, _: f"{v * 100:.0f} %" if unit == "share" else large(v, 0 if v >= 10 else 1)
            )
        )
        axes.yaxis.set_major_locator(MaxNLocator(4))
        if mark is not None:
            axes.axhline(mark, color=INK, linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.margins(x=0.02)
        axes.grid(axis="y", linewidth=0.6)
        axes.set_xlabel(x)
        _legend(axes, len(series))
        return _svg(figure, name)


def against(name: str, points: Sequence[tuple[float, float]], x: str, y: str) -> str:
    """Pairs of seconds > 0 as dots on logarithmic axes, and the diagonal, on which both are equal."""
    with rc_context({**_RC, "svg.hashsalt": name}):
        figure, axes = _figure(3.4)
        ends = [min(map(min, points)) / 1.2, max(map(max, points)) * 1.2]
        axes.plot(ends, ends, color=INK, linewidth=0.8)
        axes.plot(
            *zip(*points, strict=True), "o", color=_color(1), markersize=3, markeredgewidth=0, alpha=0.5
        )
        for axis, set_scale, label in ((axes.xaxis, axes.set_xscale, x), (axes.yaxis, axes.set_yscale, y)):
            set_scale("log")
            axis.set_major_locator(LogLocator(subs=(1, 3), numticks=8))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda v, _: seconds(v)))
            axis.set_label_text(label)
        axes.set_xlim(*ends)
        axes.set_ylim(*ends)
        axes.set_aspect("equal")
        axes.grid(linewidth=0.6)
        return _svg(figure, name)


def _floats(values: Sequence[float | None]) -> list[float]:
    """Numbers for matplotlib: NaN where there is none."""
    return [float("nan") if value is None else value for value in values]


def _color(number: int) -> str:
    return SERIES[number % len(SERIES)]


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _legend(axes: Axes, count: int) -> None:
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=min(count, 4), frameon=False, fontsize=8,
        handlelength=1.1, columnspacing=1.2, borderaxespad=0.1, labelcolor=INK,
    )  # fmt: skip


def _svg(figure: Figure, name: str) -> str:
    """The figure as inline SVG: without prolog and fixed size, with ids of its own and the page's colours."""
    held = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    canvas: Any = FigureCanvasSVG(figure)
    canvas.print_svg(held, metadata=nothing)  # savefig would lay out and draw twice
    text = held.getvalue()
    box = re.search(r'viewBox="([^"]+)"', text)
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    key = re.sub(r"[^A-Za-z0-9]+", "-", name)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{key}-", body)
    for stand_in, color in _STAND_INS.items():
        body = body.replace(stand_in, color)
    view = box.group(1) if box else "0 0 1 1"
    return f'<svg class="chart" viewBox="{view}" role="img" aria-label="{escape(name)}">{body}'
