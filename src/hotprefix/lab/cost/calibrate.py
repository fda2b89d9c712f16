"""A live engine's cost model. Owns: `calibrate`, from a loaded model to a `CostModel`.

Rules: a calibration takes about as many seconds as it is given on any machine: batches are sized to the
machine's speed, and the number of rounds to the time left. Everything is measured on the loop and executor
that serve.
"""

from __future__ import annotations

import datetime as dt
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hotprefix.cost.model import Beyond, CostModel
from hotprefix.cost.prices import Curve
from hotprefix.errors import ConfigError
from hotprefix.kernel.config import Flight, KernelConfig, Refresh
from hotprefix.lab.cost.design import Design, fitting
from hotprefix.lab.cost.fit_prices import best_form, cross_validated, scheduler_prices, step_prices
from hotprefix.lab.cost.measure_links import host_links
from hotprefix.lab.cost.measure_steps import (
    WAITING,
    Bench,
    Clock,
    Sample,
    StopwatchExecutor,
    run_rounds,
    seconds_per_token,
)

if TYPE_CHECKING:
    from hotprefix.engine.token_engine import TokenEngine

Progress = Callable[[str], None]
FULL_S, QUICK_S = 120.0, 20.0
QUEUE_SLOTS = 8
PROBE_TOKENS = 128
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.thread_time}
"""cpu: this thread's processor time, which other programs on the machine do not lengthen; what an engine on
one CPU thread takes when it has the machine for itself."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Raises ConfigError for a value out of range.

    seconds: how long the batches may take; loading comes on top.
    max_batched_tokens, max_running: the engine's.
    clock: the clock that times steps, one of `CLOCKS`.
    """

    seconds: float = FULL_S
    max_batched_tokens: int = 2048
    max_running: int = 64
    clock: str = "wall"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"seconds={self.seconds!r}: give seconds > 0", param="seconds")
        if self.clock not in CLOCKS:
            raise ConfigError(f"clock={self.clock!r}: give one of {', '.join(CLOCKS)}", param="clock")


def calibrate(
    bare: TokenEngine, settings: Settings, name: str, progress: Progress = lambda line: None
) -> tuple[CostModel, list[Sample]]:
    """The cost model, and the steps that it was fitted to. Raises ConfigError if the clock does not suit the
    engine, InputError if nothing could be fitted."""
    check_clock(settings.clock, bare.device)
    watch = StopwatchExecutor(bare.executor, CLOCKS[settings.clock])
    steps, plan = _steps(bare, watch, settings, progress)
    progress("measuring the scheduler with a queue")
    planning = [*steps, *_queues(bare, watch, settings)]
    progress("measuring copies between L1 and L2")
    links = host_links(bare.pool)
    form = best_form(steps, settings.seed)
    step, scheduler = step_prices(steps, form), scheduler_prices(planning)
    return CostModel(
        name=name,
        source=f"hotprefix calibrate, {len(steps)} steps, {settings.clock} clock, {plan.extent}",
        model=bare.name,
        dtype=bare.dtype,
        hardware=hardware(bare.device),
        date=dt.datetime.now(dt.UTC).date(),
        base_s=step.base_s,
        prefill_token_s=step.prefill[0][1],
        prefill_token_beyond=_beyond(step.prefill),
        prefill_context_s=step.prefill_context_s,
        decode_s=step.decode[0][1],
        decode_beyond=_beyond(step.decode),
        decode_context_s=step.decode_context_s,
        scheduler_base_s=scheduler[0],
        scheduler_running_s=scheduler[1],
        scheduler_waiting_s=scheduler[2],
        refresh_touch_s=scheduler[3],
        kv_token_bytes=bare.pool.page_bytes // bare.pool.page_size,
        links=links,
        fit=cross_validated(steps, form, settings.seed),
    ), steps


def _beyond(curve: Curve) -> tuple[Beyond, ...]:
    return tuple(Beyond(after=after, each_s=each) for after, each in curve[1:])


def _steps(
    bare: TokenEngine, watch: StopwatchExecutor, settings: Settings, progress: Progress
) -> tuple[list[Sample], Design]:
    begun = time.perf_counter()
    bench = _bench(bare, watch, settings, settings.max_running)
    progress("finding out how fast the machine is")
    per_token = seconds_per_token(bench, PROBE_TOKENS)
    room = bare.pool.pages * bare.pool.page_size
    plan = fitting(
        room, bare.max_positions, settings.max_batched_tokens, settings.max_running,
        settings.seconds / per_token,
    )  # fmt: skip
    progress(f"{1 / per_token:.0f} tokens/s: contexts up to {max(plan.prefixes)} tokens")
    rounds = run_rounds(
        bench, plan, begun + settings.seconds,
        lambda at, batch, of: progress(f"round {at}, batch {batch} of {of}, {len(bench.samples)} steps"),
    )  # fmt: skip
    progress(f"{len(bench.samples)} steps in {rounds} rounds")
    return bench.samples, plan


def _queues(bare: TokenEngine, watch: StopwatchExecutor, settings: Settings) -> list[Sample]:
    """With refresh off and on, so that what it costs has a price of its own."""
    slots, samples = min(QUEUE_SLOTS, settings.max_running), []
    for refresh in (Refresh.OFF, Refresh.WINDOW):
        bench = _bench(bare, watch, settings, slots, refresh)
        for waiting in WAITING:
            bench.queue(waiting, slots)
        samples += bench.samples
    return samples


def _bench(
    bare: TokenEngine,
    watch: StopwatchExecutor,
    settings: Settings,
    slots: int,
    refresh: Refresh = Refresh.OFF,
) -> Bench:
    """A bench over a fresh loop. Flights are off, so that each text is computed by the request that is meant
    to."""
    kernel = KernelConfig(
        total_pages=bare.pool.pages,
        page_size=bare.pool.page_size,
        max_batched_tokens=settings.max_batched_tokens,
        max_running=slots,
        flight=Flight.NONE,
        refresh=refresh,
    )
    return Bench(bare.loop(kernel, watch), watch, bare.vocab_size, settings.seed)


def check_clock(clock: str, device: str) -> None:
    """Raises ConfigError if the clock is one thread's processor time and the engine takes other time than
    that."""
    import torch

    threads = torch.get_num_threads()
    if clock == "cpu" and (device != "cpu" or threads != 1):
        raise ConfigError(
            f"clock='cpu' with {threads} threads on {device}: it times one CPU thread; give --device cpu and "
            "--threads 1, or --clock wall",
            param="clock",
        )


def hardware(device: str) -> str:
    """The name of the processor that computes, as far as the system tells it."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
