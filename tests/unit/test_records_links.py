"""What passes over links, and what fails there, is in the event log: its records add up to the counters."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotprefix.engine.link_totals import Copied, LinkTotal, link_totals
from hotprefix.engine.messages import Generate
from hotprefix.engine.params import SamplingParams
from hotprefix.engine.stores.breaker import BreakerState
from hotprefix.engine.stores.errors import Reason
from hotprefix.engine.stores.store_counters import LinkStats
from hotprefix.kernel.cache.host import HostCounters
from hotprefix.records import schema as sc
from hotprefix.records.event_log import EventLog
from hotprefix.records.log_summary import summarize
from hotprefix.report.inspect import inspect_log
from tests.support.engine import fake_loop
from tests.unit.test_records_derive import Lists


def stats(pages: int, size: int, seconds: float, **failures: int) -> LinkStats:
    found = {Reason(reason): count for reason, count in failures.items()}
    return LinkStats(9, pages, size, seconds, found, None, BreakerState.CLOSED, 0)


def test_a_link_that_is_not_there_is_absent() -> None:
    host = HostCounters(saved=3, restored=2)
    assert link_totals(host, None, None) == {}
    assert link_totals(host, Copied(30, 0.5, 20, 0.25), None) == {
        "device_to_host": LinkTotal(3, 30, 0.5), "host_to_device": LinkTotal(2, 20, 0.25),
    }  # fmt: skip
    store: Any = SimpleNamespace(read=stats(5, 50, 1.0, timeout=2), write=stats(7, 70, 2.0))
    found = link_totals(host, None, store)
    assert found == {
        "storage_to_host": LinkTotal(5, 50, 1.0, {"timeout": 2}), "host_to_storage": LinkTotal(7, 70, 2.0)
    }  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_records_add_up_to_the_totals(tmp_path: Path, suffix: str) -> None:
    """Random growth, also of failures alone; what did not move is not told."""
    r, recorder = random.Random(1), Lists()
    fake_loop(observer=recorder)
    path = tmp_path / f"log{suffix}"
    head = recorder.records[0]
    assert isinstance(head, sc.Header)
    recorder._log = EventLog(path, head)
    total = {name: LinkTotal(0, 0, 0.0) for name in ("host_to_device", "storage_to_host")}
    told = 0
    for second in range(60):
        for name, old in list(total.items()):
            pages, failed = r.choice([0, 0, 3]), r.choice([0, 0, 2])
            reason = r.choice(["timeout", "corrupted"])
            failures = dict(old.failures)
            if failed:
                failures[reason] = failures.get(reason, 0) + failed
            total[name] = LinkTotal(
                old.pages + pages, old.bytes + 8 * pages, old.seconds + pages / 4, failures
            )
            told += bool(pages or failed)
        recorder.moved(total, float(second))
    recorder._log.close()
    found = summarize(path)
    assert found.read.records == told + 1
    for name, sums in found.links.items():
        assert dataclasses.astuple(sums) == tuple(total[name]), name
    assert found.links.keys() == total.keys()
    links = inspect_log(path, tmp_path / "a.html")["links"]
    assert json.loads(json.dumps(links)) == links
    assert links["storage_to_host"]["pages"] == total["storage_to_host"].pages
    assert "timeout" in (tmp_path / "a.html").read_text()


def test_the_loop_tells_of_links_now_and_then_and_at_the_end() -> None:
    recorder = Lists()
    loop, executor, clock = fake_loop(observer=recorder)
    links = Copied()
    loop._host = SimpleNamespace(links=links)  # type: ignore[assignment]
    execute = executor.execute

    def copying(plan: Any) -> Any:
        nonlocal links
        clock.now += 0.3
        links = dataclasses.replace(links, restored_bytes=links.restored_bytes + 10)
        loop._host = SimpleNamespace(links=links)  # type: ignore[assignment]
        return execute(plan)

    executor.execute = copying  # type: ignore[method-assign]
    loop.submit(Generate("a", tuple(range(8)), SamplingParams(max_tokens=15)))
    while loop.has_work:
        loop.step()
    steps = loop.kernel.counters.steps
    before = [r for r in recorder.records if isinstance(r, sc.Link)]
    assert steps * 0.3 / 2 < len(before) < steps * 0.3 + 2, "once a second"
    recorder.close = lambda: None  # type: ignore[method-assign]
    clock.now += 0.1
    loop.close()
    told = [r for r in recorder.records if isinstance(r, sc.Link)]
    assert sum(r.bytes for r in told) == links.restored_bytes == 10 * steps
    assert {r.link for r in told} == {"host_to_device"}
