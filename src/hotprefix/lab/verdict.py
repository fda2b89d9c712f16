"""Whether a claim holds. Owns: the rules from intervals to the `Verdict` of a `Hypothesis`.

Rules (docs/decisions/0012-verdicts.md, 0018-intervals.md):
1. Every check compares an interval with an amount that was stated beforehand, and *holds*, *fails* or stays
   *open*. A point estimate alone decides nothing.
2. `improves`, `reaches`: the check holds if the interval excludes "no change" and the estimate reaches the
   stated amount. It fails if the interval excludes that amount.
3. `not_worse`, `equal`: the check holds if the whole interval is within the tolerance (equivalence by
   interval). It fails if the whole interval is outside.
4. A figure of served requests does not speak for the side that finished fewer (`Comparison.flattered`); the
   check stays open.
5. If there are so few sections that chance could give them all one sign, the check stays open at that level.
6. What the replays do not measure is *not measured*: it supports no claim and refutes none.

Example: "TTFT improves by 5 %". With an estimate of 7 % and an interval from 2 to 12 % it holds. With an
interval from -1 to 15 % it is open. With an interval from 1 to 4 % it fails: there is a gain, but not the
stated one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from hotprefix.lab.basis import rests_on
from hotprefix.lab.hypothesis import Hypothesis, Kind, Need, Tolerance
from hotprefix.lab.interval import Interval, fewest
from hotprefix.lab.metric_names import METRICS
from hotprefix.lab.stats import Comparison


class Outcome(StrEnum):
    """What became of a claim. AS_EXPECTED: a null hypothesis whose intervals lie within the tolerance."""

    SUPPORTED = "supported"
    REFUTED = "refuted"
    INCONCLUSIVE = "inconclusive"
    AS_EXPECTED = "as_expected"


class ClaimState(StrEnum):
    HOLDS = "holds"
    FAILS = "fails"
    OPEN = "open"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check.

    want: improves | reaches | not_worse | equal.
    tolerance: the metric, and the amount that was stated.
    state: what came of it.
    base, arm: the figures; None if there is none.
    value: the change, on the tolerance's scale; None if there is none.
    interval: of the change, at the verdict's level; None if there is none.
    text: why, in words.
    rests_on: what the figure is made of.
    sections: from how many sections the interval is.
    """

    want: str
    tolerance: Tolerance
    state: ClaimState
    base: float | None
    arm: float | None
    value: float | None
    interval: Interval | None
    text: str
    rests_on: str = ""
    sections: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a claim holds.

    outcome: what became of it.
    reason: one sentence for people.
    findings: its checks.
    level: the confidence of each interval.
    seeds: by how many seeds it is judged.
    settled: more seeds cannot change it, or must not, because it was decided.
    would_decide: about how many seeds would decide an inconclusive one (lab.power); None if that cannot be
    told.
    """

    hypothesis: Hypothesis
    outcome: Outcome
    reason: str
    findings: tuple[Finding, ...]
    level: float
    seeds: int = 0
    settled: bool = True
    would_decide: int | None = None


def decide(
    hypothesis: Hypothesis,
    comparisons: Mapping[str, Comparison],
    baseline: Sequence[Mapping[str, float | None]],
    *,
    spend: float = 1.0,
) -> Verdict:
    """The verdict on a hypothesis.

    comparisons: those of its arm and condition, by metric.
    baseline: the baseline's metrics, one mapping for each seed.
    spend: the share of the error rate that this look at the data may use.
    """
    level = hypothesis.level_of(spend)
    found = tuple(
        _check(want, tolerance, comparisons[tolerance.metric], level)
        for want in ("improves", "reaches", "not_worse", "equal")
        for tolerance in getattr(hypothesis, want)
    )
    missing = _unmet(hypothesis.needs, baseline)
    if missing:
        outcome, reason = Outcome.INCONCLUSIVE, f"the precondition is not met: {missing}"
    else:
        outcome, reason = rule(hypothesis, found)
    seeds = max((comparisons[f.tolerance.metric].seeds for f in found), default=0)
    blind = any(f.state is ClaimState.NOT_MEASURED for f in found)
    settled = outcome is not Outcome.INCONCLUSIVE or bool(missing) or blind
    return Verdict(hypothesis, outcome, reason, found, level, seeds, settled)


def rule(hypothesis: Hypothesis, found: Sequence[Finding]) -> tuple[Outcome, str]:
    """(outcome, reason): what the checks together say of the claim."""
    return _RULES[hypothesis.kind](found)


def _unmet(needs: Sequence[Need], baseline: Sequence[Mapping[str, float | None]]) -> str:
    """The first need that a seed does not meet, in words; empty if all are met."""
    for need in needs:
        values = [figures[need.metric] for figures in baseline]
        measured = [v for v in values if v is not None]
        if not measured or len(measured) < len(values):
            return f"{need.metric} was not measured in the baseline"
        if need.at_least is not None and min(measured) < need.at_least:
            return f"{need.metric} is {min(measured):g} in the baseline, at least {need.at_least:g} is needed"
        if need.at_most is not None and max(measured) > need.at_most:
            return f"{need.metric} is {max(measured):g} in the baseline, at most {need.at_most:g} is allowed"
    return ""


def _check(want: str, tolerance: Tolerance, found: Comparison, level: float) -> Finding:
    scale = tolerance.scale
    interval, value = found.interval(level, scale), found.value(scale)
    if value is None and found.value("difference") == 0:
        value, interval = 0.0, found.interval(level)  # 0 against 0 is no change, on any scale
        interval = interval if interval == (0.0, 0.0) else None
    state, text = _even(want, found, *_state(want, tolerance, found, value, interval, level))
    return Finding(
        want, tolerance, state, found.base, found.arm, value, interval, text, rests_on(found.metric),
        len(found.sections),
    )  # fmt: skip


def _state(
    want: str, tolerance: Tolerance, found: Comparison, value: float | None, interval: Interval | None,
    level: float,
) -> tuple[ClaimState, str]:  # fmt: skip
    """(state, reason): whether what is wanted holds."""
    name = tolerance.metric
    if found.not_measured:
        return ClaimState.NOT_MEASURED, f"{name}: not measured, {found.not_measured}"
    if found.beyond in ("arm", "base"):
        return _state_beyond(want, found)
    if not found.beyond and (found.base is None or found.arm is None):
        return ClaimState.NOT_MEASURED, f"{name}: not measured, a run has no such figure"
    if interval is None or value is None:
        return ClaimState.OPEN, f"{name}: no interval ({found.why_none(level)})"
    if len(found.sections) < fewest(level):
        return ClaimState.OPEN, (
            f"{name}: {len(found.sections)} sections decide nothing at {level * 100:.4g} %, "
            f"{fewest(level)} may"
        )
    return compared(want, tolerance, value, interval)


def compared(want: str, tolerance: Tolerance, value: float, interval: Interval) -> tuple[ClaimState, str]:
    """(state, reason): what an interval says of what is wanted."""
    name = tolerance.metric
    # Gains are counted upwards, whichever way the metric is better.
    (low, high), gain = interval, value
    if METRICS[name].better == "lower":
        (low, high), gain = (-high, -low), -gain
    amount = tolerance.amount
    if want == "equal":
        if -amount <= low and high <= amount:
            return ClaimState.HOLDS, f"{name}: within the tolerance"
        outside = low > amount or high < -amount
        return (
            ClaimState.FAILS if outside else ClaimState.OPEN
        ), f"{name}: {'changes' if outside else 'may change'}"
    if want == "not_worse":
        if low >= -amount:
            return ClaimState.HOLDS, f"{name}: not worse than tolerated"
        worse = high < -amount
        return (
            ClaimState.FAILS if worse else ClaimState.OPEN
        ), f"{name}: {'' if worse else 'may be '}worse than tolerated"
    verb = "fall" if METRICS[name].better == "lower" else "rise"
    if low > 0 and gain >= amount:
        return ClaimState.HOLDS, f"{name}: {verb}s"
    if high < amount or high <= 0:
        return ClaimState.FAILS, f"{name}: does not {verb}{' by what matters' if low > 0 else ''}"
    return ClaimState.OPEN, f"{name}: may or may not {verb}{' by what matters' if low > 0 else ''}"


def _state_beyond(want: str, found: Comparison) -> tuple[ClaimState, str]:
    """The state if one of the two figures lies beyond the replay's end, which is worse than any figure."""
    name, worse = found.metric, found.beyond == "arm"
    if want == "equal":
        return ClaimState.FAILS, f"{name}: beyond the replay's end in one of the two only"
    text = f"{name}: beyond the replay's end in the {'arm' if worse else 'baseline'} only"
    return (ClaimState.FAILS if worse else ClaimState.HOLDS), text


def _even(want: str, found: Comparison, state: ClaimState, text: str) -> tuple[ClaimState, str]:
    """What was found, or open if it speaks for the side that finished fewer requests."""
    speaks_for = {ClaimState.HOLDS: "arm", ClaimState.FAILS: "base"}.get(state)
    if not found.flattered or not found.finished or speaks_for is None:
        return state, text
    if want != "equal" and found.flattered != speaks_for:
        return state, text
    base, arm = (f"{share * 100:.1f} %" for share in found.finished)
    return ClaimState.OPEN, (
        f"{text}, but the arm finished {arm} of its requests, the baseline {base}, and this figure does not "
        "count the others in full"
    )


def _of(found: Sequence[Finding], *wants: str) -> list[Finding]:
    return [f for f in found if f.want in wants]


def _in(found: Sequence[Finding], *states: ClaimState) -> str:
    """The texts of the findings in these states; empty if there are none."""
    return "; ".join(f.text for f in found if f.state in states)


def _every(found: Sequence[Finding]) -> tuple[Outcome, str]:
    """The outcome of a claim all of whose checks must hold; one that fails refutes it."""
    if failed := _in(found, ClaimState.FAILS):
        return Outcome.REFUTED, failed
    if left := _in(found, ClaimState.OPEN, ClaimState.NOT_MEASURED):
        return Outcome.INCONCLUSIVE, left
    return Outcome.SUPPORTED, _in(found, ClaimState.HOLDS)


def _harm(found: Sequence[Finding]) -> tuple[Outcome, str]:
    outcome, reason = _every(found)
    gained = _in(_of(found, "improves"), ClaimState.HOLDS)
    if gained and _in(_of(found, "not_worse"), ClaimState.FAILS):
        reason = f"{gained}, but {reason}"
    return outcome, reason


def _service(found: Sequence[Finding]) -> tuple[Outcome, str]:
    outcome, reason = _every(_of(found, "improves", "not_worse"))
    if outcome is Outcome.REFUTED:
        return outcome, reason
    reaches = _of(found, "reaches")
    if all(f.state is ClaimState.FAILS for f in reaches):
        return Outcome.REFUTED, f"the gain does not reach service: {_in(reaches, ClaimState.FAILS)}"
    if outcome is Outcome.INCONCLUSIVE:
        return outcome, reason
    if held := _in(reaches, ClaimState.HOLDS):
        return Outcome.SUPPORTED, f"{reason}; {held}"
    left = _in(reaches, ClaimState.OPEN, ClaimState.NOT_MEASURED)
    return Outcome.INCONCLUSIVE, f"whether the gain reaches service is open: {left}"


def _null(found: Sequence[Finding]) -> tuple[Outcome, str]:
    outcome, reason = _every(found)
    if outcome is Outcome.SUPPORTED:
        return Outcome.AS_EXPECTED, f"no gain and no harm, as expected: {reason}"
    return outcome, reason


_RULES: Final = {Kind.MECHANISM: _every, Kind.SERVICE: _service, Kind.HARM: _harm, Kind.NULL: _null}
