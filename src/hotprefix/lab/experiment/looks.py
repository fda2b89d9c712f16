"""When the runs so far are looked at. Owns: the looks of an experiment that goes on until its claims are
decided.

Rules:
1. The number of seeds at each look is fixed before the first run: the seeds asked for, twice as many, four
   times as many, up to the most.
2. A look may use a share of a claim's error rate: its new seeds as a share of the most. So all looks together
   use no more than the whole, and stopping at the first decisive look errs no more often than stated (the
   union bound; nothing is assumed about how looks depend on each other).
3. What is decided stays so.

Example: with 5 seeds at first and 40 at most, the looks are after 5, 10, 20 and 40 seeds. Of an error rate of
5 % they use 0.625, 0.625, 1.25 and 2.5 %.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Look:
    """One look. seeds: the runs of seeds 1 to that are looked at. spend: the share of the error rate that it
    may use."""

    seeds: int
    spend: float


def looks(first: int, most: int | None) -> tuple[Look, ...]:
    """All looks, in order. first: seeds of the first look. most: seeds of the last, >= first; None = one
    look."""
    if most is None:
        return (Look(first, 1.0),)
    at = [first]
    while at[-1] < most:
        at.append(min(2 * at[-1], most))
    return tuple(Look(seeds, (seeds - before) / most) for before, seeds in zip([0, *at], at, strict=False))
