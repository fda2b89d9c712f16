"""The workloads are exactly what they say: lengths, sharing, order of submission."""

from __future__ import annotations

import pytest

from hotprefix.bench.arms import DEFAULT, INDEPENDENT, NO_CACHE, PAIRS, arms, baseline
from hotprefix.bench.bench_prompts import Material, TextMaterial
from hotprefix.bench.workloads import FULL, QUICK, Name, Workload, build
from hotprefix.kernel.config import Flight
from tests.support.material import SyntheticMaterial

PAGE = 16


def spell(text: str) -> list[int]:
    """A tokenizer with one id per word or mark: coarse like a real one, and without a model."""
    return [hash_of(w) for w in text.replace("\n", " \n ").split(" ") if w]


def hash_of(word: str) -> int:
    return int.from_bytes(word.encode()[:3].ljust(3, b"\0") + bytes([len(word) % 120]), "little")


MATERIALS: list[Material] = [SyntheticMaterial(), TextMaterial(spell)]


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def lengths(workload: Workload) -> list[int]:
    return [len(s.prompt) for s in workload.submissions]


@pytest.fixture(scope="module", params=MATERIALS, ids=["synthetic", "text"])
def full(request: pytest.FixtureRequest) -> dict[Name, Workload]:
    return {w.name: w for w in build(tuple(Name), request.param)}


def test_lengths_and_outputs_follow_the_published_run(full: dict[Name, Workload]) -> None:
    assert lengths(full[Name.OVERLAP]) == [902, 98, 241, 459, 681, 904]
    assert lengths(full[Name.FAN_OUT]) == [927] * 16
    assert lengths(full[Name.BURST]) == [532] * 14
    assert lengths(full[Name.FOLLOW]) == [493] * 14
    assert lengths(full[Name.LATE_PAIR]) == [532] * 2
    assert lengths(full[Name.CHURN]) == [975] * 16
    assert {s.outputs for s in full[Name.BURST].submissions} == {128}
    assert {s.outputs for s in full[Name.OVERLAP].submissions} == {16}


def test_overlap_probes_share_whole_quarters_of_the_document(full: dict[Name, Workload]) -> None:
    seed, *probes = full[Name.OVERLAP].submissions
    shared = [common(seed.prompt, p.prompt) // PAGE for p in probes]
    assert shared == [0, 13, 27, 41, 55]


def test_fan_out_questions_differ_and_share_the_document(full: dict[Name, Workload]) -> None:
    prompts = [s.prompt for s in full[Name.FAN_OUT].submissions]
    assert len(set(prompts)) == 16
    assert {common(prompts[0], p) // PAGE for p in prompts[1:]} == {56}


def test_no_namespace_warms_another(full: dict[Name, Workload]) -> None:
    firsts: dict[tuple[int, ...], str] = {}
    for workload in full.values():
        for s in workload.submissions:
            family = workload.name if workload.name is Name.FAN_OUT else f"{workload.name}/{s.prompt[:PAGE]}"
            owner = firsts.setdefault(s.prompt[:PAGE], family)
            assert owner == family, f"{s.id} starts like {owner}"
    documents = 2 + 1 + 3 + 3 + 1 + 8
    assert len(firsts) == documents


def test_conditional_submissions_name_an_earlier_request_of_their_wave(full: dict[Name, Workload]) -> None:
    for workload in full.values():
        ids = [s.id for s in workload.submissions]
        assert len(set(ids)) == len(ids)
        for wave in workload.waves:
            for at, s in enumerate(wave):
                assert s.after is None or s.after.request in {x.id for x in wave[:at]}
    assert [s.after.outputs for s in full[Name.FOLLOW].submissions if s.after] == [1] * 11
    assert [s.after.outputs for s in full[Name.LATE_PAIR].submissions if s.after] == [32]


@pytest.mark.parametrize("material", MATERIALS, ids=["synthetic", "text"])
def test_documents_are_prefix_stable_and_repeatable(material: Material) -> None:
    long = material.document("a", 300)
    assert material.document("a", 77) == long[:77]
    assert len(long) == 300
    assert material.document("b", 16) != long[:16]
    for tokens in (1, 5, 19, 76):
        assert len(material.question("a", 1, tokens)) == tokens
    assert common(material.question("a", 1, 24), material.question("a", 2, 24)) < PAGE


def test_quick_is_smaller_in_every_way() -> None:
    material = SyntheticMaterial()
    for quick, full in zip(
        build(tuple(Name), material, QUICK), build(tuple(Name), material, FULL), strict=True
    ):
        cost = [sum(len(s.prompt) + 40 * s.outputs for s in w.submissions) for w in (quick, full)]
        assert cost[0] < cost[1]


def test_arms_start_with_their_baseline_and_end_with_the_default() -> None:
    for name in Name:
        for quick in (False, True):
            chosen = arms(name, quick=quick)
            assert chosen[0] == baseline(name)
            assert chosen[-1] == DEFAULT
            assert len(set(chosen)) == len(chosen)
    assert arms(Name.BURST, quick=False) == PAIRS
    assert len(PAIRS) == 3 * len(Flight)
    assert INDEPENDENT in PAIRS
    assert arms(Name.CHURN, quick=False, every=True) == (NO_CACHE, *PAIRS)
