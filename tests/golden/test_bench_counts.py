"""Token counts of every workload and arm, through the real kernel without a model.

These are the figures a live `hotprefix bench` shows as deterministic: they follow from lengths, arrival
and policy alone.
"""

from __future__ import annotations

import pytest
from kernel_loop import drive, group_counts

from hotprefix.bench.arms import DEFAULT, INDEPENDENT, NO_CACHE, PAIRS, Arm
from hotprefix.bench.workloads import FULL, After, Name, Scale, Submission, Workload, build
from hotprefix.kernel.config import Flight, Publication
from tests.support.material import SyntheticMaterial

SHORT = Scale(long=24, short=4)  # enough that no request ends before the last of its wave starts
MATERIAL = SyntheticMaterial()
WORKLOADS = {w.name: w for w in build(tuple(Name), MATERIAL, SHORT)}
EVERY = (NO_CACHE, *PAIRS)
CHUNKED = 256

by_budget = pytest.mark.parametrize("budget", [2048, CHUNKED], ids=["whole", "chunked"])
by_arm = pytest.mark.parametrize("arm", EVERY, ids=lambda a: a.name)


def restored(workload: Workload, arm: Arm, budget: int) -> dict[str, tuple[int, ...]]:
    records, _ = drive(workload, arm, budget=budget)
    assert all(r.restored + r.computed == len(r.submission.prompt) for r in records)
    return {group: c.restored_each for group, c in group_counts(workload, records).items()}


def factors(workload: Workload, arm: Arm, budget: int) -> dict[str, float]:
    records, kernel = drive(workload, arm, budget=budget)
    assert kernel.counters.computed_prompt_tokens == sum(r.computed for r in records)
    return {group: c.duplication for group, c in group_counts(workload, records).items()}


def shares_in_flight(arm: Arm) -> bool:
    """Arms under which identical prompts that start together are computed once."""
    return arm.prefix_cache and (arm.flight is not Flight.NONE or arm.publication is Publication.SCHEDULE)


@by_budget
@by_arm
def test_burst(arm: Arm, budget: int) -> None:
    """8 identical cold prompts of 532: 528 restored each and a duplication factor of exactly 1.0 where
    somebody coordinates or pages are visible when planned; nothing where pages appear at the end."""
    workload = WORKLOADS[Name.BURST]
    got = restored(workload, arm, budget)
    if shares_in_flight(arm):
        assert got == {"x2": (528,), "x4": (528,) * 3, "x8": (528,) * 7}
        assert set(factors(workload, arm, budget).values()) == {1.0}
    elif arm.publication is Publication.STEP:
        assert got["x8"] == ((512,) * 7 if budget == CHUNKED else (0, 0, 0, 528, 528, 528, 528))
    else:
        assert got == {"x2": (0,), "x4": (0,) * 3, "x8": (0,) * 7}
        assert factors(workload, arm, budget)["x8"] == 8 * 532 / (532 + 7 * 4)


@by_budget
@by_arm
def test_follow(arm: Arm, budget: int) -> None:
    """Followers restore 480 of 493 while the first request generates, unless pages wait for its end."""
    got = restored(WORKLOADS[Name.FOLLOW], arm, budget)
    each = 0 if arm in (NO_CACHE, INDEPENDENT) else 480
    assert got == {"x2": (each,), "x4": (each,) * 3, "x8": (each,) * 7}


@by_budget
@by_arm
def test_late_pair(arm: Arm, budget: int) -> None:
    each = 0 if arm in (NO_CACHE, INDEPENDENT) else 528
    assert restored(WORKLOADS[Name.LATE_PAIR], arm, budget) == {"pair": (each,)}


@by_budget
@by_arm
def test_sequential_workloads_do_not_depend_on_the_pair(arm: Arm, budget: int) -> None:
    on = int(arm.prefix_cache)
    overlap = restored(WORKLOADS[Name.OVERLAP], arm, budget)
    assert [sum(each) for each in overlap.values()] == [0, 0, 208 * on, 432 * on, 656 * on, 880 * on]
    fan_out = restored(WORKLOADS[Name.FAN_OUT], arm, budget)
    assert fan_out == {"warm": (), **{f"x{n}": (896 * on,) * n for n in (1, 2, 4, 8)}}
    churn = restored(WORKLOADS[Name.CHURN], arm, budget)
    assert churn == {"cycle 1": (), "cycle 2": (0,) * 8}


def staggered(gap: int) -> Workload:
    """One request decodes all along, so that budgets leave odd rests; then a long prompt and seven that
    share 1000 - 90 n tokens of it, each `gap` outputs later than the one before."""
    document = MATERIAL.document("staggered", 1000)
    first = Submission("first", "other", MATERIAL.document("other", 40), 80, False)
    rest = [
        Submission(
            f"f{n}", "g", document[: 1000 - 90 * n] + MATERIAL.question("s", n, 30), 24, n > 0,
            After("first", 1 + gap * n),
        )
        for n in range(8)
    ]  # fmt: skip
    return Workload(Name.BURST, "", "", ((first, *rest),))


@pytest.mark.parametrize("gap", [0, 1, 3])
@pytest.mark.parametrize("budget", [100, 250, 256, 2048])
@pytest.mark.parametrize("same_step_reads", [True, False])
@pytest.mark.parametrize("arm", [a for a in PAIRS if a.flight is Flight.COALESCED], ids=lambda a: a.name)
def test_coalesced_computes_each_page_once_for_any_arrival(
    arm: Arm, same_step_reads: bool, budget: int, gap: int
) -> None:
    """Different tails, any budget: what is common is computed once, whoever gets there first."""
    records, kernel = drive(staggered(gap), arm, budget=budget, same_step_reads=same_step_reads)
    assert group_counts(staggered(gap), records)["g"].duplication == 1.0
    assert [r.restored for r in records[2:]] == [(1000 - 90 * n) // 16 * 16 for n in range(1, 8)]
    assert kernel.counters.retractions == 0


@by_budget
def test_full_scale_needs_no_retraction(budget: int) -> None:
    """The bench's cache holds its largest wave without sharing, so that no arm's times hold
    re-computation that another's do not."""
    for workload in build((Name.FAN_OUT, Name.BURST, Name.FOLLOW), MATERIAL, FULL):
        for arm in (NO_CACHE, INDEPENDENT, DEFAULT):
            assert drive(workload, arm, budget=budget)[1].counters.retractions == 0
