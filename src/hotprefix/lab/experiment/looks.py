"""When the runs so far are looked at. Owns: the looks of an experiment that goes on until its claims are
decided.

Rules: the number of seeds at each look is fixed before the first run: the seeds asked for, twice as many,
four times, up to the most. A look may use the share of a claim's error rate that its new seeds are of the
most, so that all looks together use no more than the whole: whoever stops at the first decisive look errs no
more often than stated (the union bound; nothing is assumed of how looks depend on each other). What is
decided stays so. Example: 5 seeds at first and 40 at most are looked at after 5, 10, 20 and 40, and of 5 %
they use 0.625, 0.625, 1.25 and 2.5 %.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Look:
    """seeds: 1 to so many are looked at. spend: the share of the error rate that may be used."""

    seeds: int
    spend: float


def looks(first: int, most: int | None) -> tuple[Look, ...]:
    """first: seeds of the first look. most: seeds at most, >= first; None = one look."""
    if most is None:
        return (Look(first, 1.0),)
    at = [first]
    while at[-1] < most:
        at.append(min(2 * at[-1], most))
    return tuple(Look(seeds, (seeds - before) / most) for before, seeds in zip([0, *at], at, strict=False))
