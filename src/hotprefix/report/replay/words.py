"""How a replay's figures are written. Owns: the wording of values by unit, of changes and of intervals.

Rules: a missing figure is a dash. A figure that was not measured, or that lies beyond the replay's end, says
so. A minus is a minus sign. Units are short enough for a phone.
"""

from __future__ import annotations

import math

from hotprefix.lab.interval import Interval
from hotprefix.lab.metric_names import METRICS
from hotprefix.lab.verdict import ClaimState, Finding, Outcome, Verdict
from hotprefix.report.figure_text import DASH, seconds
from hotprefix.report.replay.lookup import Figure

BEYOND = "> end"
NOT_MEASURED = "not measured"
NO_LIMIT = "no limit"
_LARGE = ((1e12, 1e12, " T"), (1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e4, 1e3, " k"))  # from, unit, name

_CAPITALS = {name: name.upper() for name in ("ttft", "tpot", "slo", "l1", "l2", "l3")} | {
    "tps": "tokens/s", "rps": "requests/s",
}  # fmt: skip

_SMALL = 0.0005  # smaller shares need more than one decimal in percent

OUTCOMES = {
    Outcome.SUPPORTED: "supported",
    Outcome.REFUTED: "refuted",
    Outcome.INCONCLUSIVE: "inconclusive",
    Outcome.AS_EXPECTED: "no effect, as expected",
}
TITLES = {
    "queue_wait_mean_s": "queue wait",
    "enqueue_hit_tokens": "hit on arrival",
    "admission_hit_tokens": "hit at admission",
    "net_l1_hit_loss_share": "net L1 hit loss",
    "retained_share": "retained",
    "regained_share": "in L1 again",
    "restored_l2_share": "restored L2",
    "restored_l3_share": "restored L3",
    "recomputed_share": "recomputed",
    "reuse_share": "reused",
    "cached_l1_share": "from L1",
    "cached_l2_share": "from L2",
    "cached_l3_share": "from L3",
    "computed_per_request": "computed / request",
    "duplication_factor": "duplication",
    "available_share": "available",
    "captured_share": "captured",
}


def title(metric: str) -> str:
    """`cold.ttft_p95_s` -> cold TTFT p95."""
    group, _, own = metric.rpartition(".")
    name = TITLES.get(own) or own.removesuffix("_s").replace("_", " ")
    name = " ".join(_CAPITALS.get(word, word) for word in name.split())
    return f"{group} {name}" if group else name


def value(metric: str, amount: float | None, *, beyond: bool = False, not_measured: bool = False) -> str:
    """An amount in the metric's unit. beyond, not_measured: the reason if there is no amount."""
    if amount is None:
        return BEYOND if beyond else NOT_MEASURED if not_measured else DASH
    if math.isinf(amount):
        return NO_LIMIT
    unit = METRICS[metric].unit
    text = amount_of(unit, abs(amount))
    return f"−{text}" if amount < 0 else text


def amount_of(unit: str, amount: float) -> str:
    """A short form of an amount >= 0."""
    if unit == "seconds":
        return seconds(amount)
    if unit == "share":
        return f"{amount * 100:.2g} %" if 0 < amount < _SMALL else f"{amount * 100:.1f} %"
    if unit in ("bytes", "bytes/s"):
        text = large(amount)
        return f"{text}{'' if text[-1].isalpha() else ' '}B{unit.removeprefix('bytes')}"
    if unit == "ratio" or unit.endswith("/s"):
        return f"{amount:.3g}" if 0 < amount < 1 else large(amount, 2)
    return large(amount, 0 if amount == round(amount) else 1)


def large(amount: float, decimals: int = 0) -> str:
    """12,345,678 -> 12.3 M. decimals: of an amount that is written in full."""
    for start, unit, name in _LARGE:
        if abs(amount) >= start:
            return f"{amount / unit:,.1f}".removesuffix(".0") + name
    return f"{amount:,.{decimals}f}"


def signed(share: float) -> str:
    """+12.3 %, with fewer decimals as it grows."""
    if math.isinf(share):
        return NO_LIMIT
    percent = share * 100
    text = f"{percent:+,.1f}" if abs(percent) < 10 else f"{percent:+,.0f}"
    return text.replace("-", "−")


def change(figure: Figure) -> str:
    """A change with its interval: −12 % [−20, −4]."""
    if figure.not_measured and figure.value is not None:
        return f"change {NOT_MEASURED}"
    if figure.relative is None or (figure.relative == 0 and figure.interval in (None, (0.0, 0.0))):
        return ""
    text = f"{signed(figure.relative)} %"
    if figure.interval is None:
        return text
    return f"{text} [{signed(figure.interval[0])}, {signed(figure.interval[1])}]"


def finding_change(found: Finding) -> str:
    """A check's change on its own scale."""
    relative = found.tolerance.scale == "relative"
    if found.state is ClaimState.NOT_MEASURED:
        return NOT_MEASURED
    if found.value is None:
        return DASH
    if relative:
        return change(Figure(found.tolerance.metric, None, relative=found.value, interval=found.interval))
    metric = found.tolerance.metric
    return value(metric, found.value) + _in_unit(metric, found.interval)


def _in_unit(metric: str, interval: Interval | None) -> str:
    return "" if interval is None else f" [{value(metric, interval[0])}, {value(metric, interval[1])}]"


def judged(verdict: Verdict) -> str:
    """How many seeds the verdict rests on, at which level, and how many would decide."""
    if not verdict.findings:
        return ""
    seeds = "one seed" if verdict.seeds == 1 else f"{verdict.seeds} seeds"
    text = f"Judged by {seeds} at {verdict.level * 100:.4g} % for each check."
    if verdict.would_decide is not None:
        return (
            f"{text} About {verdict.would_decide} seeds would decide, if differences and spread stay as they "
            f"are: --until-decided {2 * verdict.would_decide}."
        )
    return text


def wanted(found: Finding) -> str:
    """What the check asks for, in words."""
    relative = found.tolerance.scale == "relative"
    metric, limit = found.tolerance.metric, found.tolerance.amount
    amount = f"{limit * 100:g} %" if relative else value(metric, limit)
    better = {"lower": "fall", "higher": "rise"}.get(METRICS[metric].better, "change")
    worse = {"lower": "rise", "higher": "fall"}.get(METRICS[metric].better, "change")
    return {
        "improves": f"must {better}" + (f" by {amount} or more" if limit else ""),
        "reaches": f"{better}s" + (f" by {amount} or more" if limit else "") + " (one of these must)",
        "not_worse": f"must not {worse} by more than {amount}",
        "equal": f"must stay within ±{amount}",
    }[found.want]
