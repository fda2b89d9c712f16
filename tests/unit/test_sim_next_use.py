"""What the simulator tells the kernel of a session's return: the kind it knows, the time it has learnt."""

from __future__ import annotations

import numpy as np
import pytest

from hotprefix.cost.presets import load_cost
from hotprefix.cost.return_times import TOOL, USER, ThinkTimes
from hotprefix.kernel.config import KernelConfig
from hotprefix.kernel.kernel import Kernel
from hotprefix.kernel.request import Request
from hotprefix.lab.sim.arrivals import Loop
from hotprefix.lab.sim.replay import Replay
from hotprefix.lab.sim.simulate import simulate
from hotprefix.lab.trace.trace_request import TraceRequest


def request(
    name: str, parent: str | None, kind: str, think: float | None, session: str | None
) -> TraceRequest:
    return TraceRequest(
        id=name, input_length=32, output_length=2, blocks=np.arange(2, dtype=np.int32), arrival_s=0.0,
        session=session, parent=parent, think_s=think, kind=kind,
    )  # fmt: skip


def told(monkeypatch: pytest.MonkeyPatch, trace: list[TraceRequest], loop: Loop) -> list[float | None]:
    found: list[float | None] = []
    submit = Kernel.submit

    def watched(self: Kernel, given: Request, now: float) -> None:
        found.append(given.next_use_s)
        submit(self, given, now)

    monkeypatch.setattr(Kernel, "submit", watched)
    replay = Replay(kernel=KernelConfig(total_pages=64), cost=load_cost("llama-3.1-8b.1xh100.fp8"), loop=loop)
    assert simulate(replay, trace, block_size=16).requests["outcome"].to_list() == ["finished"] * len(trace)
    return found


@pytest.mark.patches
def test_the_kernel_hears_the_expected_wait_by_what_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = [
        request("a", None, USER, None, "s"), request("b", "a", TOOL, 500.0, "s"),
        request("c", "b", TOOL, 3.0, "s"), request("d", "c", USER, 40.0, "s"),
    ]  # fmt: skip
    know = ThinkTimes()
    expected = [know.expected(TOOL)]
    know.learn(TOOL, 500.0)
    expected.append(know.expected(TOOL))
    know.learn(TOOL, 3.0)
    expected.append(know.expected(USER))
    know.learn(USER, 40.0)
    expected.append(know.expected(None))
    assert told(monkeypatch, trace, Loop.CLOSED) == expected
    assert expected[0] == pytest.approx(9.0)
    assert expected[1] > expected[0]


@pytest.mark.patches
def test_nobody_is_expected_where_there_are_no_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, [request("a", None, USER, None, None)], Loop.OPEN) == [None]
