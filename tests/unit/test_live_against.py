"""The engine against its simulation, on a small random model: the same decisions, and faults are found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from hotprefix.cli import app
from hotprefix.commands import against_live as command
from hotprefix.cost.model import CostModel, ErrorOf, FitError
from hotprefix.engine.token_engine import TokenEngine
from hotprefix.errors import InputError
from hotprefix.kernel.config import KernelConfig, Publication
from hotprefix.lab.live import against
from hotprefix.lab.live.against import Believed, Options, against_live
from hotprefix.lab.live.compare import STEP_OF_ONE, Reuse, TimeError, compare, same_in_order
from hotprefix.lab.live.live_and_simulated import Run, live, simulated
from hotprefix.lab.live.run_clock import CpuClock
from hotprefix.lab.live.small_trace import arriving, at, one_by_one
from hotprefix.lab.sim.arrivals import Loop
from hotprefix.lab.trace.trace_request import TraceRequest
from hotprefix.report.against_live import answer, print_tables, render, to_json
from tests.unit.test_live_shape import MadeTrace, request
from tests.unit.tiny_models import load_like, one_thread, reference_model

PAGE = 4
KERNEL = KernelConfig(total_pages=24, page_size=PAGE, max_batched_tokens=24, max_running=4)
COST = STEP_OF_ONE.model_copy(
    update={"base_s": 1e-3, "prefill_token_s": 1e-4, "decode_s": 1e-4, "source": "made up"}
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenEngine]:
    with one_thread():
        loaded = load_like(reference_model("Llama"), tmp_path_factory.mktemp("tiny"))
        yield TokenEngine.of("tiny", loaded, KERNEL.total_pages, PAGE)


def agents(sessions: int = 3, turns: int = 4) -> list[TraceRequest]:
    """Sessions that grow by 2 blocks a turn on a shared beginning of 3: 24 pages cannot keep them all."""
    made = []
    for turn in range(turns):
        for s in range(sessions):
            own = [100 * (s + 1) + i for i in range(2 * (turn + 1))]
            blocks = [1, 2, 3, *own]
            made.append(request(f"{s}.{turn}", len(blocks) * PAGE - 1, 3, blocks, session=str(s)))
    return made


def alone(requests: list[TraceRequest]) -> list[TraceRequest]:
    return [replace(r, session=None) for r in requests]


def on_engine(
    bare: TokenEngine, requests: object, loop: Loop = Loop.OPEN, kernel: KernelConfig = KERNEL
) -> Run:
    return live(
        lambda sink, clock: bare.loop(kernel, sink=sink, clock=clock),
        CpuClock(), bare.vocab_size, requests, PAGE, loop,  # type: ignore[arg-type]
    )  # fmt: skip


def test_one_by_one_the_simulator_does_what_the_engine_does(bare: TokenEngine) -> None:
    requests = one_by_one(alone(agents()))
    real, guess = on_engine(bare, requests, Loop.CLOSED), simulated(KERNEL, COST, requests, PAGE, Loop.CLOSED)
    assert real.events == guess.events
    assert real.requests["cached_l1"].to_list() == guess.requests["cached_l1"].to_list()
    assert sum(real.requests["cached_l1"]) > 0
    assert "evict" in {e["k"] for e in real.events}, "no pressure, no test"
    assert real.requests["arrival_s"].to_list() == [0.0, *real.requests["finish_s"].to_list()[:-1]]
    assert real.steps[-1]["waiting"] == 0


def test_all_at_once_times_do_not_matter(bare: TokenEngine) -> None:
    requests = at(alone(agents()), [0.0] * 12)
    real = on_engine(bare, requests)
    for cost in (COST, STEP_OF_ONE):
        assert simulated(KERNEL, cost, requests, PAGE, Loop.OPEN).events == real.events
    assert same_in_order(KERNEL, requests, PAGE, real)
    assert max(step["waiting"] for step in real.steps) > 4


def test_with_arrivals_in_between_the_live_order_explains_all(bare: TokenEngine) -> None:
    requests = arriving(alone(agents()), 0.05, seed=1)
    real = on_engine(bare, requests)
    assert real.before != tuple([0] * 12)
    assert list(real.before) == sorted(real.before)
    assert same_in_order(KERNEL, requests, PAGE, real)


def test_waiting_for_an_arrival_is_skipped_and_steps_do_not_count_it(bare: TokenEngine) -> None:
    requests = at(alone(agents())[:2], [0.0, 1000.0])
    real = on_engine(bare, requests)
    assert real.requests["arrival_s"].to_list() == [0.0, 1000.0]
    assert 1000.0 <= real.makespan_s < 1001.0
    assert real.before[1] == len(real.steps) - 3
    assert same_in_order(KERNEL, requests, PAGE, real)


@pytest.mark.parametrize(
    "fault", [{"publication": Publication.FINISH}, {"total_pages": 23}, {"max_batched_tokens": 20}]
)
def test_a_simulator_that_decides_otherwise_is_found_out(bare: TokenEngine, fault: dict[str, object]) -> None:
    requests = at(alone(agents()), [0.0] * 12)
    real = on_engine(bare, requests)
    other = replace(KERNEL, **fault)  # type: ignore[arg-type]
    assert not same_in_order(other, requests, PAGE, real)
    found = compare("faulty", None, real, simulated(other, COST, requests, PAGE, Loop.OPEN), None)
    assert not found.events_equal
    assert found.diverged is not None


def trace(**fields: object) -> MadeTrace:
    return MadeTrace(agents(), block_size=PAGE, **fields)  # type: ignore[arg-type]


OPTIONS = Options(limit=9, seconds=20.0, block=PAGE, page_size=PAGE, outputs=3, clock="cpu")


@pytest.fixture(scope="module")
def believed(bare: TokenEngine) -> Believed:
    return against_live(bare, trace(), OPTIONS, COST)


def test_every_load_is_run_and_the_decisions_are_equal(believed: Believed) -> None:
    names = [level.name for level in believed.levels]
    assert names == ["one by one", "all at once", "at 50%", "at 70%", "at 95%"]
    assert [level.order_parity for level in believed.levels] == [None, True, True, True, True]
    assert [level.differ for level in believed.levels[:2]] == [(), ()]
    assert believed.reuse_equal
    assert {level.requests for level in believed.levels} == {9}
    assert believed.saturation_rps == pytest.approx(9 / believed.levels[1].makespan_s)
    for level in believed.levels[2:]:
        assert level.load is not None
        assert level.makespan_s >= 9 / (believed.saturation_rps * level.load), "the last one comes then"
    for level in believed.levels:
        assert [t.name for t in level.times] == ["TTFT", "queue time", "completion"]
    assert "made up" in believed.cost


def test_a_cost_model_that_is_wrong_shows_with_its_sign(bare: TokenEngine) -> None:
    """Steps of a second are far too slow, steps of a nanosecond too quick."""
    quick = COST.model_copy(update={"base_s": 1e-9, "prefill_token_s": 1e-9, "decode_s": 1e-9})
    for cost, sign in ((STEP_OF_ONE, 1), (quick, -1)):
        found = against_live(bare, trace(), replace(OPTIONS, limit=4, seconds=1e6), cost)
        assert [np.sign(level.times[0].error_p50_s) for level in found.levels] == [sign] * 5


def test_what_the_calibration_explains_is_told_beside_the_error(bare: TokenEngine) -> None:
    """Steps that may be 10 % longer or shorter: near saturation more than 10 % of the time, and in order."""
    fit = FitError(
        method="made up", overall=ErrorOf(samples=2, median=0.0, p95=0.0), bias=0.0, uncertainty=0.05
    )
    found = against_live(bare, trace(), replace(OPTIONS, limit=4), COST.model_copy(update={"fit": fit}))
    for level in found.levels:
        completion = level.times[-1]
        assert completion.between_p50_s is not None
        assert completion.between_p50_s[0] < completion.error_p50_s < completion.between_p50_s[1]
    together = found.levels[1].times[-1]
    guess = together.live_p50_s + together.error_p50_s
    assert together.between_p50_s == pytest.approx(
        (0.9 * guess - together.live_p50_s, 1.1 * guess - together.live_p50_s)
    )
    assert " to " in render(found)


def test_less_time_means_fewer_requests(bare: TokenEngine) -> None:
    found = against_live(bare, trace(), replace(OPTIONS, seconds=1.0), STEP_OF_ONE)
    assert found.requests == 4


def test_other_reuse_where_the_order_is_given_is_a_fault(believed: Believed) -> None:
    first = replace(believed.levels[0], differ=(Reuse("0000001", 4, 8),))
    assert not replace(believed, levels=(first, *believed.levels[1:])).reuse_equal
    later = replace(believed.levels[4], differ=(Reuse("0000001", 4, 8),))
    assert replace(believed, levels=(*believed.levels[:4], later)).reuse_equal


def test_errors_are_shown_with_their_sign(believed: Believed) -> None:
    time = TimeError("TTFT", 0.2, 4.0, -0.05, 1.0, -0.25, 0.25, 0.0625)
    level = replace(believed.levels[0], times=(time,))
    page = render(replace(believed, levels=(level,)))
    assert "−50 ms (−25 %)" in page
    assert "+1.00 s (+25 %)" in page
    assert "off by −25 % at worst (TTFT)" in page


def test_a_fault_is_told_as_one(believed: Believed) -> None:
    level = replace(believed.levels[2], differ=(), order_parity=False, diverged=("k step", "k stall"))
    broken = replace(believed, levels=(*believed.levels[:2], level))
    assert not broken.reuse_equal
    assert (
        "fault of ours. 0 of 9 requests reuse other tokens. First difference: live k step; simulated k stall"
        in render(broken)
    )


def test_the_same_is_told_as_table_page_and_json(believed: Believed) -> None:
    text = StringIO()
    print_tables(believed, Console(file=text, width=200))
    page = render(believed)
    assert "18 of 18 reuse the same tokens" in answer(believed)
    assert "at 4 of 4 loads" in answer(believed)
    for shown in (text.getvalue(), page):
        assert answer(believed)[:60] in shown
        for level in believed.levels:
            assert level.name in shown
            assert f"{level.reused:,}" in shown
    assert "<script" not in page
    parsed = json.loads(to_json(believed))
    assert parsed["reuse_equal"] is True
    assert parsed["levels"][1]["reused"] == believed.levels[1].reused


def test_the_command_writes_both_files(
    bare: TokenEngine, believed: Believed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenEngine, "load", lambda *_args, **_more: bare)
    cost = tmp_path / "cost.json"
    CostModel.save(COST, cost)
    console = Console(file=StringIO(), width=160)
    command.run(
        "sample:agents", tmp_path / "out", console, limit=4, cost=str(cost), block=1, page_size=PAGE,
        clock="cpu", seconds=20.0,
    )  # fmt: skip
    parsed = json.loads((tmp_path / "out" / "against-live.json").read_text())
    assert (parsed["trace"], parsed["requests"], parsed["reuse_equal"]) == ("sample:agents", 4, True)
    broken = replace(believed, levels=(replace(believed.levels[2], order_parity=False),))
    monkeypatch.setattr(against, "against_live", lambda *_args: broken)
    with pytest.raises(typer.Exit) as left:
        command.run("sample:agents", tmp_path / "out", console, cost=str(cost))
    assert left.value.exit_code == 1
    assert "The simulator against the engine" in (tmp_path / "out" / "against-live.html").read_text()


def test_the_flag_takes_no_experiment_and_its_options_nothing_else(tmp_path: Path) -> None:
    def error(line: str) -> str:
        done = CliRunner().invoke(app, line)
        assert isinstance(done.exception, InputError), done.output
        return str(done.exception)

    assert "give --out DIR and no experiment" in error(f"replay x --against-live --out {tmp_path}")
    assert "give --out DIR and no experiment" in error("replay --against-live")
    assert "--clock: only with --against-live" in error(f"replay x --out {tmp_path} --clock cpu")
    assert "presets: " in error(f"replay --against-live --out {tmp_path} --cost nothing")
    assert "the samples are" in error(f"replay --against-live --out {tmp_path} --trace sample:none")
