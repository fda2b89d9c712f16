"""Generators: a seed gives the same trace everywhere, and each generator makes the situation that it
promises."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotprefix.errors import ConfigError
from hotprefix.lab.trace.check import check
from hotprefix.lab.trace.generate.distributions import LogNormal, Quantiles
from hotprefix.lab.trace.generate.registry import GENERATORS, generate_trace
from hotprefix.lab.trace.info import info
from hotprefix.lab.trace.open_trace import SAMPLES, open_trace
from hotprefix.lab.trace.trace_request import TraceRequest
from hotprefix.lab.trace.write_trace import write_trace

SMALL = {"agents": {"sessions": 6}, "documents": {"questions": 20}}


def made(name: str, seed: int = 3, **params: Any) -> list[TraceRequest]:
    return list(generate_trace(name, SMALL.get(name, {}) | params, seed=seed))


@pytest.mark.parametrize("name", GENERATORS)
def test_what_is_generated_is_a_sound_trace(tmp_path: Path, name: str) -> None:
    trace = generate_trace(name, SMALL.get(name), seed=5)
    write_trace(trace, tmp_path / "t.jsonl")
    again = open_trace(tmp_path / "t.jsonl")
    found = check(again)
    assert (found.problems, found.requests) == ([], info(trace).requests)
    assert info(again).ideal_reused_blocks == info(trace).ideal_reused_blocks > 0
    assert f"{name}, seed 5" in again.provenance.notes[0], "it can be made again"


def test_bytes_are_the_same_in_every_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from hotprefix.lab.trace.generate.registry import GENERATORS, generate_trace\n"
        "from hotprefix.lab.trace.write_trace import write_trace\n"
        "for n in GENERATORS:\n"
        "    write_trace(generate_trace(n, seed=9, limit=60), Path(sys.argv[1]) / f'{n}.jsonl.gz')"
    )
    digests = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        run = [sys.executable, "-c", code, str(folder)]
        subprocess.run(run, check=True, env=os.environ | {"PYTHONHASHSEED": seed})
        digests.append([hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())])
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == len(GENERATORS)


@pytest.mark.parametrize("name", [name for name in GENERATORS if name != "churn"])
def test_another_seed_is_another_trace(name: str) -> None:
    first, second = made(name, 3), made(name, 4)
    assert [(r.arrival_s, r.blocks.tolist()) for r in first] != [
        (r.arrival_s, r.blocks.tolist()) for r in second
    ]


def test_sessions_go_on_from_what_was_answered() -> None:
    requests = {r.id: r for r in made("agents", reset_share=0.0, sub_agents=0.0, prefix=640, window=10**7)}
    followed = 0
    for request in requests.values():
        if request.parent is None:
            assert (request.kind, request.think_s) == ("user", None)
            continue
        before = requests[request.parent]
        assert request.think_s is not None
        assert before.output_blocks is not None
        complete = before.input_length // 64
        computed = before.input_length + before.output_length - 1  # the last sampled token has no KV
        held = np.concatenate((before.blocks[:complete], before.output_blocks))
        assert len(held) == max(complete, computed // 64)
        partial = computed // 64 > complete and before.input_length % 64 > 0
        assert len(before.blocks) == complete + partial
        assert not partial or before.blocks[-1] == before.output_blocks[0]
        assert request.input_length > computed + 1
        assert request.blocks[: len(held)].tolist() == held.tolist()
        followed += 1
    assert followed > 50
    starts = [r for r in requests.values() if r.parent is None]
    assert [r.session for r in starts] == [f"s{n}" for n in range(6)]
    assert len({tuple(r.blocks[:10].tolist()) for r in starts}) == 1, "tools and system prompt are shared"
    arrivals = [r.arrival_s or 0.0 for r in starts]
    assert arrivals == sorted(arrivals)


def test_resets_and_compactions_keep_tools_and_system_prompt_only() -> None:
    for params in ({"reset_share": 1.0}, {"reset_share": 0.0, "window": 3000}):
        compacted = {"median": 1000, "sigma": 0.0}
        requests = made("agents", prefix=640, sub_agents=0.0, compacted=compacted, **params)
        resets = 0
        for before, after in pairwise(requests):
            if after.session != before.session:
                continue
            same = int((before.blocks[: len(after.blocks)] == after.blocks[: len(before.blocks)]).sum())
            grown = after.input_length > before.input_length + before.output_length
            assert same == 10 or (grown and same == len(before.blocks))
            resets += same == 10
        assert resets > 20
        if "window" in params:
            assert {r.input_length for r in requests if r.input_length <= 3000} & {1000}
            assert max(r.input_length for r in requests) <= 3000


def test_more_sessions_leave_the_first_as_they_were() -> None:
    few, many = made("agents"), made("agents", sessions=8)
    assert len(many) > len(few)
    for one, other in zip(few, many, strict=False):
        assert (one.id, one.input_length, one.arrival_s) == (other.id, other.input_length, other.arrival_s)


def test_sub_agents_wait_for_who_started_them() -> None:
    requests = made("agents", sub_agents=0.3)
    firsts = [r for r in requests if "." in r.id and r.id.endswith("/0")]
    assert len(firsts) > 10
    for request in firsts:
        assert request.parent is not None
        assert request.parent.split("/")[0] == request.session
        assert request.blocks[0] == firsts[0].blocks[0] != requests[0].blocks[0]


def test_bursts_are_identical_to_the_last_token() -> None:
    requests = made("bursts", bursts=2, size=3, prompt=100, spread_s=0.5, every_s=10.0)
    assert [r.blocks.tolist() for r in requests] == [[*range(7)]] * 3 + [[*range(7, 14)]] * 3
    times = [r.arrival_s or 0.0 for r in requests]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[2] <= 0.5 < 10 <= times[3] <= times[5] <= 10.5


def test_half_shared_bursts_have_tails_of_their_own() -> None:
    requests = made("bursts", bursts=2, size=3, prompt=100, shared=0.5, block_size=16)
    first, second = requests[:3], requests[3:]
    for burst in (first, second):
        assert len({tuple(r.blocks[:3].tolist()) for r in burst}) == 1
        tails = [set(r.blocks[3:].tolist()) for r in burst]
        assert all(len(tail) == 3 for tail in tails)
        assert len(set.union(*tails)) == 9
    assert first[0].blocks[0] != second[0].blocks[0]


def test_skew_falls_with_the_rank_and_its_cold_tail_comes_once() -> None:
    requests = made(
        "skew", requests=4000, keys=20, zipf=1.0, prefix=64, question=16, cold=0.25, cold_prompt=32
    )
    cold = [r for r in requests if r.kind == "cold"]
    assert 900 < len(cold) < 1100
    assert len({b for r in cold for b in r.blocks.tolist()}) == 2 * len(cold)
    counts = Counter(r.id.split("/")[0] for r in requests if r.kind == "hot").most_common()
    assert 1.6 < counts[0][1] / counts[1][1] < 2.5, "rank 1 is drawn twice as often as rank 2"
    assert 14 < counts[0][1] / counts[-1][1] < 30
    assert all(len(r.blocks) == 5 for r in requests if r.kind == "hot")


def test_skew_shifts_to_other_keys() -> None:
    requests = made("skew", requests=3000, rate=10.0, keys=50, zipf=1.5, cold=0.0, shift_every_s=150.0)
    early = Counter(r.id.split("/")[0] for r in requests if (r.arrival_s or 0) < 150)
    late = Counter(r.id.split("/")[0] for r in requests if (r.arrival_s or 0) >= 150)
    assert early.most_common(1)[0][0] != late.most_common(1)[0][0]
    still = made("skew", requests=3000, rate=10.0, keys=50, zipf=1.5, cold=0.0)
    assert (
        len(
            {
                Counter(r.id.split("/")[0] for r in half).most_common(1)[0][0]
                for half in (still[:1500], still[1500:])
            }
        )
        == 1
    )


def test_documents_are_shared_and_questions_are_not() -> None:
    requests = made("documents", documents=2, document=160, question=32, rate=2.0, questions=400)
    starts = {tuple(r.blocks[:10].tolist()) for r in requests}
    assert starts == {tuple(range(10)), tuple(range(10, 20))}
    asked = [i for r in requests for i in r.blocks[10:].tolist()]
    assert len(asked) == len(set(asked)) == 800
    assert 170 < (requests[-1].arrival_s or 0) < 230, "400 questions at 2 a second"


def test_churn_comes_round_in_one_order() -> None:
    requests = made("churn", prompts=5, rounds=3, prompt=32, every_s=2.0)
    rounds = [[r.blocks.tolist() for r in requests[n : n + 5]] for n in (0, 5, 10)]
    assert rounds[0] == rounds[1] == rounds[2]
    assert sorted(rounds[0]) == [[2 * n, 2 * n + 1] for n in range(5)]
    assert [r.arrival_s for r in requests] == [2.0 * n for n in range(15)]
    assert [r.blocks[0] for r in made("churn", 1)] != [r.blocks[0] for r in made("churn", 2)]


def test_a_stranger_shares_nothing_with_the_hot_stream() -> None:
    requests = made("stranger", seconds=60.0, intensity=5.0, cold_every_s=10.0)
    cold = [r for r in requests if r.kind == "cold"]
    hot = {i for r in requests if r.kind == "hot" for i in r.blocks.tolist()}
    assert [r.arrival_s for r in cold] == [5.0, 15.0, 25.0, 35.0, 45.0, 55.0]
    ids = [i for r in cold for i in r.blocks.tolist()]
    assert len(set(ids)) == len(ids) == 6 * 260
    assert not hot & set(ids)
    assert 240 < len(requests) - 6 < 360
    arrivals = [r.arrival_s or 0.0 for r in requests]
    assert arrivals == sorted(arrivals)


def test_distributions() -> None:
    random = np.random.default_rng(0)
    drawn = np.array([LogNormal(100.0, 1.5).draw(random) for _ in range(20000)])
    assert 96 < np.median(drawn) < 104
    assert 1.47 < np.log(drawn).std() < 1.53
    drawn = np.array([Quantiles([0, 0.5, 1], [0, 10, 1000]).draw(random) for _ in range(20000)])
    assert 9 < np.median(drawn) < 25
    assert 480 < np.quantile(drawn, 0.75) < 530


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("agent", {}, "generator 'agent': there are agents, bursts"),
        ("bursts", {"size": 0}, "bursts.size=0: Input should be greater"),
        ("bursts", {"size": True}, "bursts.size=True: "),
        ("bursts", {"length": 3}, "bursts.length=3: Unexpected keyword"),
        ("agents", {"reset_share": 1.5}, "agents.reset_share=1.5: "),
        ("agents", {"output": {"median": -1.0, "sigma": 1.0}}, "agents.output.LogNormal.median=-1.0: "),
        ("agents", {"output": {"at": [0, 1], "values": [2, 1]}}, "agents.output"),
        ("agents", {"output": {"at": [0, 0.9], "values": [1, 2]}}, "agents.output"),
        ("stranger", {"intensity": float("inf")}, "stranger.intensity"),
    ],
)
def test_parameters_are_checked(name: str, params: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        generate_trace(name, params)
    assert str(caught.value).startswith(says)


def test_the_sample_is_what_its_notes_say() -> None:
    """The shipped sample, made again from its own provenance."""
    sample = open_trace("sample:agents")
    assert (sample.name, sample.has_sessions, sample.block_size) == ("sample:agents", True, 64)
    note = sample.provenance.notes[0]
    assert note.startswith("generated: agents, seed 20, {")
    again = generate_trace("agents", json.loads(note.partition("seed 20, ")[2]), seed=20)
    one, other = info(sample), info(again)
    assert (one.requests, one.sessions, one.input_tokens, one.output_tokens) == (348, 24, 17612651, 140882)
    assert one.ideal_reused_blocks == other.ideal_reused_blocks == 255515
    for a, b in zip(sample, again, strict=True):
        assert (a.id, a.arrival_s, a.think_s, a.parent) == (b.id, b.arrival_s, b.think_s, b.parent)
        assert a.blocks.tolist() == b.blocks.tolist()
    assert list(SAMPLES) == ["sample:agents"]
    assert check(sample).problems == []
