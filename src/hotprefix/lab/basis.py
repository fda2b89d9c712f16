"""What a figure rests on. Owns: which part of the model each metric needs, and when a replay does not measure
it.

Rules:
1. A figure that follows from what the model leaves out, or that every arm has by construction, is *not
   measured*. A check of it could not fail, so it supports nothing.
2. A replay says what it models (`Models`). None means that nothing is known to be missing.

Example: if a cost model gives the scheduler no price, the scheduler's share of time is 0 in every arm. The
claim "refresh does not cost the scheduler more" would then hold whatever refresh costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hotprefix.cost.model import CostModel
from hotprefix.definitions import GROUPS, Slo
from hotprefix.kernel.config import KernelConfig, Refresh
from hotprefix.lab.metric_names import METRICS

Models = Mapping[str, Mapping[str, str]]
"""Part of the model -> the settings for which its figures are true (setting: value). A part that is absent is
not modelled. `RUN` is not a part: it names the run, so that a comparison of a run with itself can be
told."""

RUN: Final = "run"
SCHEDULER, L2, L3, FLEET, HORIZON, ARRIVALS = "scheduler", "L2", "L3", "fleet", "horizon", "arrivals"
_WHY: Final = {
    SCHEDULER: "the cost model gives the scheduler no price (scheduler_* are 0)",
    L2: "there is no L2",
    L3: "there is no L3",
    FLEET: "there is one instance",
    HORIZON: "without load.horizon_s every request is served to its end",
    ARRIVALS: "which requests arrive is the trace's, in every arm alike",
}
_PART: Final = {
    "scheduler_share": SCHEDULER,
    "restored_l2_share": L2, "cached_l2_share": L2, "restored_l3_share": L3, "cached_l3_share": L3,
    **dict.fromkeys(
        ("load_imbalance", "cached_tps_spread", "available_share", "captured_share", "copied_tokens",
         "prediction_bias_s", "prediction_error_p50_s", "prediction_error_p95_s"), FLEET
    ),
    "unfinished": HORIZON,
    "requests": ARRIVALS,
}  # fmt: skip
# Without one of these parts there is no figure. Without any other part there is a true one, but it says
# nothing: the replay's setting alone decides it.
_ABSENT: Final = (SCHEDULER, L2, L3)
_OF_OBJECTIVES: Final = ("good_requests", "slo_share", "goodput_rps", "worst_instance_slo_share")
_TIMED: Final = (
    "timeouts", "timeout_share", *_OF_OBJECTIVES, "prefill_busy_share", "decode_busy_share",
    "scheduler_share", "normalised_load_mean", "normalised_load_worst", "load_imbalance",
)  # fmt: skip
_UNPRICED: Final = (
    "order",
    "eviction",
    "publication",
    "flight",
)  # settings that change the scheduler's work and have no price in the cost model


def modelled(
    kernel: KernelConfig, cost: CostModel, *, run: str, instances: int, arrivals_vary: bool, horizon: bool
) -> Models:
    """What a replay models.

    run: its key.
    instances: how many it has.
    arrivals_vary: whether arms may see different requests. They do in a closed loop with a horizon, because a
    quicker arm gets further.
    horizon: whether the replay stops at a time.
    """
    prices = (cost.scheduler_base_s, cost.scheduler_running_s, cost.scheduler_waiting_s)
    tiers = kernel.tiers
    parts = {
        SCHEDULER: any(prices), L2: tiers is not None, L3: tiers is not None and tiers.storage,
        FLEET: instances > 1, HORIZON: horizon, ARRIVALS: arrivals_vary,
    }  # fmt: skip
    found: dict[str, Mapping[str, str]] = {part: {} for part, there in parts.items() if there}
    if SCHEDULER in found:
        found[SCHEDULER] = _priced_for(kernel, cost)
    return {RUN: {"key": run}, **found}


def _priced_for(kernel: KernelConfig, cost: CostModel) -> Mapping[str, str]:
    """The settings that change the scheduler's work and not its price, with their values."""
    priced = cost.refresh_touch_s is not None and kernel.refresh is not Refresh.QUEUE_INFORMED
    return {
        **{f"kernel.{name}": str(getattr(kernel, name)) for name in _UNPRICED},
        "kernel.refresh": "priced" if priced else str(kernel.refresh),
    }


def absent(metric: str, models: Models | None) -> bool:
    """Whether a replay has no figure of that metric."""
    part = _part(metric)
    return models is not None and part in _ABSENT and part not in models


def not_measured(metric: str, base: Models | None, arm: Models | None, slo: Slo) -> str:
    """Why two replays do not measure how a metric differs between them; empty if they do."""
    if METRICS[metric].own in _OF_OBJECTIVES and not slo.limits:
        return "no objective is given (slo.ttft_s, tpot_s or completion_s); finished_share needs none"
    if base is None or arm is None:
        return ""
    if base[RUN] == arm[RUN]:
        return "arm and baseline have the same settings: they are one run, told twice"
    part = _part(metric)
    if not part:
        return ""
    if part not in base or part not in arm:
        return _WHY[part]
    differ = [name for name, value in base[part].items() if arm[part].get(name) != value]
    return f"the cost model gives no price to what they differ in ({', '.join(differ)})" if differ else ""


def rests_on(metric: str) -> str:
    """What a metric's figures are made of, in words."""
    found = METRICS[metric]
    timed = found.own in _TIMED or found.unit == "seconds" or found.unit.endswith("/s")
    return "times by the cost model" if timed else "counted by the kernel"


def empty_group(metric: str, empty: frozenset[str]) -> bool:
    """Whether a metric is of a group that has no requests. empty: the groups that have none."""
    assert empty <= set(GROUPS)
    return METRICS[metric].group in empty and METRICS[metric].own != "requests"


def _part(metric: str) -> str:
    own = METRICS[metric].own
    return _PART.get(own, "")
