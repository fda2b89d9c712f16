"""The engine against its simulation. Owns: `against_live`: which loads are run, and for how long.

Rules:
1. Three kinds of load are run: requests one by one (low load, their order is given); all at once (all arrive
   at the same moment, which measures saturation); and arrivals at shares of that saturation.
2. Every load starts with an empty cache and the same kernel settings on both sides. There is no tier but L1.
3. As many requests are run as the time allows, by the simulator's own forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from hotprefix import __version__
from hotprefix.cost.model import CostModel
from hotprefix.errors import ConfigError, InputError
from hotprefix.kernel.config import KernelConfig
from hotprefix.kernel.events import Sink
from hotprefix.lab.cost.calibrate import Settings, calibrate, check_clock
from hotprefix.lab.live.compare import Level, compare, same_in_order
from hotprefix.lab.live.live_and_simulated import Run, live, simulated
from hotprefix.lab.live.run_clock import CLOCKS, Clock
from hotprefix.lab.live.small_trace import Small, arriving, at, one_by_one, small
from hotprefix.lab.sim.arrivals import Loop
from hotprefix.lab.trace.trace_request import Trace, TraceRequest

if TYPE_CHECKING:
    from hotprefix.engine.loop import EngineLoop
    from hotprefix.engine.token_engine import TokenEngine

Progress = Callable[[str], None]
LOADS: Final = (0.5, 0.7, 0.95)
STANDARD_ERRORS: Final = 2.0  # steps are assumed to be off by so many of the calibration's, each way
FEWEST: Final = 4
CALIBRATE_SHARE: Final = 0.25  # of the seconds, if no cost model is given
CALIBRATE_TOKENS: Final = 8192
PRESSURE: Final = 0.5  # the pool holds this share of the distinct tokens, so that something is evicted
ROOM: Final = 1.5  # and at least so many of the longest requests
BLOCKS: Final = (64, 32, 16, 8, 4, 2, 1)
MANY: Final = 16


@dataclass(frozen=True, slots=True)
class Options:
    """Raises ConfigError for a value out of range.

    limit: the largest number of requests.
    seconds: about how long everything after loading may take.
    block: how many tokens a block of the trace becomes; None: as many as the time allows.
    page_size: tokens.
    kv_tokens: capacity of the pool; None: one that is small enough to evict.
    outputs: the largest number of output tokens of one request.
    clock: one of `CLOCKS`.
    """

    limit: int = 40
    seconds: float = 150.0
    block: int | None = None
    page_size: int = 16
    kv_tokens: int | None = None
    outputs: int = 64
    max_batched_tokens: int = 2048
    max_running: int = 64
    clock: str = "wall"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("limit", "block", "page_size", "outputs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: give a whole number >= 1", param=name)
        if not self.seconds > 0:
            raise ConfigError(f"seconds={self.seconds}: give seconds > 0", param="seconds")
        if self.clock not in CLOCKS:
            raise ConfigError(f"clock={self.clock!r}: give one of {', '.join(CLOCKS)}", param="clock")


@dataclass(frozen=True, slots=True)
class Believed:
    """The result.

    cost: the label of the cost model that the predictions used.
    left_out: how many requests of the trace are too long for this engine.
    block: how many tokens a block of the trace became.
    saturation_rps: requests per second if all arrive at once, measured.
    levels: one for each load.
    """

    trace: str
    model: str
    hardware: str
    cost: str
    clock: str
    kv_tokens: int
    page_size: int
    requests: int
    left_out: int
    block: int
    saturation_rps: float
    levels: tuple[Level, ...]
    version: str = __version__

    @property
    def reuse_equal(self) -> bool:
        """Whether every request reused as many tokens as in the simulation: under the loads that give the
        order (one by one, all at once), and under the others when the simulator is given the live order."""
        given = [level for level in self.levels if level.load is None]
        return not any(level.differ for level in given) and all(
            level.order_parity is not False for level in self.levels
        )


def against_live(
    bare: TokenEngine, trace: Trace, options: Options, cost: CostModel | None = None,
    progress: Progress = lambda line: None,
) -> Believed:  # fmt: skip
    """Run the trace's first requests on the engine and in the simulator. cost: the simulator's cost model;
    None: calibrate first. Raises InputError for a trace that cannot be used, ConfigError for settings,
    LiveRunFailed."""
    check_clock(options.clock, bare.device)
    seconds = options.seconds
    if cost is None:
        progress("calibrating: no cost model was given")
        settings = Settings(
            CALIBRATE_SHARE * seconds, options.max_batched_tokens, options.max_running, options.clock
        )
        pool = bare.with_pool(CALIBRATE_TOKENS // options.page_size, options.page_size)
        cost, _ = calibrate(pool, settings, "calibrated just before", progress)
        seconds *= 1 - CALIBRATE_SHARE
    chosen, kernel = _chosen(bare.positions, trace, options, cost, seconds)
    rig = _Rig(bare.with_pool(kernel.total_pages, kernel.page_size), kernel, cost, chosen, options, progress)
    levels = rig.levels()
    return Believed(
        trace=trace.name,
        model=f"{bare.name}, {bare.dtype}",
        hardware=cost.hardware,
        cost=cost.label,
        clock=options.clock,
        kv_tokens=kernel.total_pages * kernel.page_size,
        page_size=kernel.page_size,
        requests=len(chosen.requests),
        left_out=chosen.left_out,
        block=chosen.block_size,
        saturation_rps=rig.saturation_rps,
        levels=tuple(levels),
    )


def _chosen(
    positions: int, trace: Trace, options: Options, cost: CostModel, seconds: float
) -> tuple[Small, KernelConfig]:
    """The requests, and the settings to run them with. Blocks are as long as they can be for the time to
    allow MANY requests."""
    blocks = (options.block,) if options.block else [b for b in BLOCKS if b <= trace.block_size]
    for block in blocks:
        try:
            found = small(trace, block, positions, options.outputs, options.limit)
        except InputError:
            if block == blocks[-1]:
                raise
            continue
        kernel = _kernel(found, options)
        chosen = _affordable(found, kernel, cost, seconds)
        if len(chosen.requests) >= min(MANY, len(found.requests) + found.left_out):
            break
    return chosen, kernel


def _kernel(found: Small, options: Options) -> KernelConfig:
    wanted = options.kv_tokens or max(PRESSURE * found.distinct_tokens, ROOM * found.largest)
    return KernelConfig(
        total_pages=max(1, int(wanted) // options.page_size),
        page_size=options.page_size,
        max_batched_tokens=options.max_batched_tokens,
        max_running=options.max_running,
    )


def _affordable(found: Small, kernel: KernelConfig, cost: CostModel, seconds: float) -> Small:
    """As many requests as can be run under all loads in the time, by the simulator's forecast."""
    count = len(found.requests)
    while True:
        chosen = found.first(count)
        alone = simulated(kernel, cost, one_by_one(chosen.requests), found.block_size, Loop.CLOSED)
        together = simulated(kernel, cost, at(chosen.requests, [0.0] * count), found.block_size, Loop.OPEN)
        spans = 1 + sum(1 / load for load in LOADS)
        if count <= FEWEST or alone.makespan_s + spans * together.makespan_s <= seconds:
            return chosen
        count = max(FEWEST, count * 3 // 4)


class _Rig:
    """Runs loads, each on both sides. saturation_rps: known after the load in which all requests arrive at
    once."""

    def __init__(
        self, bare: TokenEngine, kernel: KernelConfig, cost: CostModel, chosen: Small, options: Options,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._bare, self._kernel, self._cost = bare, kernel, cost
        self._requests, self._block = chosen.requests, chosen.block_size
        self._options, self._progress = options, progress
        self.saturation_rps = 0.0

    def levels(self) -> list[Level]:
        count = len(self._requests)
        self._live(one_by_one(self._requests[:2]), Loop.CLOSED)  # warms the engine up
        alone = self._level("one by one", None, one_by_one(self._requests), Loop.CLOSED)
        together = self._level("all at once", None, at(self._requests, [0.0] * count), Loop.OPEN)
        self.saturation_rps = count / together.makespan_s
        return [alone, together, *(self._at(load) for load in LOADS)]

    def _at(self, load: float) -> Level:
        span = len(self._requests) / (self.saturation_rps * load)
        requests = arriving(self._requests, span, self._options.seed)
        return self._level(f"at {load:.0%}", load, requests, Loop.OPEN)

    def _level(self, name: str, load: float | None, requests: Sequence[TraceRequest], loop: Loop) -> Level:
        self._progress(f"{name}: {len(requests)} requests on the engine")
        real = self._live(requests, loop)
        predicted = simulated(self._kernel, self._cost, requests, self._block, loop)
        ordered = None
        if loop is Loop.OPEN:
            ordered = same_in_order(self._kernel, requests, self._block, real)
        return compare(name, load, real, predicted, ordered, self._spread(requests, loop))

    def _spread(self, requests: Sequence[TraceRequest], loop: Loop) -> tuple[Run, Run] | None:
        """The predictions with every step shorter, and longer, by as much as the calibration may be off; None
        if it does not say how much. Near saturation, a step time that is 1 % off changes waits by a multiple
        of 1 %."""
        fit = self._cost.fit
        if fit is None or fit.uncertainty is None:
            return None
        off = min(STANDARD_ERRORS * fit.uncertainty, 0.9)
        fast, slow = (
            simulated(self._kernel, self._cost.scaled(1 + sign * off), requests, self._block, loop)
            for sign in (-1, 1)
        )
        return fast, slow

    def _live(self, requests: Sequence[TraceRequest], loop: Loop) -> Run:
        clock = CLOCKS[self._options.clock]()
        make = partial(_fresh, self._bare, self._kernel)
        return live(make, clock, self._bare.vocab_size, requests, self._block, loop)


def _fresh(bare: TokenEngine, kernel: KernelConfig, sink: Sink, clock: Clock) -> EngineLoop:
    return bare.loop(kernel, sink=sink, clock=clock)
