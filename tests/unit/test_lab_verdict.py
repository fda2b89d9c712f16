"""Verdicts: what is planted is found, what is not is not, and harm is called harm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import polars as pl
import pytest

from hotprefix.definitions import Slo
from hotprefix.errors import ConfigError
from hotprefix.lab.experiment.assess import assess
from hotprefix.lab.hypothesis import NO_THRASH, THRASH, Hypothesis, Kind, Need, Tolerance
from hotprefix.lab.paired_sections import Run
from hotprefix.lab.stats import Comparison
from hotprefix.lab.verdict import ClaimState, Outcome, Verdict, decide
from tests.support.tables import UNSERVED, run

SLO = Slo(ttft_s=3.0)
LOSS = Tolerance("net_l1_hit_loss_share", 0.05)
BASE: list[Mapping[str, float | None]] = [{"evicted_pages": 10.0, "lost_tokens": 50.0}] * 3


def claim(kind: Kind, **fields: object) -> Hypothesis:
    return Hypothesis("h", "a claim", kind, "arm", "base", "thrash", **fields)  # type: ignore[arg-type]


def spread(metric: str, base: float, change: float, width: float = 0.02) -> Comparison:
    """Twelve sections whose relative change is `change` plus or minus about `width`."""
    wobble = [width * math.cos(math.pi * i) for i in range(12)]
    return Comparison(
        metric, base, base * (1 + change), tuple((base, base * (1 + change + w)) for w in wobble)
    )


def outcome(one: Hypothesis, *found: Comparison) -> Verdict:
    return decide(one, {c.metric: c for c in found}, BASE)


MECHANISM = claim(Kind.MECHANISM, improves=(LOSS,), needs=THRASH)
SERVICE = claim(
    Kind.SERVICE,
    improves=(LOSS,),
    reaches=(Tolerance("ttft_mean_s", 0.05), Tolerance("computed_tokens", 0.05)),
)
HARM = claim(
    Kind.HARM, improves=(Tolerance("reuse_share", 0.01),), not_worse=(Tolerance("cold.ttft_p95_s", 0.10),)
)
NULL = claim(Kind.NULL, equal=(Tolerance("reuse_share", 0.05),))


@pytest.mark.parametrize(
    ("change", "width", "expected"),
    [
        (-0.30, 0.02, Outcome.SUPPORTED),
        (-0.30, 0.60, Outcome.INCONCLUSIVE),  # large, but it could be chance
        (-0.04, 0.02, Outcome.INCONCLUSIVE),  # falls for sure, perhaps by less than matters
        (-0.01, 0.01, Outcome.REFUTED),  # no fall of 5 % is left
        (0.00, 0.30, Outcome.INCONCLUSIVE),
        (+0.20, 0.02, Outcome.REFUTED),
    ],
)
def test_the_mechanism_must_reduce_the_loss(change: float, width: float, expected: Outcome) -> None:
    assert outcome(MECHANISM, spread(LOSS.metric, 0.4, change, width)).outcome is expected


@pytest.mark.parametrize(
    ("ttft", "computed", "expected", "words"),
    [
        (-0.20, 0.00, Outcome.SUPPORTED, "ttft_mean_s: falls"),
        (0.00, -0.20, Outcome.SUPPORTED, "computed_tokens: falls"),
        (0.00, 0.00, Outcome.REFUTED, "the gain does not reach service"),
        (0.10, 0.20, Outcome.REFUTED, "the gain does not reach service"),
    ],
)
def test_a_gain_must_reach_service(ttft: float, computed: float, expected: Outcome, words: str) -> None:
    found = outcome(
        SERVICE,
        spread(LOSS.metric, 0.4, -0.3),
        spread("ttft_mean_s", 2.0, ttft),
        spread("computed_tokens", 1e6, computed),
    )
    assert found.outcome is expected
    assert words in found.reason


def test_whether_a_gain_reaches_service_may_stay_open() -> None:
    found = outcome(
        SERVICE,
        spread(LOSS.metric, 0.4, -0.3),
        spread("ttft_mean_s", 2.0, 0.0, 0.5),
        spread("computed_tokens", 1e6, 0.0),
    )
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "open" in found.reason


def test_a_hit_rate_gained_at_the_cost_of_cold_requests_is_refuted() -> None:
    found = outcome(HARM, spread("reuse_share", 0.5, 0.2), spread("cold.ttft_p95_s", 3.0, 0.3))
    assert found.outcome is Outcome.REFUTED
    assert found.reason == "reuse_share: rises, but cold.ttft_p95_s: worse than tolerated"


def test_harm_that_is_not_excluded_leaves_it_open() -> None:
    found = outcome(HARM, spread("reuse_share", 0.5, 0.2), spread("cold.ttft_p95_s", 3.0, 0.05, 0.5))
    assert found.outcome is Outcome.INCONCLUSIVE
    within = outcome(HARM, spread("reuse_share", 0.5, 0.2), spread("cold.ttft_p95_s", 3.0, 0.05))
    assert within.outcome is Outcome.SUPPORTED


@pytest.mark.parametrize(
    ("beyond", "expected", "state"),
    [
        ("arm", Outcome.REFUTED, ClaimState.FAILS),
        ("base", Outcome.SUPPORTED, ClaimState.HOLDS),
        ("both", Outcome.INCONCLUSIVE, ClaimState.OPEN),
    ],
)
def test_beyond_the_horizon_is_worse_than_any_figure(
    beyond: str, expected: Outcome, state: ClaimState
) -> None:
    cold = Comparison("cold.ttft_p95_s", None, None, beyond=beyond, reason="never served")
    found = outcome(HARM, spread("reuse_share", 0.5, 0.2), cold)
    assert (found.outcome, found.findings[1].state) == (expected, state)


@pytest.mark.parametrize(
    ("change", "width", "expected"),
    [
        (0.00, 0.02, Outcome.AS_EXPECTED),
        (0.04, 0.10, Outcome.INCONCLUSIVE),
        (0.20, 0.02, Outcome.REFUTED),
        (-0.20, 0.02, Outcome.REFUTED),
    ],
)
def test_no_difference_must_be_shown_too(change: float, width: float, expected: Outcome) -> None:
    assert outcome(NULL, spread("reuse_share", 0.5, change, width)).outcome is expected


def test_identical_arms_are_the_expected_null_and_refute_a_mechanism() -> None:
    same = Comparison("reuse_share", 0.5, 0.5, ((0.5, 0.5),) * 12)
    assert outcome(NULL, same).outcome is Outcome.AS_EXPECTED
    few = Comparison("reuse_share", 0.5, 0.5, ((0.5, 0.5),) * 5)
    assert outcome(NULL, few).outcome is Outcome.INCONCLUSIVE
    zero = Comparison(LOSS.metric, 0.0, 0.0, ((0.0, 0.0),) * 12)
    assert outcome(MECHANISM, zero).outcome is Outcome.REFUTED


def test_sections_of_one_sign_that_may_be_chance_decide_nothing() -> None:
    """Of five sections of two equal arms all have one sign in 6 % of cases, however close they are."""
    near = tuple((1.0, 0.5 + wobble) for wobble in (0.01, -0.01, 0.02, -0.02, 0.0, 0.01, -0.01, 0.0))
    one = claim(Kind.MECHANISM, improves=(Tolerance("ttft_mean_s", 0.05),))

    def judged(sections: tuple[tuple[float, float], ...]) -> Verdict:
        return outcome(one, Comparison("ttft_mean_s", 1.0, 0.5, sections))

    assert judged(near[:6]).outcome is Outcome.SUPPORTED
    few = judged(near[:5])
    assert few.outcome is Outcome.INCONCLUSIVE
    assert few.reason == "ttft_mean_s: 5 sections decide nothing at 95 %, 6 may"
    assert few.findings[0].interval is not None


def test_the_same_difference_everywhere_is_no_doubt() -> None:
    each = ((8000.0, 1000.0),) * 12
    found = outcome(
        claim(Kind.MECHANISM, improves=(Tolerance("computed_tokens", 0.05),)),
        Comparison("computed_tokens", 8000.0, 1000.0, each),
    )
    assert found.outcome is Outcome.SUPPORTED
    assert found.findings[0].interval == (-0.875, -0.875)


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ([{"evicted_pages": 0.0, "lost_tokens": 0.0}], "evicted_pages is 0"),
        (
            [{"evicted_pages": 9.0, "lost_tokens": 4.0}, {"evicted_pages": 9.0, "lost_tokens": 0.0}],
            "lost_tokens is 0",
        ),
        ([{"evicted_pages": 9.0, "lost_tokens": None}], "lost_tokens was not measured"),
    ],
)
def test_without_thrash_the_thrash_claim_is_not_judged(
    base: list[dict[str, float | None]], words: str
) -> None:
    found = decide(MECHANISM, {LOSS.metric: spread(LOSS.metric, 0.4, -0.3)}, base)
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "precondition" in found.reason
    assert words in found.reason


def test_with_thrash_the_no_thrash_claim_is_not_judged() -> None:
    one = claim(Kind.NULL, equal=(Tolerance("reuse_share", 0.05),), needs=NO_THRASH)
    found = outcome(one, spread("reuse_share", 0.5, 0.0))
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "at most 0 is allowed" in found.reason


def test_several_metrics_share_the_error_rate() -> None:
    assert MECHANISM.level == 0.95
    assert SERVICE.level == pytest.approx(1 - 0.05 / 3)
    single, third = (
        spread(LOSS.metric, 0.4, -0.3).interval(level, "relative") for level in (0.95, SERVICE.level)
    )
    assert single is not None
    assert third is not None
    assert third[0] < single[0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": Kind.MECHANISM}, "has no improves"),
        ({"kind": Kind.SERVICE, "improves": (LOSS,)}, "has no reaches"),
        ({"kind": Kind.NULL, "equal": (LOSS,), "improves": (LOSS,)}, "does not use improves"),
        ({"kind": Kind.MECHANISM, "improves": (Tolerance("requests", 0.1),)}, "neither way is better"),
        ({"kind": Kind.MECHANISM, "improves": (LOSS,), "confidence": 1.0}, "confidence=1.0"),
        ({"kind": Kind.MECHANISM, "improves": (LOSS,), "baseline": "arm"}, "name two"),
        ({"kind": "mechanism", "improves": (LOSS,)}, "give one of mechanism, service, harm, null"),
    ],
)
def test_a_hypothesis_that_cannot_be_judged_is_refused(fields: dict[str, object], words: str) -> None:
    whole = {"id": "h", "claim": "c", "arm": "arm", "baseline": "base", "condition": "thrash"} | fields
    with pytest.raises(ConfigError, match=words):
        Hypothesis(**whole)  # type: ignore[arg-type]


@pytest.mark.parametrize("amount", [-0.1, math.nan, math.inf])
def test_a_tolerance_is_a_number(amount: float) -> None:
    with pytest.raises(ConfigError, match="tolerance of stalls"):
        Tolerance("stalls", amount)


def test_a_need_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="at_least or at_most"):
        Need("stalls")


def test_from_tables_to_verdicts() -> None:
    """The loss falls under thrash; in `greedy` cold requests pay for it; without thrash nothing happens."""
    seeds = range(3)
    runs = {
        ("thrash", "off"): [run(s, 0, loss=0.3, sigma=0.2) for s in seeds],
        ("thrash", "window"): [run(s, 1, loss=0.1, sigma=0.2) for s in seeds],
        ("thrash", "greedy"): [run(s, 2, loss=0.1, sigma=0.2, cold_effect=6.0) for s in seeds],
        ("calm", "off"): [run(s, 3, loss=0.0, evicted=0) for s in seeds],
        ("calm", "window"): [run(s, 4, loss=0.0, evicted=0) for s in seeds],
    }
    cold = (Tolerance("cold.ttft_p50_s", 0.5),)

    def hypothesis(name: str, arm: str, condition: str, kind: Kind, **fields: object) -> Hypothesis:
        return Hypothesis(name, name, kind, arm, "off", condition, **fields)  # type: ignore[arg-type]

    hypotheses = [
        hypothesis("mechanism", "window", "thrash", Kind.MECHANISM, improves=(LOSS,), needs=THRASH),
        hypothesis(
            "calm", "window", "calm", Kind.NULL, equal=(Tolerance("reuse_share", 0.02),), needs=NO_THRASH
        ),
        hypothesis("not here", "window", "calm", Kind.MECHANISM, improves=(LOSS,), needs=THRASH),
        hypothesis(
            "harm", "greedy", "thrash", Kind.HARM, improves=(Tolerance("reuse_share", 0.01),), not_worse=cold
        ),
        hypothesis("no runs", "window", "elsewhere", Kind.MECHANISM, improves=(LOSS,)),
    ]
    found = assess(runs, hypotheses, baseline="off", slo=SLO)
    assert [v.outcome for v in found.verdicts] == [
        Outcome.SUPPORTED, Outcome.AS_EXPECTED, Outcome.INCONCLUSIVE, Outcome.REFUTED, Outcome.INCONCLUSIVE,
    ]  # fmt: skip
    assert "no runs of window" in found.verdicts[4].reason
    assert found.comparisons.keys() == {("thrash", "window"), ("thrash", "greedy"), ("calm", "window")}
    assert found.metrics.filter(metric="requests").height == 15
    assert found.windows.height == 5 * 40  # the first seed's
    instance = found.buckets.filter(pl.col("by") == "instance", pl.col("arm") == "off")
    mean = (
        found.metrics.filter(arm="off", metric="requests").group_by("condition").agg(pl.col("value").mean())
    )
    assert dict(instance.select("condition", "requests").rows()) == dict(mean.rows())


def without_its_slowest(one: Run, outcome: str) -> Run:
    """The same replay, had it served only the quicker two thirds."""
    took = pl.col("first_token_s") - pl.col("arrival_s")
    slow = took > took.quantile(0.67)
    never = {name: pl.lit(value) for name, value in (UNSERVED | {"outcome": outcome}).items()}
    table = one.requests.with_columns(pl.when(slow).then(v).otherwise(n).alias(n) for n, v in never.items())
    end = one.requests["finish_s"].max()
    assert isinstance(end, float)
    return replace(one, requests=table.cast(one.requests.schema), end_s=end)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["rejected", "unfinished"])
def test_who_serves_fewer_does_not_win_by_it(how: str) -> None:
    whole = [run(s, 0, sigma=0.5, memory=0.1) for s in range(8)]
    picky = [without_its_slowest(one, how) for one in whole]
    runs = {("c", "whole"): whole, ("c", "picky"): picky, ("c", "equally picky"): picky}
    mean = "hot.ttft_mean_s" if how == "rejected" else "hot.computed_tokens"

    def claim_of(arm: str, base: str, want: str = "improves") -> Hypothesis:
        kind = {"improves": Kind.MECHANISM, "not_worse": Kind.HARM, "equal": Kind.NULL}[want]
        wants = {want: (Tolerance(mean, 0.05),)}
        return Hypothesis(f"{arm} {want} {base}", "c", kind, arm, base, "c", **wants)  # type: ignore[arg-type]

    claims = [
        claim_of("picky", "whole"),
        claim_of("picky", "whole", "not_worse"),
        claim_of("picky", "whole", "equal"),
        claim_of("whole", "picky"),  # nor does the other lose
        claim_of("whole", "picky", "not_worse"),
        claim_of("equally picky", "picky", "equal"),
    ]
    verdicts = assess(runs, claims, baseline="whole", slo=SLO).verdicts
    found = verdicts[0]
    assert found.reason.startswith(f"{mean}: falls, but the arm finished 6")
    assert "the baseline 100.0 %, and this figure does not count the others in full" in found.reason
    assert found.findings[0].interval is not None
    assert found.findings[0].interval[1] < -0.05
    assert {v.hypothesis.id: v.outcome for v in verdicts[:5]} == {
        one.id: Outcome.INCONCLUSIVE for one in claims[:5]
    }
    assert verdicts[5].outcome is Outcome.AS_EXPECTED


@pytest.mark.parametrize("metric", ["goodput_rps", "ttft_p50_s"])
def test_who_serves_fewer_may_win_where_everybody_counts(metric: str) -> None:
    one = Hypothesis("h", "c", Kind.MECHANISM, "on", "off", "c", improves=(Tolerance(metric, 0.1),))
    slow = [run(s, 0, sigma=0.5, effect=9.0, cold_effect=9.0) for s in range(8)]
    quick = [without_its_slowest(run(s, 1, sigma=0.5), "rejected") for s in range(8)]
    found = assess({("c", "off"): slow, ("c", "on"): quick}, [one], baseline="off", slo=SLO)
    assert found.comparisons["c", "on"]["ttft_mean_s"].flattered == "arm"
    assert found.verdicts[0].outcome is Outcome.SUPPORTED


def test_a_gain_of_who_serves_more_stands() -> None:
    """What it is measured against is a lower bound."""
    slow = [
        without_its_slowest(run(s, 0, sigma=0.5, effect=9.0, cold_effect=9.0), "rejected") for s in range(8)
    ]
    runs = {("c", "off"): slow, ("c", "on"): [run(s, 1, sigma=0.5) for s in range(8)]}
    one = Hypothesis(
        "h", "c", Kind.MECHANISM, "on", "off", "c", improves=(Tolerance("ttft_mean_s", 0.1),)
    )  # fmt: skip
    assert assess(runs, [one], baseline="off", slo=SLO).verdicts[0].outcome is Outcome.SUPPORTED


def test_a_request_or_two_at_the_end_do_not_count() -> None:
    even = replace(spread("ttft_mean_s", 2.0, -0.2), finished=(0.995, 0.99))
    one = claim(Kind.MECHANISM, improves=(Tolerance("ttft_mean_s", 0.05),))
    assert outcome(one, even).outcome is Outcome.SUPPORTED
    assert outcome(one, replace(even, finished=(0.995, 0.98))).outcome is Outcome.INCONCLUSIVE


def test_a_seed_that_failed_in_one_arm_is_left_out_of_both() -> None:
    runs = {
        ("thrash", "off"): [run(s, 0) for s in range(4)],
        ("thrash", "window"): [run(s, 1) for s in (0, 1, 3)],
    }
    found = assess(runs, [], baseline="off", slo=SLO)
    assert len(found.comparisons["thrash", "window"]["ttft_mean_s"].sections) == 9
    assert found.metrics.filter(arm="off", metric="requests").height == 4
