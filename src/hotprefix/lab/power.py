"""How many seeds would decide a claim. Owns: the projection of a comparison to more seeds.

Rules:
1. The estimates and the spread among sections are assumed to stay as they are. The sections that were seen
   are repeated until there are as many as more seeds would give, and the claim is judged again by its own
   rules.
2. The answer is a plan for the next run, not a promise, because estimates move.
3. The number is one of a grid with steps of a tenth.
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
    """About how many seeds, judged once, would decide an open claim; None if no number up to MOST would.
    comparisons: those by which it was judged."""
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
    """Into how many sections that many seeds are cut."""
    return seeds if seeds >= SECTIONS else -(-SECTIONS // seeds) * seeds


def _grid(seeds: int) -> Iterator[int]:
    while (seeds := max(seeds + 1, round(1.1 * seeds))) <= MOST:
        yield seeds


def _with(found: Comparison, seeds: int) -> Comparison:
    """The comparison as that many seeds would show it."""
    if not found.sections:
        return found
    cut = np.resize(np.array(found.sections), (sections_of(seeds), 2))
    return replace(found, sections=tuple((float(b), float(a)) for b, a in cut), seeds=seeds)
