"""An experiment from file to files: pairing, resuming, identity, bad input, and what a run leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from rich.console import Console

from hotprefix.cost.presets import load_cost
from hotprefix.errors import ConfigError, InputError
from hotprefix.fleet.config import RoutingPolicy
from hotprefix.kernel.config import Eviction, KernelConfig
from hotprefix.lab.experiment.bounds import bound_facts, shares
from hotprefix.lab.experiment.load import Changes, load
from hotprefix.lab.experiment.one_run import run
from hotprefix.lab.experiment.result import ExperimentResult
from hotprefix.lab.experiment.run_plan import Plan, plan
from hotprefix.lab.sim.arrivals import Loop
from tests.support.experiments import in_this_process, tiny

FILE = tiny(
    top="bound = true",
    more="""
[[conditions]]
name = "tight"
[[conditions]]
name = "wide"
set = { "capacity.size" = 65536 }
[[hypotheses]]
id = "null"
claim = "Nothing changes where all fits."
why = "Nothing is evicted."
kind = "null"
arm = "lfu"
condition = "wide"
equal = [{ metric = "computed_tokens", amount = 0.0 }]
""",
)
QUIET = Console(quiet=True, stderr=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(FILE)
    return tmp_path / "tiny.toml"


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotprefix.lab.experiment.one_run.sweep", in_this_process)
        yield


def planned(path: Path, **changes: Any) -> Plan:
    return plan(load(str(path), Changes(**changes)))


def go(path: Path, out: Path, **changes: Any) -> ExperimentResult:
    return run(load(str(path), Changes(**changes)), out, QUIET, jobs=2)


def value(found: ExperimentResult, condition: str, arm: str, metric: str) -> list[float]:
    rows = found.metrics.filter(condition=condition, arm=arm, metric=metric).sort("seed")
    return rows["value"].to_list()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ExperimentResult]:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "tiny.toml").write_text(FILE)
    return folder, go(folder / "tiny.toml", folder / "out")


def test_counts_follow_from_the_policy_and_the_capacity(done: tuple[Path, ExperimentResult]) -> None:
    _, found = done
    # Six prompts of 16 pages, three rounds; 64 pages hold four: LRU has always dropped what comes next.
    assert value(found, "tight", "lru", "requests") == [18.0, 18.0]
    assert value(found, "tight", "lru", "reused_tokens") == [0.0, 0.0]
    # All fit: the second and third round reuse all but the last page, whose last token is computed.
    assert value(found, "wide", "lru", "reused_tokens") == [12 * 240.0] * 2
    assert value(found, "wide", "lfu", "reused_tokens") == [12 * 240.0] * 2
    assert found.conditions[0].capacity_tokens == 1024
    assert found.problems == ()
    assert [(v.hypothesis.id, v.outcome) for v in found.verdicts] == [("null", "as_expected")]


def test_the_bound_is_above_every_arm(done: tuple[Path, ExperimentResult]) -> None:
    _, found = done
    tight, wide = found.bounds
    assert (tight.condition, tight.capacity_tokens, tight.total_tokens) == ("tight", 1024, 18 * 256)
    # Of 6 x 15 pages that come round and round the best one can do is to keep the same 64 of them.
    assert tight.clairvoyant_tokens == 2 * 64 * 16
    assert wide.clairvoyant_tokens == 12 * 240
    assert tight.reused_tokens["lru"] == 0
    assert all(0 <= reused <= tight.clairvoyant_tokens for reused in tight.reused_tokens.values())
    assert wide.reused_tokens == {"lru": 12 * 240, "lfu": 12 * 240}


def test_arms_of_a_seed_see_the_same_requests(done: tuple[Path, ExperimentResult]) -> None:
    folder, found = done
    rows = pl.read_parquet(folder / "out" / "requests.parquet")
    assert rows.height == 2 * 2 * 2 * 18
    assert rows.columns[:4] == ["condition", "arm", "seed", "id"]
    seen = {
        key: tuple(part.sort("id").select("trace_id", "arrival_s").rows())
        for key, part in rows.partition_by("condition", "arm", "seed", as_dict=True).items()
    }
    one, two = seen["tight", "lru", 1], seen["tight", "lru", 2]
    assert one != two
    assert all(requests == (one if key[2] == 1 else two) for key, requests in seen.items())
    held = pl.read_parquet_metadata(folder / "out" / "requests.parquet")
    assert held["hotprefix.experiment"] == found.spec_hash


def test_a_second_run_does_nothing_again_and_a_damaged_one_is_redone(
    path: Path, done: tuple[Path, ExperimentResult]
) -> None:
    folder, found = done
    out = folder / "out"
    before = {p: p.stat().st_mtime_ns for p in (out / "runs").rglob("*.parquet")}
    assert len(before) == 8 * 5
    spoilt = next(p for p in before if p.name == "windows.parquet")
    content = spoilt.read_bytes()
    spoilt.write_bytes(content[: len(content) // 2])
    again = go(path, out)
    after = {p: p.stat().st_mtime_ns for p in (out / "runs").rglob("*.parquet")}
    assert {p.parent for p in after if after[p] != before[p]} == {spoilt.parent}
    assert spoilt.read_bytes() == content
    assert again.metrics.equals(found.metrics)
    assert again.spec_hash == found.spec_hash


def test_whatever_decides_a_result_is_in_the_hash_and_nothing_else(path: Path, tmp_path: Path) -> None:
    first = planned(path)
    assert planned(path).identity == first.identity
    assert len({task.key for task in first.tasks}) == 8
    changed = [
        planned(path, limit=17), planned(path, seeds=3), planned(path, sets=("kernel.order=lpm",)),
        planned(path, sets=("load.speed=2",)), planned(path, sets=("trace.params.output=5",)),
        planned(path, sets=("slo.ttft_s=1",)), planned(path, sets=("cost=llama-3.3-70b.2xh100.fp8",)),
    ]  # fmt: skip
    assert len({first.identity, *(p.identity for p in changed)}) == len(changed) + 1
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "other.toml"
    moved.write_text(FILE)
    assert planned(moved).identity == first.identity
    # The objectives judge runs; they do not change one.
    assert {t.key for t in planned(path, sets=("slo.ttft_s=1",)).tasks} == {t.key for t in first.tasks}
    # More seeds keep the runs there are.
    assert {t.key for t in first.tasks} < {t.key for t in planned(path, seeds=3).tasks}


@pytest.mark.parametrize(
    ("changes", "message", "field"),
    [
        (
            {"trace": "sample:agents", "limit": 20, "sets": ("load.speed=2", "bound=false")},
            r"load.speed=2: in closed loop .*; leave it out",
            "load.speed",
        ),
        (
            {"trace": "sample:agents", "limit": 20, "sets": ("load.session_rate=2", "bound=false")},
            r"session_rate=2: sample:agents is of format hotprefix, which says when",
            "session_rate",
        ),
        (
            {"sets": ("capacity.unit=sessions", "kernel.page_size=16")},
            r"capacity.size=1e\+30 sessions is 1.63e\+31 pages of 16 tokens: give at most 16,777,216 pages",
            "capacity.size",
        ),
    ],
)
def test_what_no_replay_can_hold_is_refused_before_any_runs(
    path: Path, changes: dict[str, Any], message: str, field: str
) -> None:
    if field == "capacity.size":
        path.write_text(FILE.replace("size = 1024", "size = 1e30"))
    with pytest.raises(ConfigError, match=message) as caught:
        planned(path, **changes)
    assert caught.value.param == field


def test_an_experiment_about_sessions_says_so_where_there_are_none(path: Path) -> None:
    path.write_text(FILE.replace('"capacity.size" = 65536', '"load.concurrency" = 4'))
    with pytest.raises(ConfigError, match=r"tiny: condition 'wide' sets load.concurrency, .* with sessions"):
        planned(path)


def test_many_instances_hold_no_more_than_one(path: Path) -> None:
    path.write_text(FILE.replace("65536", "1048576"))
    with pytest.raises(ConfigError, match=r"on each of 4096 instances: give at most 16,777,216 .* together"):
        planned(path, sets=("cluster.instances=4096",))


def test_a_trace_file_is_known_by_its_content(path: Path, tmp_path: Path) -> None:
    row = '{"timestamp": %d, "input_length": 700, "output_length": 2, "hash_ids": [1, %d]}\n'
    one, two, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    one.write_text("".join(row % (1000 * n, 2 + n) for n in range(4)))
    two.write_text(one.read_text())
    other.write_text(one.read_text().replace("700", "701"))
    keys = [[t.key for t in planned(path, trace=str(p)).tasks] for p in (one, two, other)]
    assert keys[0] == keys[1]
    assert not set(keys[0]) & set(keys[2])


def test_where_no_seed_matters_there_is_one_run(path: Path, tmp_path: Path) -> None:
    trace = tmp_path / "a.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n')
    found = planned(path, trace=str(trace), seeds=3)
    assert {place: [t.seed for t in some] for place, some in found.runs.items()} == {
        (condition, arm): [1] for condition in ("tight", "wide") for arm in ("lru", "lfu")
    }
    assert found.runs["tight", "lru"][0].loop is Loop.OPEN
    assert found.runs["tight", "lru"][0].kernel.page_size == 512


def test_capacity_in_sessions_is_that_many_longest_contexts(path: Path) -> None:
    path.write_text(FILE.replace("size = 1024", 'size = 2.5\nunit = "sessions"'))
    # A request without a session counts as one: 256 + 4 tokens, pages of 16.
    assert planned(path).runs["tight", "lru"][0].kernel.total_pages == int(2.5 * 260 // 16)


def test_a_trace_without_prefixes_is_refused(path: Path, tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    with pytest.raises(InputError, match=r"records arrivals and lengths only"):
        planned(path, trace=str(trace))


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("load.loop=closed",), r"load.loop=closed"),
        (("cost=nothing",), r"cost 'nothing': neither a file nor a preset"),
        (("trace.generate=none",), r"generator 'none': there are"),
        (("trace.params.prompts=0",), r"churn.prompts=0"),
        (("load.session_rate=0.2",), r"load.session_rate=0.2: generator 'churn' says when"),
        (("load.session_rate=0.2", "load.concurrency=2"), r"load: give concurrency or session_rate"),
        (("load.warm_up=2",), r"bound=true: load.warm_up=2"),
        (("kernel.page_size=7",), r"bound=true: kernel.page_size=7: give a divisor of .* 16"),
        (("kernel.tiers.pages=8",), r"bound=true: only L1 has a bound"),
    ],
)
def test_what_only_the_trace_can_tell_is_refused_before_anything_runs(
    path: Path, tmp_path: Path, sets: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        go(path, tmp_path / "out", sets=sets)
    assert not (tmp_path / "out").exists()


def test_a_cache_smaller_than_a_request_rejects_it_and_ends(path: Path, tmp_path: Path) -> None:
    path.write_text(FILE.replace("size = 1024", "size = 128"))
    found = go(path, tmp_path / "out", seeds=1)
    assert value(found, "tight", "lru", "rejected") == [18.0]
    assert value(found, "tight", "lru", "finished") == [0.0]
    assert value(found, "tight", "lru", "slo_share") == [0.0]
    assert value(found, "wide", "lru", "rejected") == [0.0]
    assert found.problems == ()


def test_a_run_that_cannot_be_done_is_told_beside_the_others(path: Path, tmp_path: Path) -> None:
    # Tiers without figures for their links: only the simulator can tell.
    tiers = '{ "kernel.tiers.pages" = 8, "cost" = "bare.json" }'
    path.write_text(FILE.replace("bound = true", "").replace('{ "capacity.size" = 65536 }', tiers))
    cost = json.loads(load_cost("llama-3.1-8b.1xh100.fp8").model_dump_json())
    cost["links"] = {}
    (tmp_path / "bare.json").write_text(json.dumps(cost))
    found = go(path, tmp_path / "out", seeds=1)
    assert [(p.condition, p.arm, p.kind) for p in found.problems] == [
        ("wide", "lru", "failed"), ("wide", "lfu", "failed"),
    ]  # fmt: skip
    assert "link" in found.problems[0].message
    assert value(found, "tight", "lru", "requests") == [18.0]
    (verdict,) = found.verdicts
    assert verdict.outcome == "inconclusive"


def test_shares_of_the_bound_are_each_runs_own() -> None:
    facts = {
        "a": [
            {"total_tokens": 100, "reused_tokens": 20, "clairvoyant_tokens": 40},
            {"total_tokens": 100, "reused_tokens": 30, "clairvoyant_tokens": 30},
        ],
        "b": [{"total_tokens": 100, "reused_tokens": 0, "clairvoyant_tokens": 0}],
    }
    assert shares(facts) == {"a": 0.75}


def test_the_bound_counts_each_instance_by_itself(path: Path) -> None:
    # By turns, five prompts come to the other instance each time: only the third round finds the first's.
    task = planned(path, sets=("trace.params.prompts=5",)).runs["wide", "lru"][0]
    both = replace(
        task, settings=task.settings.model_copy(update={"cluster": task.settings.cluster.model_copy(
            update={"instances": 2, "policy": RoutingPolicy.ROUND_ROBIN})})
    )  # fmt: skip
    output = both.run(lambda done: None)
    requests = output.tables["requests"]
    assert requests["instance"].unique().sort().to_list() == [0, 1]
    assert output.facts["bound"] == {
        "total_tokens": 15 * 256, "reused_tokens": 5 * 240, "clairvoyant_tokens": 5 * 240,
    }  # fmt: skip


def test_a_bound_of_nothing_executed_is_zero(path: Path) -> None:
    task = planned(path).runs["wide", "lru"][0]
    requests = task.run(lambda done: None).tables["requests"].clear()
    assert bound_facts([], requests, KernelConfig(total_pages=4, eviction=Eviction.LRU), 16) == {
        "total_tokens": 0, "reused_tokens": 0, "clairvoyant_tokens": 0,
    }  # fmt: skip
