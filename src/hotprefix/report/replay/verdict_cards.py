"""The answer first. Owns: the verdict cards, with each claim next to its numbers, intervals and rule.

Rules: the reason shown is the verdict's own. Every check is shown with what it rests on, also the checks that
hold. An interval is at the verdict's own level. A chart shows relative changes only.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from markupsafe import Markup

from hotprefix.lab.experiment.result import ExperimentResult
from hotprefix.lab.hypothesis import Kind
from hotprefix.lab.metric_names import METRICS
from hotprefix.lab.verdict import ClaimState, Finding, Outcome, Verdict
from hotprefix.report.replay.charts import intervals
from hotprefix.report.replay.words import OUTCOMES, finding_change, judged, title, value, wanted

KINDS = {
    Kind.MECHANISM: "mechanism: does it do what it is for?",
    Kind.SERVICE: "service: does the gain reach requests?",
    Kind.HARM: "harm: at whose cost?",
    Kind.NULL: "expected null: is there no effect where none can be?",
}
TONES = {
    Outcome.SUPPORTED: "good",
    Outcome.REFUTED: "bad",
    Outcome.INCONCLUSIVE: "open",
    Outcome.AS_EXPECTED: "calm",
}
_STATES = {
    ClaimState.HOLDS: "good",
    ClaimState.FAILS: "bad",
    ClaimState.OPEN: "",
    ClaimState.NOT_MEASURED: "",
}


def headline(result: ExperimentResult) -> str:
    """How many claims had which outcome."""
    if not result.verdicts:
        return "No claims were registered: what follows describes, it decides nothing."
    counts = Counter(v.outcome for v in result.verdicts)
    parts = [f"{counts[one]} {OUTCOMES[one]}" for one in Outcome if counts[one]]
    claims = "1 claim" if len(result.verdicts) == 1 else f"{len(result.verdicts)} claims"
    return f"Of {claims} registered before the replay: {'; '.join(parts)}."


def cards(result: ExperimentResult) -> list[dict[str, Any]]:
    return [_card(verdict) for verdict in result.verdicts]


def _card(verdict: Verdict) -> dict[str, Any]:
    one = verdict.hypothesis
    return {
        "id": one.id,
        "claim": one.claim,
        "why": one.why,
        "outcome": OUTCOMES[verdict.outcome],
        "tone": TONES[verdict.outcome],
        "reason": f"{_named(verdict)}.",
        "kind": KINDS[one.kind],
        "where": f"{one.arm} against {one.baseline} in {one.condition}",
        "level": f"{verdict.level * 100:.4g} %",
        "judged": judged(verdict),
        "rows": [_row(found) for found in verdict.findings],
        "svg": _chart(verdict),
    }


def _named(verdict: Verdict) -> str:
    """The reason, with the names of metrics that people use, and with a capital first letter."""
    reason = verdict.reason
    names = {f.tolerance.metric for f in verdict.findings} | {n.metric for n in verdict.hypothesis.needs}
    for name in sorted(names, key=len, reverse=True):
        reason = reason.replace(name, title(name))
    return reason[:1].upper() + reason[1:]


def _row(found: Finding) -> dict[str, str]:
    metric = found.tolerance.metric
    return {
        "metric": title(metric),
        "wanted": wanted(found),
        "base": value(metric, found.base),
        "arm": value(metric, found.arm),
        "change": finding_change(found),
        "rests": _rests(found),
        "state": str(found.state),
        "tone": _STATES[found.state],
    }


def _rests(found: Finding) -> str:
    """What the check rests on; empty if it was not measured."""
    if found.state is ClaimState.NOT_MEASURED:
        return ""
    return f"{found.rests_on}, {found.sections} sections" if found.sections else found.rests_on


def _chart(verdict: Verdict) -> Markup | None:
    """The relative changes with their intervals; None if there are none."""
    rows, limits = [], []
    for found in verdict.findings:
        if found.tolerance.scale == "relative" and found.interval is not None and found.value is not None:
            metric = found.tolerance.metric
            rows.append((title(metric), found.value, *found.interval, _STATES[found.state]))
            worse = 1 if METRICS[metric].better == "lower" else -1
            amount = found.tolerance.amount * (worse if found.want == "not_worse" else -worse)
            limits.append((-amount, amount) if found.want == "equal" else (amount,))
    name = f"changes {verdict.hypothesis.id}"
    return Markup(intervals(name, rows, limits)) if rows else None
