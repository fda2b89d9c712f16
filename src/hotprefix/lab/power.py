"""How many seeds would decide a claim. Owns: the projection of a comparison to more seeds.

Rules: the estimates and the spread among sections are taken to stay as they are: the sections that were seen
are repeated until there are as many as more seeds would give, and the claim is judged again by its own rules.
It is a plan for the next run, not a promise: estimates move. The number is one of a grid with steps of a
tenth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from hotprefix.lab.stats import SECTIONS, Comparison
from hotprefix.lab.verdict import Outcome, Verdict, decide

MOST: Final = 1000


def seeds_to_decide(verdict: Verdict, comparisons: Mapping[str, Comparison]) -> int | None:
    """About how many seeds, judged once, decide an open claim; None where none up to MOST would. comparisons:
    that it was judged by."""
    if verdict.settled or not verdict.seeds:
        return None
    claim = replace(verdict.hypothesis, needs=())
    names = {found.tolerance.metric for found in verdict.findings}
    for seeds in _grid(verdict.seeds):
        projected = {name: _with(comparisons[name], seeds) for name in names}
        if decide(claim, projected, ()).outcome is not Outcome.INCONCLUSIVE:
            return seeds
    return None


def sections_of(seeds: int) -> int:
    """How many sections so many seeds are cut into."""
    return seeds if seeds >= SECTIONS else -(-SECTIONS // seeds) * seeds


def _grid(seeds: int) -> Iterator[int]:
    while (seeds := max(seeds + 1, round(1.1 * seeds))) <= MOST:
        yield seeds


def _with(found: Comparison, seeds: int) -> Comparison:
    """The comparison as more seeds would show it."""
    if not found.sections:
        return found
    cut = np.resize(np.array(found.sections), (sections_of(seeds), 2))
    return replace(found, sections=tuple((float(b), float(a)) for b, a in cut), seeds=seeds)
