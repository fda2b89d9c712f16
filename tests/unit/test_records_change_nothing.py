"""Turning observation on or off, or asking it anything, changes no decision: the plans are the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from hotprefix.kernel.request import Request
from hotprefix.records.kvevents import KVPublisher
from hotprefix.records.recorder import Recorder, RecordOptions
from hotprefix.records.spans import Spans
from hotprefix.report.inspect import inspect_log
from tests.support.observed import WatchedDriver, program, run

KEY = b"0123456789abcdef0123456789abcdef"


class Curious(Recorder):
    """Asks everything that a server asks, at each request and after each step."""

    def submitted(self, request: Request, arrived: float, now: float, trace: str | None = None) -> None:
        super().submitted(request, arrived, now, trace)
        self._ask(now)

    def changed(self, now: float) -> None:
        super().changed(now)
        self._ask(now)

    def _ask(self, now: float) -> None:
        self.stats()
        self.hottest(now)
        self.kernel.status(now + 100.0)
        self.kernel.waiting(now + 100.0)
        _ = self.kernel.predictions
        _ = self.kernel.counters, self.kernel.tier_counters

    def opened(self, kernel, info, fingerprint, now):  # type: ignore[no-untyped-def]
        self.kernel = kernel
        super().opened(kernel, info, fingerprint, now)


def plans(d: WatchedDriver) -> list[str]:
    return [repr(plan) for plan in d.plans]


@pytest.mark.parametrize("seed", range(50))
def test_plans_are_the_same_bytes(seed: int, tmp_path: Path) -> None:
    made = program(seed, 70)
    dark = run(made)
    options = [
        RecordOptions(KEY),
        RecordOptions(
            KEY,
            tmp_path / "log.jsonl",
            lambda: KVPublisher(f"inproc://events-{seed}"),
            spans=Spans(InMemorySpanExporter()),
        ),
    ]
    for chosen in options:
        recorder = Curious(chosen)
        lit = run(made, recorder)
        if chosen.events is not None:
            inspect_log(tmp_path / "log.jsonl", None)  # while it is written
        observed = recorder.stats()
        recorder.close()
        assert plans(lit) == plans(dark)
        assert (lit.outputs, lit.finish, lit.sources) == (dark.outputs, dark.finish, dark.sources)
        assert lit.kernel.counters == dark.kernel.counters
        assert lit.kernel.sink_failure is None
        assert observed.failed is None
    assert recorder._log is not None
    assert recorder._log.written > len(dark.plans)
    assert observed.kv_stored_pages > 0
