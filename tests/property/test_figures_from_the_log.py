"""One definition, three readers: the event log alone, read the plain way, gives the kernel's counters, what
`inspect` says and the tables of the lab, to the token; for random programs with tiers, shared and overlapping
fetches, failures, retractions, aborts and holds."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hotprefix.kernel import events as ev
from hotprefix.kernel.counters import Counters
from hotprefix.lab.sim.replay_recorder import Recorder as Tables
from hotprefix.lab.sim.rows import REQUEST_COLUMNS
from hotprefix.records.log_summary import summarize
from hotprefix.records.recorder import Recorder, RecordOptions
from tests.support.naive_log import NaiveLog
from tests.support.observed import WatchedDriver, busy_program, program, run

KEY = b"0123456789abcdef0123456789abcdef"
NOT_TOLD = {"refresh_passes", "refresh_touches", "duplicate_pages"}


class Both(Recorder):
    """A log, and the lab's table of requests."""

    def __init__(self, path: Path) -> None:
        super().__init__(RecordOptions(KEY, path), wall=lambda: 3_000_000.0)
        self.tables = Tables(0, None)
        self.all: dict[str, dict[str, Any]] = {}

    def event(self, event: ev.Event) -> None:
        super().event(event)
        if isinstance(event, ev.Enqueued):
            row = dict.fromkeys(REQUEST_COLUMNS) | {
                "id": event.request, "arrival_s": event.now, "retractions": 0, "requeue_s": 0.0,
                "output_tokens": 0, "outcome": "unfinished",
            }  # fmt: skip
            self.all[event.request] = row
            self.tables.arrived(row)
        if not isinstance(event, ev.Rejected):
            self.tables.sink(event)


def recorded(path: Path, made: Any) -> tuple[WatchedDriver, Both, NaiveLog]:
    recorder = Both(path)
    d = run(made, recorder)
    recorder.close()
    assert d.kernel.sink_failure is None
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return d, recorder, NaiveLog(records, cache=d.config.prefix_cache, same_step=made.reads_planned)


def check(tmp_path: Path, made: Any) -> Counter[str]:
    d, recorder, naive = recorded(tmp_path / "log.jsonl", made)
    count, told = d.kernel.counters, naive.counters()
    for name in (f.name for f in fields(Counters)):
        if name not in NOT_TOLD:
            assert told[name] == getattr(count, name), name
    check_inspect(naive, tmp_path / "log.jsonl")
    for name, one in naive.requests.items():
        check_row(one.figures, one, recorder.all[name])
        assert (one.reason or "") == d.finish[name].value
    return told


def check_inspect(naive: NaiveLog, path: Path) -> None:
    summary = summarize(path)
    tokens = summary.groups["all"].tokens
    sums: Counter[str] = Counter()
    for one in naive.requests.values():
        sums.update(one.figures)
    same = {
        "device": "cached_device", "host": "cached_host", "storage": "cached_storage", "computed": "prompt",
        "again_prompt": "again_prompt", "retained": "retained", "regained": "regained",
        "restored_host": "restored_host", "restored_storage": "restored_storage", "recomputed": "recomputed",
    }  # fmt: skip
    assert {ours: tokens[ours] for ours in same} == {ours: sums[naive_] for ours, naive_ in same.items()}
    told = naive.counters()
    assert tokens["matched_at_enqueue"] == sum(one.matched for one in naive.requests.values())
    assert tokens["lost"] == told["lost_waiting_tokens"] == summary.totals.lost_waiting_tokens
    assert tokens["ran_tokens"] == told["prompt_tokens"]
    assert tokens["positions"] == told["computed_prompt_tokens"] + told["computed_output_tokens"]
    assert tokens["recomputed_positions"] == told["recomputed_tokens"]
    assert summary.totals.published_pages == told["indexed_pages"]
    assert summary.totals.evicted_pages == told["evicted_pages"]
    assert sum(w.uncached for w in summary.windows.values()) == told["computed_prompt_tokens"]
    assert sum(w.cached for w in summary.windows.values()) == told["cached_tokens"]


def check_row(own: Counter[str], one: Any, row: dict[str, Any]) -> None:
    names = {
        "cached_l1": "cached_device", "cached_l2": "cached_host", "cached_l3": "cached_storage",
        "computed_tokens": "prompt", "rework_tokens": "again_prompt", "rework_output_tokens": "again_outputs",
        "retained_tokens": "retained", "regained_tokens": "regained", "restored_l2_tokens": "restored_host",
        "restored_l3_tokens": "restored_storage", "recomputed_tokens": "recomputed",
    }  # fmt: skip
    assert row["matched_at_enqueue"] == one.matched
    if not one.ran:
        assert all(row[name] is None for name in names), "what never ran has no figures"
        return
    assert {name: row[name] for name in names} == {name: own[other] for name, other in names.items()}
    if row["prefill_done_s"] is not None:
        parts = sum(row[n] for n in ("cached_l1", "cached_l2", "cached_l3", "computed_tokens"))
        assert parts - row["rework_tokens"] == one.prompt
        kept = [f"{p}_tokens" for p in ("retained", "regained", "restored_l2", "restored_l3", "recomputed")]
        assert sum(row[n] for n in kept) == one.matched


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(tmp_path: Path, seed: int) -> None:
    check(tmp_path, program(seed, 80))


@pytest.mark.parametrize("seed", range(120))
def test_programs_that_wait_lose_and_share(tmp_path: Path, seed: int) -> None:
    check(tmp_path, busy_program(seed))


def test_the_programs_reach_every_part(tmp_path: Path) -> None:
    """Else the tests above could not fail."""
    seen: Counter[str] = Counter()
    for seed in range(120):
        told = check(tmp_path, busy_program(seed))
        (tmp_path / "log.jsonl").unlink()
        seen.update({name: 1 for name, amount in told.items() if amount})
    for name in (f.name for f in fields(Counters)):
        if name not in NOT_TOLD | {"failed", "stalls"}:
            assert seen[name] >= 5, (name, seen[name])
