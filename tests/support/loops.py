"""Engine loops for the process tests. Owns: a loop whose prompts say what shall happen; importable in a
child process.

Rules: one token a step for every live request, token k is k. The first prompt token is an order.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from hotprefix.engine.messages import (
    Delta,
    EngineInfo,
    EngineLoad,
    EngineStats,
    FlushReport,
    Generate,
    Timing,
    Usage,
)
from hotprefix.errors import ModelLoadError, QueueFull
from hotprefix.kernel.plan import Finish

RUN, DIE, RAISE, STOP_PROCESS, FULL, BUG, FAIL, BREAK = range(8)
FOREVER = 10**9


class ScriptedLoop:
    """A `process.Loop`."""

    def __init__(self) -> None:
        self.info = EngineInfo("scripted", 1000, 100, 16, 1000)
        self._began = time.time_ns()
        self._live: dict[str, Generate] = {}
        self._made: dict[str, int] = {}
        self._aborted: list[str] = []
        self._steps = 0
        self._broken = False

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def prepare(self, message: Generate) -> Callable[[], None] | None:
        return None

    def submit(self, message: Generate) -> None:
        if message.prompt[0] == FULL:
            raise QueueFull("full", retry_after=7)
        if message.prompt[0] == BUG:
            raise TypeError("a bug")
        self._live[message.id] = message
        self._made[message.id] = 0

    def abort(self, request_id: str) -> None:
        self._aborted.append(request_id)

    def step(self) -> list[Delta]:
        time.sleep(0.001)
        self._steps += 1
        deltas = [
            self._end(request_id, Finish.ABORT) for request_id in self._aborted if request_id in self._live
        ]
        self._aborted = []
        for request_id, message in list(self._live.items()):
            _obey(message.prompt[0])
            self._broken |= message.prompt[0] == BREAK
            if self._broken or message.prompt[0] == FAIL:
                deltas.append(self._end(request_id, Finish.ERROR))
                continue
            self._made[request_id] += 1
            done = self._made[request_id] >= (message.params.max_tokens or FOREVER)
            deltas.append(self._end(request_id, Finish.LENGTH) if done else self._delta(request_id, None))
        return deltas

    def _delta(self, request_id: str, finish: Finish | None) -> Delta:
        made = self._made[request_id]
        usage = Usage(len(self._live[request_id].prompt), made)
        timing = Timing(0.0, 0.0, 0.0) if finish else None
        return Delta(request_id, f"{made},", (made,), usage, finish, timing=timing)

    def _end(self, request_id: str, finish: Finish) -> Delta:
        delta = self._delta(request_id, finish)
        del self._live[request_id], self._made[request_id]
        return delta

    def flush_cache(self) -> FlushReport:
        return FlushReport(freed=16, kept=16 * len(self._live), running=len(self._live))

    def close(self) -> None:
        print("loop closed", file=sys.stderr, flush=True)

    def stats(self) -> EngineStats:
        live = len(self._live)
        return EngineStats(live, 0, 10, 10 - live, live, 0, 0, 16, 0, 0, 0, 0, 0, 0, self._steps, 0, 0)

    def load(self) -> EngineLoad:
        live = len(self._live)
        return EngineLoad(self._began, 0, 0, live, 10 - live, 0, live, 0, None)


def _obey(order: int) -> None:
    if order == DIE:
        os._exit(3)
    if order == RAISE:
        raise RuntimeError("the loop is broken")
    if order == STOP_PROCESS:
        os.kill(os.getpid(), signal.SIGSTOP)


def build(config: Any, progress: Callable[[str], None]) -> ScriptedLoop:
    """Builds at once."""
    progress("loading weights")
    return ScriptedLoop()


def build_bad(config: Any, progress: Callable[[str], None]) -> ScriptedLoop:
    raise ModelLoadError("no such model: give a folder", param="model")


def build_once(config: Any, progress: Callable[[str], None]) -> ScriptedLoop:
    """Builds the first time only. config: path of a file that remembers."""
    if os.path.exists(config):
        raise ModelLoadError("the weights are gone")
    with open(config, "w", encoding="utf-8"):
        return ScriptedLoop()


def build_slow(config: Any, progress: Callable[[str], None]) -> ScriptedLoop:
    """Never gets done."""
    progress("loading for ever")
    time.sleep(1000)
    return ScriptedLoop()
