"""How a bench's figures are written. Owns: the wording of changes and spreads, in a terminal and on a page.

Rules: a change that the spread could explain is never coloured.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotprefix.bench.bench_summary import Figure
from hotprefix.report.figure_text import DASH, seconds


@dataclass(frozen=True, slots=True)
class Cell:
    """tone: "good", "bad", or "" if the text claims nothing."""

    text: str
    tone: str = ""


def spread(figure: Figure) -> str:
    """mean ± sd in one unit; the mean alone for a single run."""
    if figure.sd is None:
        return seconds(figure.mean)
    number, _, unit = seconds(figure.mean).partition(" ")
    sd = f"{figure.sd * 1000:.0f}" if unit == "ms" else f"{figure.sd:.2f}"
    return f"{number} ± {sd} {unit}"


def change(figure: Figure, base: Figure) -> Cell:
    """The change against the baseline. It has a tone only if the two means differ by more than both sample
    standard deviations together, which is a plain screen and no test of significance."""
    if figure.change is None or figure is base:
        return Cell(DASH)
    text = f"{figure.change * 100:+.0f} %".replace("-", "−")
    if figure.sd is None or base.sd is None or abs(figure.mean - base.mean) <= figure.sd + base.sd:
        return Cell(text)
    return Cell(text, "good" if figure.change < 0 else "bad")


def factor(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"
