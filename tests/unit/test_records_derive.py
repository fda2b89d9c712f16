"""Per-request figures from records: against what the driver saw, and against the plans themselves."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter
from pathlib import Path

import pytest

from hotprefix.kernel import events as ev
from hotprefix.kernel.sources import Use
from hotprefix.records import schema as sc
from hotprefix.records.derive import Derivation
from hotprefix.records.log_summary import summarize
from hotprefix.records.of_event import of_event
from hotprefix.records.percentiles import Sketch
from hotprefix.records.read_log import ReadReport, read_log
from hotprefix.records.recorder import Recorder, RecordOptions
from hotprefix.records.request_row import RequestRow
from tests.support.fake import VOCAB
from tests.support.observed import WatchedDriver, program, run

KEY = b"0123456789abcdef0123456789abcdef"
TIMES = ("queue_s", "requeue_s", "ttft_s", "total_s")


class Lists(Recorder):
    """A recorder whose log is a list."""

    def __init__(self) -> None:
        super().__init__(RecordOptions(KEY, Path("unused.jsonl")))
        self.records: list[sc.Record] = []

    def opened(self, kernel, info, fingerprint, now):  # type: ignore[no-untyped-def]
        self._options = RecordOptions(KEY)
        super().opened(kernel, info, fingerprint, now)
        self.records.append(self._header(kernel, info, fingerprint, now))
        self._log = self  # type: ignore[assignment]

    def put(self, item: object) -> None:
        if isinstance(item, ev.Event):
            item = of_event(item)
        self.records.append(item if isinstance(item, sc.Record) else item())  # type: ignore[operator]

    @property
    def wants_events(self) -> bool:
        return True


def rows_of(records: list[sc.Record]) -> tuple[dict[str, RequestRow], Derivation]:
    derivation = Derivation()
    found = [row for record in records for row in derivation.feed(record)]
    found += derivation.finish()
    assert len({row.request for row in found}) == len(found), "one row for each request"
    return {row.request: row for row in found}, derivation


def watched(seed: int, length: int = 60) -> tuple[WatchedDriver, list[sc.Record]]:
    recorder = Lists()
    return run(program(seed, length), recorder), recorder.records


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_what_the_driver_saw(seed: int) -> None:
    d, records = watched(seed)
    rows, derivation = rows_of(records)
    assert set(rows) == set(d.prompts)
    for name, row in rows.items():
        assert row.prompt_tokens == len(d.prompts[name])
        assert row.outcome == d.finish[name].value
        if row.first_use is None:  # it never ran, so nothing of it was measured
            assert (row.device, row.cached, row.computed, row.retained) == (None, None, None, None)
            assert not d.computed.get(name)
        else:
            assert (row.device, row.host, row.storage) == d.sources[name]
            assert (row.cached, row.positions) == (d.cached[name], d.computed[name])
        assert row.outputs == len(d.outputs[name])
        assert all(value is None or value >= 0 for value in (getattr(row, t) for t in TIMES))
        assert (row.ttft_s is None) == (not d.outputs[name])
        if row.queue_s is None:
            assert row.matched_at_admission is None
            assert not row.cached
        if row.ttft_s is not None:
            assert row.queue_s is not None
            assert row.queue_s <= row.ttft_s <= row.total_s  # type: ignore[operator]
        if row.reached == row.prompt_tokens:
            parts = (row.retained, row.regained, row.restored_host, row.restored_storage, row.recomputed)
            assert min(p for p in parts if p is not None) >= 0
            assert sum(p or 0 for p in parts) == row.matched_at_enqueue
    count = d.kernel.counters
    assert derivation.totals.lost_waiting_tokens == count.lost_waiting_tokens
    assert sum(row.cached or 0 for row in rows.values()) == count.cached_tokens
    assert sum(row.ran_tokens or 0 for row in rows.values()) == count.prompt_tokens


def test_queue_time_is_the_first_wait_and_waits_after_retractions_are_apart() -> None:
    """A request that was put back to wait."""
    found = [rows_of(watched(seed, 80)[1])[0] for seed in range(30)]
    again = [row for rows in found for row in rows.values() if row.requeue_s is not None]
    assert again
    for row in again:
        assert row.retractions
        assert row.queue_s is not None
        assert row.queue_s + (row.requeue_s or 0.0) <= (row.total_s or math.inf)
    records: list[sc.Record] = [
        header(), sc.Enqueue(t=1.0, request="a", prompt_tokens=8, matched=0, parked=False),
        admit(3.0), sc.Retract(t=4.0, request="a", reason="no room", lost=4), admit(9.0, again=True),
        end(10.0),
    ]  # fmt: skip
    row = rows_of(records)[0]["a"]
    assert (row.queue_s, row.requeue_s, row.total_s) == (2.0, 5.0, 9.0)


def header(run_name: str = "a", t: float = 0.0) -> sc.Header:
    return sc.Header(
        t=t,
        run=run_name,
        part=0,
        wall=1000.0,
        hotprefix="0",
        model="m",
        fingerprint="f",
        key="k",
        page_size=4,
    )


def admit(t: float, matched: int = 0, enqueue: int = 0, again: bool = False, request: str = "a") -> sc.Admit:
    return sc.Admit(t=t, request=request, matched=matched, matched_at_enqueue=enqueue, restored_host=0,
                    restored_storage=0, cached=matched, again=again)  # fmt: skip


def end(t: float, sources: tuple[int, int, int] | None = (0, 0, 0), request: str = "a") -> sc.End:
    """sources: None = no step of it ran."""
    device, host, storage = sources or (None, None, None)
    computed = None if sources is None else 64 - sum(sources)
    return sc.End(t=t, request=request, reason="stop", device=device, host=host, storage=storage,
                  computed=computed, recomputed=None if sources is None else 0, outputs=1,
                  retractions=0)  # fmt: skip


def stepped(t: float, ok: bool = True) -> sc.Step:
    return sc.Step(t=t, step=1, ok=ok, prefill_tokens=4, decode_tokens=0, running=1, waiting=0, free=0,
                   evictable=0, protected=0)  # fmt: skip


def prefill(t: float, start: int, stop: int = 64, **counted: int) -> sc.Prefill:
    """counted: fields of `Use`; the prompt's positions are those of the chunk."""
    use = Use(**{"prompt": stop - start, **counted})
    return sc.Prefill(t=t, request="a", start=start, stop=stop, taken=[], **use._asdict())


def enqueue(t: float, matched: int, request: str = "a") -> sc.Enqueue:
    return sc.Enqueue(t=t, request=request, prompt_tokens=64, matched=matched, parked=False)


def test_figures_are_the_sums_of_the_chunks_that_ran() -> None:
    """Retention, sources and computation; loss and retention do not depend on the counts at admission."""
    records: list[sc.Record] = [
        header(), enqueue(1.0, 32), admit(2.0, 40, 32),
        prefill(3.0, 40, 48, device=24, host=16, retained=8, regained=16, restored_host=8), stepped(3.0),
        prefill(4.0, 56, storage=8), stepped(4.0), end(5.0, (24, 16, 8)),
    ]  # fmt: skip
    rows, derivation = rows_of(records)
    row = rows["a"]
    assert (row.retained, row.regained, row.restored_host, row.restored_storage, row.recomputed) == (
        8, 16, 8, 0, 0,
    )  # fmt: skip
    assert (row.lost, row.hit_loss) == (24, -8)
    assert (row.device, row.host, row.storage, row.computed, row.reached) == (24, 16, 8, 16, 64)
    assert derivation.totals.lost_waiting_tokens == 24


def test_a_request_that_has_not_ended_has_its_figures_as_far_as_it_came() -> None:
    """A log that is still written, or that a crash has cut."""
    records: list[sc.Record] = [
        header(), enqueue(1.0, 32), admit(2.0, 32, 32), prefill(3.0, 32, 48, device=32, retained=32),
        stepped(3.0),
    ]  # fmt: skip
    row = rows_of(records)[0]["a"]
    assert (row.outcome, row.cached, row.computed, row.reached, row.first_use) == ("open", 32, 16, 48, 3.0)
    assert (row.total_s, row.outputs, row.positions) == (None, None, None)


def test_a_step_that_failed_leaves_no_figures() -> None:
    records: list[sc.Record] = [
        header(), enqueue(1.0, 32), admit(2.0, 16, 32),
        sc.Retract(t=3.0, request="a", reason="step 1 failed", lost=0), stepped(3.0, ok=False),
        admit(4.0, 0, 32, again=True), prefill(5.0, 0, recomputed=32), stepped(5.0), end(6.0),
    ]  # fmt: skip
    row = rows_of(records)[0]["a"]
    assert (row.retained, row.restored_host, row.recomputed, row.cached) == (0, 0, 32, 0)
    assert (row.hit_loss, row.first_use) == (16, 5.0)


def test_times_count_from_when_the_client_s_request_arrived() -> None:
    info = sc.RequestInfo(
        t=1.5, request="a", arrived=1.0, prompt_tokens=64, max_tokens=1, priority=0, pages=[]
    )
    records: list[sc.Record] = [
        header(), info, enqueue(1.5, 0), admit(2.0), prefill(3.0, 0), stepped(3.0),
        sc.FirstToken(t=3.0, request="a"), end(4.0),
    ]  # fmt: skip
    row = rows_of(records)[0]["a"]
    assert (row.arrival, row.queue_s, row.ttft_s, row.total_s) == (1.0, 1.0, 2.0, 3.0)


def test_what_was_not_measured_is_absent() -> None:
    records: list[sc.Record] = [header(), enqueue(1.0, 32), end(2.0, None)]
    row = rows_of(records)[0]["a"]
    absent = (
        "queue_s", "ttft_s", "matched_at_admission", "hit_loss", "retained", "recomputed", "lost", "device",
        "cached", "computed", "positions", "hot",
    )  # fmt: skip
    assert all(getattr(row, name) is None for name in absent)
    assert (row.total_s, row.outcome, row.ran_tokens) == (1.0, "stop", None)


def test_a_new_run_ends_what_was_open_and_a_lost_record_keeps_nobody() -> None:
    records: list[sc.Record] = [
        header(), enqueue(1.0, 0, "gone"), enqueue(1.0, 0, "a"), end(2.0), stepped(3.0), header("b", 0.5),
        enqueue(0.6, 0, "gone"),
    ]  # fmt: skip
    derivation = Derivation()
    found = [[(row.run, row.request, row.outcome) for row in derivation.feed(r)] for r in records]
    assert found == [[], [], [], [("a", "a", "stop")], [], [("a", "gone", "open")], []]
    assert [(row.run, row.request) for row in derivation.finish()] == [("b", "gone")]


def test_hot_means_that_half_of_its_prompt_was_known() -> None:
    """Prompts of 16 tokens in pages of 4; what an answer completed is known when it has been given."""

    def asked(t: float, name: str, *pages: str, answer: str = "") -> list[sc.Record]:
        info = sc.RequestInfo(
            t=t, request=name, arrived=t, prompt_tokens=16, max_tokens=1, priority=0, pages=list(pages)
        )
        enqueued = sc.Enqueue(t=t, request=name, prompt_tokens=16, matched=0, parked=False)
        return [info, enqueued, dataclasses.replace(end(t, request=name), answer=list(answer))]

    records: list[sc.Record] = [
        header(), *asked(1, "first", *"abcd", answer="ef"), *asked(2, "one page", *"axyz"),
        *asked(9000, "two pages", *"abxx"), *asked(9001, "short"),
        *asked(9002, "not the leading ones", *"wbcd"),
        *asked(9003, "after its answer", *"abcd"), *asked(9004, "answer's", *"efgh"),
    ]  # fmt: skip
    rows, _ = rows_of(records)
    assert {name: (row.hot, row.heat) for name, row in rows.items()} == {
        "first": (False, 0), "one page": (False, 1), "two pages": (True, 2), "short": (False, 0),
        "not the leading ones": (False, 0), "after its answer": (True, 3), "answer's": (True, 0),
    }  # fmt: skip


def test_queue_depth_is_those_that_wait_for_their_first_admission() -> None:
    def came(t: float, name: str) -> sc.Record:
        return enqueue(t, 0, name)

    records: list[sc.Record] = [
        header(), came(1, "a"), came(2, "b"), admit(3, request="a"), came(4, "c"),
        sc.Retract(t=5, request="a", reason="no room", lost=0), came(6, "d"), end(7, None, request="b"),
        came(8, "e"), header("b"), came(1, "f"),
    ]  # fmt: skip
    rows, _ = rows_of(records)
    assert {name: row.queue_depth for name, row in rows.items()} == {
        "a": 0, "b": 1, "c": 1, "d": 2, "e": 2, "f": 0
    }  # fmt: skip


def test_case_156_recomputed_tokens_are_no_reuse() -> None:
    """Random prompts with forced preemption: nothing was shared, so nothing was reused."""
    recorder = Lists()
    d = WatchedDriver(recorder, total_pages=24, page_size=4, output_reserve=0.0, max_running=6)
    r = random.Random(5)
    for number in range(12):
        d.submit(f"r{number}", [r.randrange(VOCAB) for _ in range(16)], 30)
    d.run()
    rows, derivation = rows_of(recorder.records)
    assert derivation.totals.retractions > 0
    assert sum(row.cached or 0 for row in rows.values()) == 0
    assert all((row.device, row.host, row.storage) == (0, 0, 0) for row in rows.values())


def test_case_157_a_request_that_is_tried_often_counts_once() -> None:
    recorder = Lists()
    d = WatchedDriver(recorder, total_pages=12, page_size=4, max_running=4, output_reserve=1.0)
    d.submit("first", list(range(8)), 30)
    d.step()
    d.submit("blocked", list(range(8)), 30)
    d.run()
    rows, _ = rows_of(recorder.records)
    assert rows["blocked"].queue_s > 20  # type: ignore[operator]
    assert d.kernel.counters.lookups == 2
    kinds = Counter((type(record), getattr(record, "request", None)) for record in recorder.records)
    assert kinds[sc.Admit, "blocked"] == kinds[sc.Enqueue, "blocked"] == kinds[sc.End, "blocked"] == 1


# -- percentiles and the whole log ----------------------------------------------------------------


def test_percentiles_are_within_one_percent() -> None:
    r = random.Random(1)
    for draw in (lambda: r.lognormvariate(0, 2), lambda: r.random(), lambda: float(r.randrange(5))):
        values, sketch = [draw() for _ in range(5000)], Sketch()
        for value in values:
            sketch.add(value)
        values.sort()
        for share in (0.01, 0.5, 0.9, 0.99, 1.0):
            exact = values[max(0, math.ceil(share * len(values)) - 1)]
            assert sketch.quantile(share) == pytest.approx(exact, rel=0.0101, abs=1e-6)
        assert sketch.mean == pytest.approx(sum(values) / len(values))
    assert len(sketch._bins) < 3000
    assert Sketch().quantile(0.5) is None
    with pytest.raises(ValueError, match="negative"):
        sketch.add(-1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_a_log_s_windows_add_up_to_the_kernel_s_counts(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "log.jsonl"
    recorder = Recorder(RecordOptions(KEY, path), wall=lambda: 1_000_000.0)
    d = run(program(seed, 200), recorder)
    recorder.close()
    summary = summarize(path)
    count = d.kernel.counters
    assert sum(w.cached for w in summary.windows.values()) == count.cached_tokens
    assert sum(w.uncached for w in summary.windows.values()) == count.computed_prompt_tokens
    series = summary.throughput()
    assert sum(w[1] for w in series) * 30 == pytest.approx(count.cached_tokens)
    assert series[0][0] >= 1_000_000 - 30
    assert [b[0] - a[0] for a, b in itertools.pairwise(series)] == [30] * (len(series) - 1)
    last = series[-1]
    assert last[3] == pytest.approx(sum(w[1] for w in series[-10:]) / 10)
    groups = summary.groups
    assert groups["all"].requests == sum(groups[g].requests for g in ("hot", "cold")) > 0
    assert groups["all"].requests == len(d.finish)
    assert (
        sum(p.requests for p in summary.prefixes.values()) <= groups["hot"].requests + groups["cold"].requests
    )
    report = ReadReport()
    assert sum(1 for _ in read_log(path, report)) == summary.read.records
