"""A made-up experiment result with everything in it, for tests of the replay report."""

from __future__ import annotations

import polars as pl

from hotprefix.definitions import Slo
from hotprefix.lab.experiment.assess import assess
from hotprefix.lab.experiment.result import (
    Arm,
    Condition,
    CostLabel,
    ExperimentResult,
    Problem,
    Provenance,
    Share,
)
from hotprefix.lab.hypothesis import NO_THRASH, THRASH, Hypothesis, Kind, Tolerance
from hotprefix.lab.paired_sections import Run
from hotprefix.lab.sim.rows import WINDOW_COLUMNS
from tests.support.tables import links, run

LOSS = Tolerance("net_l1_hit_loss_share", 0.05)
HYPOTHESES = (
    Hypothesis(
        "loss", "Refresh keeps what waiting requests matched on arrival.", Kind.MECHANISM, "window", "off",
        "thrash", improves=(LOSS,), needs=THRASH, why="Less than 5 % would not pay for a switch.",
    ),
    Hypothesis(
        "service", "What refresh keeps reaches the requests.", Kind.SERVICE, "window", "off", "thrash",
        improves=(LOSS,), reaches=(Tolerance("ttft_mean_s", 0.02), Tolerance("computed_tokens", 0.02)),
        needs=THRASH,
    ),
    Hypothesis(
        "cold", "Cold requests do not pay for it.", Kind.HARM, "greedy", "off", "thrash",
        improves=(Tolerance("reuse_share", 0.01),),
        not_worse=(Tolerance("cold.ttft_p50_s", 0.10), Tolerance("scheduler_share", 0.02, "difference")),
    ),
    Hypothesis(
        "calm", "Where nothing is evicted, nothing changes.", Kind.NULL, "window", "off", "calm",
        equal=(Tolerance("reuse_share", 0.02),), needs=NO_THRASH,
    ),
    Hypothesis(
        "tail", "Refresh shortens the tail.", Kind.MECHANISM, "window", "off", "thrash",
        improves=(Tolerance("ttft_p99_s", 0.05),),
    ),
)  # fmt: skip


def demo(*, arms: tuple[str, ...] = ("off", "window", "greedy"), seeds: int = 3) -> ExperimentResult:
    """Two conditions, up to three arms, all kinds of verdict, a failed run, a bound."""
    losses = {"off": 0.3, "window": 0.12, "greedy": 0.1}
    runs = {}
    for condition, thrash in (("thrash", True), ("calm", False)):
        for at, arm in enumerate(arms):
            some = [
                run(
                    seed, at, sigma=0.5, loss=losses[arm] * thrash, evicted=400 * thrash,
                    effect=1 if arm == "off" else 0.9, cold_effect=8 if arm == "greedy" else 1,
                )
                for seed in range(1, seeds + 1)
            ]  # fmt: skip
            runs[condition, arm] = [_busy(one, arm) for one in some]
    slo = Slo(ttft_s=3.0, timeout_s=10.0)
    hypotheses = [one for one in HYPOTHESES if one.arm in arms]
    found = assess(runs, hypotheses, baseline="off", slo=slo)
    return ExperimentResult(
        name="refresh-off-on",
        question="Does touching waiting prefixes keep them in L1 until they are admitted?",
        spec_hash="3f7a" * 16,
        version="0.0.1",
        command="hotprefix replay refresh-off-on --seeds 3 --out DIR",
        fixed={"kernel.page_size": "16", "kernel.order": "fcfs", "load.loop": "closed", "cost": "made-up"},
        conditions=(
            Condition("thrash", "L1 holds a third of the sessions alive.", {"capacity": "8 sessions"}, 65536),
            Condition("calm", "L1 holds everything.", {"capacity": "64 sessions"}, 524288),
        ),
        arms=tuple(Arm(name, f"{name} & its <settings>", {"kernel.refresh": name}) for name in arms),
        baseline="off",
        seeds=tuple(range(1, seeds + 1)),
        slo=slo,
        metrics=found.metrics,
        comparisons=found.comparisons,
        verdicts=found.verdicts,
        buckets=found.buckets,
        windows=found.windows,
        trace=Provenance(
            "made-up agents", "generator agents(sessions=40)", 371, 37100, 4081, 64, 0.6, "closed"
        ),
        cost=CostLabel(
            "tiny.cpu", "measured by hotprefix calibrate", "two cores", "tiny, float32",
            {"overall": (0.042, 0.181), "prefill": (0.03, 0.11)}, ("bias +1.2 %",),
        ),
        bounds=(
            Share("thrash", 65536, 37100, 24000.0, {"off": 15600.0, "window": 19700.0, "greedy": 19900.0}),
            Share("calm", 524288, 37100, 24400.0, {"off": 24300.0, "window": 24300.0, "greedy": 24300.0}),
        ),
        problems=(Problem("calm", "greedy", 2, "failed", "MemoryError: out of <memory>"),),
    )  # fmt: skip


def _busy(one: Run, arm: str) -> Run:
    """With gauges that move, and a restore link."""
    at = pl.int_range(pl.len())
    windows = one.windows.with_columns(
        waiting=(6 + 5 * (at / 4).sin()).cast(pl.Int64), running=pl.lit(8), owned_pages=pl.lit(100),
        free_pages=pl.lit(50), evictable_pages=(300 + 200 * (at / 5).cos()).cast(pl.Int64),
        protected_pages=(300 - 200 * (at / 5).cos()).cast(pl.Int64), cached_tokens=pl.lit(3000) + at * 10,
        computed_tokens=pl.lit(4000), oldest_wait_s=2 + (at / 4).sin(),
        refresh_touches=pl.lit(0 if arm == "off" else 128),
    ).cast(dict(WINDOW_COLUMNS))  # fmt: skip
    restores = links({
        "instance": 0, "link": "l2-l1", "bytes": 3 << 30, "seconds": 1.5, "transfers": 640,
        "cancels": 1,
    })  # fmt: skip
    return Run(one.seed, one.requests, windows, restores, one.page_tokens)
