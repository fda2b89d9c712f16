"""What observation costs: CPU microseconds of a loop's step without a model, unwatched and watched.

usage: python bench/observation.py [RUNS]

16 requests with 500-token prompts decode 400 tokens each. `off`: no observer; `heat`: what the live page
counts; `log`: an event log as well, its thread's work included (process time of all threads); `spans`: spans
in place of the log, up to an exporter that throws them away. Rounds are interleaved; each row is the median
and the range over RUNS rounds (default 7).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from hotprefix.engine.executor import Sampled, StepResult
from hotprefix.engine.live_request import TokensOnly
from hotprefix.engine.loop import EngineLoop
from hotprefix.engine.messages import EngineInfo, Generate
from hotprefix.engine.params import SamplingParams
from hotprefix.kernel.config import Capabilities, KernelConfig
from hotprefix.kernel.plan import StepPlan
from hotprefix.records.recorder import Recorder, RecordOptions
from hotprefix.records.spans import Spans

ARMS = ("off", "heat", "log", "spans")
KERNEL = KernelConfig(total_pages=2048, page_size=16, max_running=64)


class NoModel:
    """Samples token 5 at once."""

    capabilities = Capabilities()

    def start(self, request: str, prompt: object, params: object) -> None: ...

    def finish(self, request: str) -> None: ...

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult({chunk.request: Sampled(5) for chunk in plan.chunks if chunk.samples})


class Nowhere(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def step_us(arm: str, folder: Path) -> float:
    """CPU time of one run over its steps."""
    log = folder / f"{time.monotonic_ns()}.jsonl" if arm == "log" else None
    spans = Spans(Nowhere()) if arm == "spans" else None
    observer = None if arm == "off" else Recorder(RecordOptions(bytes(32), log, spans=spans))
    info = EngineInfo("none", 4000, 1000, KERNEL.page_size, KERNEL.total_pages * KERNEL.page_size)
    loop = EngineLoop(
        KERNEL, NoModel(), info, fingerprint="none", eos_ids=(), make_text=lambda params: TokensOnly(),
        observer=observer,
    )  # fmt: skip
    begun, steps = time.process_time(), 0
    for number in range(16):
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        loop.submit(Generate(f"r{number}", (number, *[7] * 500), params))
    while loop.has_work:
        loop.step()
        steps += 1
    loop.close()
    return (time.process_time() - begun) / steps * 1e6


def main(runs: int = 7) -> None:
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(runs):
            for arm in ARMS:
                found[arm].append(step_us(arm, Path(folder)))
    for arm, times in found.items():
        print(f"{arm:5} {statistics.median(times):6.0f} us a step ({min(times):.0f} to {max(times):.0f})")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
