"""The engine in a process of its own, with scripted loops: order, refusal, abort, death, hanging, restart."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from hotprefix.engine.child import Build
from hotprefix.engine.client import AsyncEngine, EngineState, Supervision
from hotprefix.engine.messages import Delta, Generate
from hotprefix.engine.params import SamplingParams
from hotprefix.errors import EngineDead, HotprefixError, ModelLoadError, QueueFull
from hotprefix.kernel.plan import Finish
from tests.support import loops

# A busy machine must not look like a hung child where the test is about something else.
CALM = {"pause_s": 0.05, "idle_hang_s": 300.0, "busy_hang_s": 300.0}


def ask(id_: str, order: int = loops.RUN, max_tokens: int | None = 5) -> Generate:
    return Generate(id_, (order, 1, 2), SamplingParams(max_tokens=max_tokens))


@asynccontextmanager
async def running(build: Build = loops.build, config: Any = None, **rules: Any) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(config, build, supervision=Supervision(**{**CALM, **rules}))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def collect(engine: AsyncEngine, request: Generate) -> list[Delta]:
    return [delta async for delta in engine.generate(request)]


async def until(condition: Any, limit_s: float = 120) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def test_no_requests_at_all_are_an_ended_stream_of_a_living_engine() -> None:
    async with running() as engine:
        stream = await engine.submit([])
        assert stream.ended
        assert [delta async for delta in stream] == []
        assert len(await collect(engine, ask("next"))) == 5
    with pytest.raises(EngineDead):
        await engine.submit([])


async def test_deltas_come_in_order_and_ids_are_forgotten_at_the_last() -> None:
    async with running() as engine:
        found = await asyncio.gather(*(collect(engine, ask(f"r{i}")) for i in range(20)))
        for deltas in found:
            assert "".join(delta.text for delta in deltas) == "1,2,3,4,5,"
            assert [delta.finish for delta in deltas] == [None] * 4 + [Finish.LENGTH]
        assert engine.open_requests == 0
        assert await collect(engine, ask("r0")) == found[0]
        stats = await engine.stats()
        assert (stats.running, stats.free_pages) == (0, 10)
        assert engine.health().ok


async def test_a_group_is_taken_as_a_whole_or_not_at_all() -> None:
    async with running() as engine:
        with pytest.raises(QueueFull) as refused:
            await engine.submit([ask("a", max_tokens=None), ask("b", loops.FULL)])
        assert refused.value.retry_after == 7
        assert engine.open_requests == 0
        with pytest.raises(HotprefixError, match="TypeError: a bug"):
            await engine.submit([ask("c", loops.BUG)])
        assert (await collect(engine, ask("d")))[-1].finish is Finish.LENGTH
        assert (await engine.stats()).running == 0


async def test_leaving_early_aborts_within_a_step_and_abort_has_its_terminal_delta() -> None:
    async with running() as engine:
        async for _ in engine.generate(ask("gone", max_tokens=None)):
            break
        gc.collect()
        await until(lambda: engine.open_requests == 0)
        stream = await engine.submit([ask("a", max_tokens=None), ask("b", max_tokens=None)])
        engine.abort(["a", "never heard of"])
        ends = {}
        async for delta in stream:
            if delta.finish:
                ends[delta.id] = delta.finish
                engine.abort(["b"])
        assert ends == {"a": Finish.ABORT, "b": Finish.ABORT}


async def test_cancelling_a_submission_forgets_it() -> None:
    async with running() as engine:
        for order in (loops.RUN, loops.FULL):
            task = asyncio.create_task(engine.submit([ask("x", order, None)]))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: engine.open_requests == 0)
        assert (await engine.stats()).running == 0


@pytest.mark.parametrize("how", ["kill", "exit", "raise"])
async def test_death_ends_every_request_at_once_and_a_new_process_serves(how: str) -> None:
    async with running() as engine:
        streams = [await engine.submit([ask(f"r{i}", max_tokens=None)]) for i in range(8)]
        for stream in streams:
            await anext(stream)
        pid = engine.pid
        assert pid is not None
        if how == "kill":
            os.kill(pid, signal.SIGKILL)
        else:
            await engine.submit([ask("fatal", loops.DIE if how == "exit" else loops.RAISE)])
        for stream in streams:
            last = [delta async for delta in stream][-1]
            assert last.finish is Finish.ERROR
            assert "ended" in (last.error or "")
            assert last.usage.completion_tokens > 0
        assert not engine.health().ok
        with pytest.raises(EngineDead):
            await engine.stats()
        await until(lambda: engine.health().ok)
        assert engine.pid != pid
        assert (await collect(engine, ask("after")))[-1].finish is Finish.LENGTH
        assert (engine.restarts, engine.open_requests) == (1, 0)


async def test_a_process_that_keeps_dying_is_given_up() -> None:
    async with running(restarts=2) as engine:
        for number in range(3):
            await until(lambda: engine.health().ok)
            assert (await collect(engine, ask(f"d{number}", loops.DIE)))[-1].finish is Finish.ERROR
        await asyncio.wait_for(engine.failed.wait(), 120)
        assert engine.state is EngineState.FAILED
        assert "3 times in a row" in engine.health().reason
        with pytest.raises(EngineDead, match="in a row"):
            await engine.submit([ask("x")])


async def test_an_answer_ends_the_row_of_deaths() -> None:
    async with running(restarts=1) as engine:
        for number in range(3):
            await until(lambda: engine.health().ok)
            assert (await collect(engine, ask(f"d{number}", loops.DIE)))[-1].finish is Finish.ERROR
            await until(lambda: engine.health().ok)
            assert (await collect(engine, ask(f"g{number}")))[-1].finish is Finish.LENGTH
        assert engine.restarts == 3


async def test_one_failing_request_harms_nobody_and_a_broken_process_is_replaced() -> None:
    async with running() as engine:
        pid = engine.pid
        other = await engine.submit([ask("other", max_tokens=300)])
        for number in range(3):
            assert (await collect(engine, ask(f"f{number}", loops.FAIL)))[-1].finish is Finish.ERROR
        assert [delta async for delta in other][-1].finish is Finish.LENGTH
        assert (engine.pid, engine.restarts) == (pid, 0)
        assert (await collect(engine, ask("b", loops.BREAK)))[-1].finish is Finish.ERROR
        await until(lambda: engine.restarts == 1 and engine.health().ok)
        assert (await collect(engine, ask("after")))[-1].finish is Finish.LENGTH


async def test_a_hung_process_shows_in_health_and_is_back_when_it_goes_on() -> None:
    async with running(idle_hang_s=2.0, busy_hang_s=0.3) as engine:
        stream = await engine.submit([ask("stuck", loops.STOP_PROCESS)])
        await until(lambda: not engine.health().ok)
        assert "hung" in engine.health().reason
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        assert [delta async for delta in stream][-1].finish is Finish.ERROR
        await until(lambda: engine.health().ok)
        os.kill(engine.pid, signal.SIGSTOP)
        await until(lambda: not engine.health().ok)
        os.kill(engine.pid, signal.SIGCONT)
        await until(lambda: engine.health().ok)


async def test_the_first_step_after_a_pause_may_be_long() -> None:
    """A prompt computed in one pass says nothing for as long as the pass takes; that is no hung engine."""
    async with running(idle_hang_s=0.2) as engine:
        stream = await engine.submit([ask("long", loops.STOP_PROCESS)])
        await asyncio.sleep(0.4)
        assert engine.health().ok
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        assert [delta async for delta in stream][-1].finish is Finish.ERROR


async def test_a_stopped_child_never_blocks_the_event_loop() -> None:
    async with running() as engine:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        big = Generate("big", tuple(range(10**6)), SamplingParams())
        tasks = [asyncio.create_task(engine.submit([big]))]
        await asyncio.wait_for(asyncio.sleep(0.05), 5)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDead):
            await tasks[0]


async def test_an_engine_that_cannot_be_built_says_why() -> None:
    engine = AsyncEngine(None, loops.build_bad)
    with pytest.raises(ModelLoadError, match="give a folder") as refused:
        await engine.start()
    assert refused.value.param == "model"
    assert engine.state is EngineState.FAILED
    await engine.stop()


async def test_a_restart_that_cannot_load_is_bounded(tmp_path: Path) -> None:
    async with running(loops.build_once, str(tmp_path / "mark"), restarts=2) as engine:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await asyncio.wait_for(engine.failed.wait(), 120)
        assert "the weights are gone" in engine.health().reason


async def test_terminal_signals_to_the_group_do_not_reach_the_child() -> None:
    async with running() as engine:
        stream = await engine.submit([ask("r", max_tokens=40)])
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGTERM)
        os.kill(engine.pid, signal.SIGINT)
        assert [delta async for delta in stream][-1].finish is Finish.LENGTH


async def test_stop_ends_the_process_and_open_requests() -> None:
    async with running() as engine:
        stream = await engine.submit([ask("r", max_tokens=None)])
        pid = engine.pid
        await engine.stop()
        assert [delta async for delta in stream][-1].finish is Finish.ERROR
        assert pid is not None
        assert not psutil.pid_exists(pid)
        assert engine.health().reason == "stopped: the engine was stopped"


@pytest.mark.parametrize("error", [BrokenPipeError("nobody reads"), ValueError("a bug of the listener")])
async def test_a_listener_that_fails_ends_nothing(error: Exception) -> None:
    def progress(_: str) -> None:
        raise error

    engine = AsyncEngine(None, loops.build, on_progress=progress)
    asyncio.get_running_loop().set_exception_handler(lambda _, told: heard.append(told["exception"]))
    heard: list[object] = []
    await engine.start()
    assert engine.state is EngineState.READY
    assert heard == [error] * len(heard) != []
    await engine.stop(60.0)


async def test_stop_reaches_a_child_that_has_only_begun_to_start() -> None:
    engine = AsyncEngine(None, loops.build)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    await engine.stop(60.0)
    with pytest.raises(EngineDead, match="exit status 0"):
        await starting
    assert engine.state is EngineState.STOPPED
    assert engine.health().reason == "stopped: the engine was stopped"


async def test_what_cannot_be_pickled_is_refused_and_forgotten() -> None:
    async with running() as engine:
        request = Generate("r", (loops.RUN, lambda: 2), SamplingParams())  # type: ignore[arg-type]
        with pytest.raises((AttributeError, pickle.PicklingError)):
            await engine.submit([request])
        assert (engine.open_requests, engine._calls) == (0, {})
        assert (await collect(engine, ask("r")))[-1].finish is Finish.LENGTH


PARENT = """
import asyncio, os, signal, sys
from hotprefix.engine.client import AsyncEngine
from tests.support import loops

kept = []

async def main():
    engine = AsyncEngine(None, loops.{build})
    kept.append(engine)
    starting = asyncio.create_task(engine.start())
    {wait}
    print(engine.pid, flush=True)
    {then}

if __name__ == "__main__":
    asyncio.run(main())
"""
STARTED = "await starting"
LOADING = "while engine.pid is None: await asyncio.sleep(0.01)"


@pytest.mark.parametrize(
    ("build", "wait", "then"),
    [
        ("build", STARTED, "os.kill(os.getpid(), signal.SIGKILL)"),
        ("build", STARTED, "raise SystemExit(4)"),
        ("build", STARTED, "pass"),
        ("build_slow", LOADING, "await asyncio.sleep(1); os.kill(os.getpid(), signal.SIGKILL)"),
    ],
)
def test_the_child_never_outlives_its_parent(build: str, wait: str, then: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(build=build, wait=wait, then=then), encoding="utf-8")
    here = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(script)], env=here, capture_output=True, timeout=100, check=False
    )
    pid = int(done.stdout)
    end = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            pytest.fail("the child lives on")
        time.sleep(0.05)
