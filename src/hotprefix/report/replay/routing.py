"""How requests were spread over instances, condition by condition. Owns: the routing tables and charts.

Rules: there is a section only for a condition with several instances. Tables are those of `conditions`:
arms as rows, empty columns left out. Charts show the first seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from markupsafe import Markup

from hotprefix.lab.experiment.result import ExperimentResult, FleetRun
from hotprefix.report.replay import charts
from hotprefix.report.replay.conditions import GROUPS, Cell, table
from hotprefix.report.replay.fleet_tables import copied_by_reason, loads, predictions
from hotprefix.report.replay.lookup import Lookup
from hotprefix.report.replay.words import amount_of

FLEET: Final = (
    "goodput_rps", "ttft_mean_s", "ttft_p95_s", "worst_instance_ttft_p95_s", "reuse_share", "load_imbalance",
    "duplication_factor", "cached_tps_spread", "failed_over", "prediction_bias_s", "prediction_error_p50_s",
    "prediction_error_p95_s",
)  # fmt: skip
HITS: Final = ("available_share", "captured_share", "reuse_share")
PREDICTED: Final = "predicted"  # the arm whose predictions are drawn, if there is one of this name
MULTIPLES: Final = 4  # arms whose loads are drawn


def routing_section(result: ExperimentResult, lookup: Lookup, condition: str) -> dict[str, Any]:
    """The tables and charts of a condition; empty if its runs have one instance."""
    fleets = {arm.name: result.fleets[condition, arm.name] for arm in result.arms
              if (condition, arm.name) in result.fleets}  # fmt: skip
    if not fleets:
        return {}
    arms = list(fleets)
    hits = table(lookup, condition, arms, "Where hits went", HITS, GROUPS, {"reuse_share": "delivered"})
    first = {arm: min(runs, key=lambda run: run.seed) for arm, runs in fleets.items()}
    return {
        "tables": [
            _with_copies(table(lookup, condition, arms, "Routing", FLEET), fleets),
            hits | {"note": "Shares of the same prompt tokens: known on the best instance, known on the "
                            "instance that was chosen, and not computed by it. What is available but not "
                            "captured is the routing's; what is captured but not delivered was evicted "
                            "meanwhile, or never there."},
        ],
        "panels": [*_prediction_chart(condition, first), *_load_charts(condition, first, result.baseline)],
    }  # fmt: skip


def _with_copies(shown: dict[str, Any], fleets: Mapping[str, Sequence[FleetRun]]) -> dict[str, Any]:
    """The table with a column for each reason for which pages were computed a further time."""
    copies = {arm: copied_by_reason(runs) for arm, runs in fleets.items()}
    reasons = sorted({reason for found in copies.values() for reason in found})
    for row, found in zip(shown["rows"], copies.values(), strict=False):
        row["cells"] += [Cell(amount_of("tokens", found.get(reason, 0.0))) for reason in reasons]
    return shown | {
        "heads": shown["heads"] + [f"copied: {reason.replace('_', ' ')}" for reason in reasons],
        "note": "Copied: tokens computed on the chosen instance though another one had or computed them, by "
                "the reason of the choice.",
    }  # fmt: skip


def _prediction_chart(condition: str, first: Mapping[str, FleetRun]) -> list[dict[str, Any]]:
    arm = PREDICTED if PREDICTED in first else next(iter(first))
    points = predictions(first[arm])
    if not points:
        return []
    svg = charts.against(f"predictions {condition}", points, "predicted", "actual")
    return [{"title": f"From the choice to the first token, predicted and actual: {arm}", "svg": Markup(svg)}]


def _load_charts(condition: str, first: Mapping[str, FleetRun], baseline: str) -> list[dict[str, Any]]:
    """One chart for each of MULTIPLES arms, of which the baseline and `predicted` are two."""
    wanted = sorted(first, key=lambda arm: arm not in (baseline, PREDICTED))[:MULTIPLES]
    panels = []
    for arm in (arm for arm in first if arm in wanted):
        lines, many = loads(first[arm])
        svg = charts.lines(
            f"load {condition} {arm}", lines, "ratio", colors={name: at for at, name in enumerate(lines)},
            mark=1.0, band=("p5", "highest") if many else None,
        )  # fmt: skip
        about = "over instances" if many else "by instance"
        panels.append({"title": f"Load {about} (1 = as much as it should have): {arm}", "svg": Markup(svg)})
    return panels
