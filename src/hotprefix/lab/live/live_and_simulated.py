"""One workload, run live and simulated, with results in the same form. Owns: `Run`, `live` and `simulated`.

Rules: both sides get the same requests in the same order, with the same names and prompts from the same
blocks. Both results are read from the kernel's own events by the same recorder, so any difference comes from
the drivers. A request has as many outputs as the trace says, whatever is sampled. Events keep everything but
their times.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from hotprefix.cost.model import CostModel
from hotprefix.engine.messages import Generate
from hotprefix.engine.params import SamplingParams
from hotprefix.errors import HotprefixError
from hotprefix.kernel import events as ev
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import KernelConfig
from hotprefix.kernel.plan import Finish
from hotprefix.lab.live.run_clock import Clock
from hotprefix.lab.sim.arrivals import Item, Loop
from hotprefix.lab.sim.block_prompts import PromptMaker
from hotprefix.lab.sim.replay import Replay
from hotprefix.lab.sim.replay_recorder import Recorder, new_row
from hotprefix.lab.sim.rows import REQUEST_COLUMNS
from hotprefix.lab.sim.simulate import items, simulate
from hotprefix.lab.trace.trace_request import TraceRequest
from hotprefix.records.of_event import of_event

if TYPE_CHECKING:
    from hotprefix.engine.loop import EngineLoop

Record = dict[str, Any]
MakeLoop = Callable[[ev.Sink, Clock], "EngineLoop"]
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class LiveRunFailed(HotprefixError):
    """A request of a live run did not end as it should, so the run gives no figures."""


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one run.

    requests: one row of REQUEST_COLUMNS for each request.
    events: the kernel's records without times.
    before: for each request, how many steps had been committed when it was submitted; empty for simulated
    runs.
    """

    requests: pl.DataFrame
    events: list[Record]
    before: tuple[int, ...] = ()

    @property
    def steps(self) -> list[Record]:
        return [e for e in self.events if e["k"] == "step"]

    @property
    def makespan_s(self) -> float:
        """When the last request ended."""
        return float(self.requests["finish_s"].max())  # type: ignore[arg-type]


def simulated(
    kernel: KernelConfig, cost: CostModel, requests: Sequence[TraceRequest], block_size: int, loop: Loop
) -> Run:
    """Run the requests on the virtual clock; every step is planned by itself."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "events.jsonl"
        replay = Replay(kernel, cost, loop=loop, repeats=1, log=log)
        tables = simulate(replay, requests, block_size=block_size)
        events = [_timeless(json.loads(line)) for line in log.read_text(encoding="utf-8").splitlines()]
    return Run(tables.requests, events)


def live(
    make_loop: MakeLoop, clock: Clock, vocab_size: int, requests: Sequence[TraceRequest], block_size: int,
    loop: Loop,
) -> Run:  # fmt: skip
    """Run the requests on a live engine. Raises LiveRunFailed.

    make_loop: returns a fresh loop with the given sink and clock.
    loop: OPEN: requests arrive at their arrival_s. CLOSED: each arrives when the one before it has ended.
    """
    return _LiveRun(make_loop, clock, vocab_size, block_size).run(list(items(requests, block_size)), loop)


class _LiveRun:
    def __init__(self, make_loop: MakeLoop, clock: Clock, vocab_size: int, block_size: int) -> None:
        self._clock, self._vocab = clock, vocab_size
        self._recorder = Recorder(0, None)
        self._prompts = PromptMaker(block_size)
        self._events: list[ev.Event] = []
        self._steps = 0
        self._before: list[int] = []
        self._rows: dict[str, dict[str, Any]] = {}
        self._loop = make_loop(self._sink, clock)

    def _sink(self, event: ev.Event) -> None:
        self._recorder.sink(event)
        self._steps += isinstance(event, ev.Stepped)
        self._events.append(event)

    def run(self, work: list[Item], loop: Loop) -> Run:
        engine, clock = self._loop, self._clock
        arrivals = deque((item.request.arrival_s or 0.0, item) for item in work)
        later: deque[Item] = deque()
        if loop is Loop.CLOSED:
            later.extend(item for _, item in list(arrivals)[1:])
            arrivals = deque([(0.0, work[0])])
        while arrivals or engine.has_work:
            while arrivals and arrivals[0][0] <= clock():
                self._submit(*arrivals.popleft())
            if not engine.has_work:
                clock.wait_until(arrivals[0][0])
                continue
            for delta in engine.step():
                if delta.finish is not None:
                    row = self._close(delta.id, delta.finish, delta.error)
                    if later:
                        arrivals.append((row["finish_s"], later.popleft()))
        if (failed := engine.kernel.sink_failure) is not None:
            raise LiveRunFailed(f"the recorder failed: {failed}")
        rows = [self._rows[name] for name in sorted(self._rows)]
        events = [_timeless(json.loads(json.dumps(dataclasses.asdict(of_event(e))))) for e in self._events]
        return Run(pl.DataFrame(rows, schema=REQUEST_COLUMNS), events, tuple(self._before))

    def _submit(self, arrival: float, item: Item) -> None:
        name = f"{len(self._before) + 1:07d}"
        request = item.request
        self._before.append(self._steps)
        row = new_row(item, name, arrival)
        self._rows[name] = row
        self._recorder.arrived(row)
        prompt = prompt_ids(self._prompts.make(request).tokens, self._vocab)
        params = SamplingParams(max_tokens=request.output_length, temperature=0.0, ignore_eos=True)
        self._loop.submit(Generate(name, prompt, params, request.priority, request.namespace or None))

    def _close(self, name: str, finish: Finish, error: str | None) -> dict[str, Any]:
        row = self._rows[name]
        if finish is not Finish.LENGTH:
            raise LiveRunFailed(f"request {name} ended with {finish}: {error}")
        return row


def prompt_ids(tokens: bytes, vocab_size: int) -> tuple[int, ...]:
    """Ids of a model's vocabulary for the simulator's tokens, which are a block's id at each of its
    positions. An id depends on the block and the position, so prompts share ids exactly as far as they share
    blocks."""
    blocks = tk.view(tokens).astype(np.int64).astype(np.uint64)
    mixed = (blocks * _SPREAD) ^ (np.arange(len(blocks), dtype=np.uint64) + np.uint64(1))
    mixed = (mixed ^ (mixed >> np.uint64(29))) * _SPREAD
    return tuple(int(i) for i in (mixed >> np.uint64(33)) % np.uint64(vocab_size))


def _timeless(record: Record) -> Record:
    return {key: value for key, value in record.items() if key not in ("t", "i")}
