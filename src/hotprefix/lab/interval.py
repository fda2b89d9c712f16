"""How far the truth may be from what was seen. Owns: the interval of a difference and of a ratio of two arms.

Rules (docs/decisions/0018-intervals.md):
1. The data are paired sections. The estimate is the figure of the whole replays, and the spread is taken
   around it (sectioning, Asmussen and Glynn 2007), so that a bias of small sections widens the interval.
2. An interval is Student's t over the sections' differences, widened to every value that t excludes and the
   exact sign-flip test keeps. Student's t gives the width. The sign flips keep the level if sections take few
   values (for example if equal arms differ by -1 or +1), whatever their distribution is, as long as it is
   symmetric.
3. A ratio's interval has every r for which arm - r * base may be 0 on average (Fieller 1954). So it agrees
   with the difference on whether there is a change, and what varies in both arms alike does not widen it. If
   the baseline itself may be 0, a ratio has no upper end: infinity.
4. Nothing is drawn anew from call to call: equal data give equal intervals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Floats = NDArray[np.float64]
Interval = tuple[float, float]

METHOD: Final = "Student's t over paired sections, widened where the exact sign-flip test asks for it"
_ALL_SETS: Final = 12  # with at most this many sections every set of them is looked at
_SETS: Final = 4095
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Paired:
    """What is known of two arms. base, arm: the figures of the whole. sections: the same figures of each
    section, float64[sections, 2] as (base, arm), on the scale of the whole."""

    base: float
    arm: float
    sections: Floats


def fewest(confidence: float) -> int:
    """The fewest sections from which a level can be reached. With fewer, chance alone gives all of them
    one sign too often: the n sections of two equal arms all have the same sign with a probability of 2 /
    2**n. At 95 % that asks for 6 sections."""
    return math.ceil(1 - math.log2(1 - confidence) - _ROUNDING)


def difference(pair: Paired, confidence: float) -> Interval:
    """The interval of arm - base. Needs two sections."""
    base, arm = pair.sections.T
    each, centre = arm - base, pair.arm - pair.base
    reach = math.sqrt(_factor(len(each), confidence) * float(((each - centre) ** 2).sum()))
    flips = _sign_flips(each, np.ones_like(each), confidence)
    return float(min(centre - reach, flips[0])), float(max(centre + reach, flips[1]))


def ratio(pair: Paired, confidence: float, *, signed: bool) -> Interval:
    """The interval of arm / base, for a base that is not 0; its upper end may be infinity. signed: the figure
    may be negative; otherwise no ratio below 0 is possible. Needs two sections."""
    sign = 1.0 if pair.base > 0 else -1.0
    pair = Paired(sign * pair.base, sign * pair.arm, sign * pair.sections)
    base, arm = pair.sections.T
    low, high = _fieller(pair, confidence)
    flips = _sign_flips(arm, base, confidence)
    low, high = min(low, flips[0]), max(high, flips[1])
    return float(low if signed else max(low, 0.0)), float(high)


def _factor(count: int, confidence: float) -> float:
    """The factor which, times the sum of squared deviations, gives the square of half the width of Student's
    interval."""
    return float(stdtrit(count - 1, (1 + confidence) / 2)) ** 2 / (count - 1) / count


def _fieller(pair: Paired, confidence: float) -> Interval:
    """All r for which Student's t keeps arm - r * base = 0. With u = r - arm / base these are the u of
    square * u**2 + 2 * linear * u <= free."""
    base, arm = pair.sections.T
    at, factor = pair.arm / pair.base, _factor(len(base), confidence)
    off_base = base - pair.base
    off = arm - pair.arm - at * off_base
    square = pair.base**2 - factor * float((off_base**2).sum())
    linear, free = factor * float((off * off_base).sum()), factor * float((off**2).sum())
    inside = linear**2 + square * free
    if abs(square) <= _ROUNDING * pair.base**2 or inside < 0:
        return -math.inf, math.inf
    ends = sorted((-linear + side * math.sqrt(inside)) / square for side in (-1, 1))
    if square > 0:
        return at + ends[0], at + ends[1]
    # The baseline's mean may be 0: what is excluded lies between the ends, on one side of the estimate. An
    # end there excludes no change only if the difference does.
    same = 1 - at
    kept = square * same**2 + 2 * linear * same <= free
    low = at + ends[1] if ends[1] <= 0 and not (kept and at + ends[1] > 1) else -math.inf
    high = at + ends[0] if ends[0] >= 0 and not (kept and at + ends[0] < 1) else math.inf
    return low, high


def _sign_flips(top: Floats, bottom: Floats, confidence: float) -> Interval:
    """All r for which the sign-flip test keeps top - r * bottom = 0. By Hartigan (1969) flipping the signs of
    a set of sections outdoes what was seen if that set's own ratio lies beyond r. The interval is empty if
    there are too few sections for that level. A set whose bottom is 0 lies above every r if its top does. Any
    other set whose bottom is not above 0 says nothing, so it keeps every r."""
    sets = _sets(len(top))
    rank = int((1 - confidence) / 2 * (len(sets) + 1) + _ROUNDING)
    if not rank:
        return math.inf, -math.inf
    # Not a product of matrices: that would wake every thread of BLAS for a tenth of a millisecond's work.
    tops, bottoms = (np.einsum("sn,n->s", sets, each) for each in (top, bottom))
    tells = bottoms > 0
    ratios = np.divide(tops, bottoms, out=np.full(len(sets), -np.inf), where=tells)
    ratios[(bottoms == 0) & (tops > 0)] = np.inf
    low = np.partition(ratios, rank - 1)[rank - 1]
    ratios[~tells] = np.inf
    high = np.partition(ratios, len(sets) - rank)[len(sets) - rank]
    return float(low), float(high)


@lru_cache(maxsize=16)
def _sets(count: int) -> Floats:
    """Sets of sections that are not empty, 0 and 1, float64[sets, sections]: all, or _SETS drawn once."""
    if count <= _ALL_SETS:
        numbers = np.arange(1, 2**count)[:, None]
        return ((numbers >> np.arange(count)) & 1).astype(np.float64)
    drawn = np.random.default_rng(0).random((_SETS, count)) < 0.5
    return drawn[drawn.any(axis=1)].astype(np.float64)
