"""Calibration of a small live engine: what is run, what is recorded, what is written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hotprefix.commands.calibrate import calibrate as command
from hotprefix.cost.features import Features
from hotprefix.cost.model import CostModel
from hotprefix.engine.token_engine import TokenEngine
from hotprefix.errors import ConfigError, InputError
from hotprefix.kernel.config import KernelConfig
from hotprefix.kernel.plan import StepPlan
from hotprefix.lab.cost import measure_links
from hotprefix.lab.cost.calibrate import Settings, calibrate
from hotprefix.lab.cost.design import Decodes
from hotprefix.lab.cost.measure_steps import Bench, StopwatchExecutor
from tests.unit.tiny_models import load_like, one_thread, reference_model, save

PAGE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save(reference_model("Llama"), path)
    return path


@pytest.fixture(scope="module")
def bare(folder: Path) -> Iterator[TokenEngine]:
    with one_thread():
        model = reference_model("Llama")
        yield TokenEngine.of("tiny", load_like(model, folder), 128, PAGE)


def bench(bare: TokenEngine, **config: int) -> Bench:
    watch = StopwatchExecutor(bare.executor)
    kernel = KernelConfig(total_pages=128, page_size=PAGE, **{"max_batched_tokens": 64, **config})
    return Bench(bare.loop(kernel, watch), watch, bare.vocab_size)


def test_a_prefill_batch_is_one_chunk_after_its_cached_prefix(bare: TokenEngine) -> None:
    made = bench(bare)
    made.prefill(64, 32)
    assert [s.features.prefill_tokens for s in made.samples] == [64, 32]
    made.samples.clear()
    made.prefill(64, 32)
    made.prefill(0, 16)
    assert [s.features for s in made.samples] == [Features(32, 32 * 64 + 528, 0, 0), Features(16, 136, 0, 0)]
    assert [s.point for s in made.samples] == ["prefill 32 after 64", "prefill 16 after 0"]
    assert all(s.seconds > 0 and s.outside_s > 0 for s in made.samples)
    assert not made.loop.has_work


def test_a_step_is_split_into_the_forward_pass_and_the_rest(bare: TokenEngine) -> None:
    """The clock ticks when it is read. So 1 s passes in the inner executor and 2 s in the stopwatch as a
    whole; of the 4 s that pass in the loop's step, 2 s are outside the forward pass."""
    made = bench(bare)
    made.watch.clock = count().__next__
    made.prefill(0, 16)
    assert [(s.seconds, s.outside_s) for s in made.samples] == [(1, 2)]


def test_a_decode_batch_decodes_alone_and_then_beside_chunks(bare: TokenEngine) -> None:
    made = bench(bare)
    made.decode(Decodes(4, 8, (16, 32)))
    named = [s for s in made.samples if s.point == "decode 4 of 8"]
    assert [s.features.decodes for s in named] == [4, 4, 4, 4]
    grown = [s.features.decode_context for s in named]
    assert grown == [grown[0] + 4 * i for i in range(4)]
    mixed = [s.features for s in made.samples if s.features.regime == "mixed"]
    assert [(f.prefill_tokens, f.decodes) for f in mixed] == [(16, 4), (32, 4)]
    assert not made.loop.has_work


def test_a_queue_waits_while_every_slot_decodes(bare: TokenEngine) -> None:
    made = bench(bare, max_running=2)
    made.queue(5, 2)
    queued = [s for s in made.samples if s.point == "queue 5"]
    assert [(s.running, s.waiting, s.features.decodes) for s in queued] == [(2, 5, 2)] * 4
    assert not made.loop.has_work
    made.loop.kernel.check()


def test_calibration_gives_a_model_that_tells_its_error(bare: TokenEngine) -> None:
    told: list[str] = []
    settings = Settings(seconds=2.0, max_batched_tokens=128, max_running=8)
    found, steps = calibrate(bare, settings, "tiny", told.append)
    assert {s.features.regime for s in steps} == {"prefill", "decode", "mixed"}
    assert found.fit is not None
    assert found.fit.overall.samples == len(steps)
    assert None not in (found.fit.prefill, found.fit.decode, found.fit.mixed)
    assert found.kv_token_bytes == 2 * 3 * 2 * 8 * 4  # keys and values, layers, heads, head size, float32
    assert found.links.save is not None
    assert found.links.restore is not None
    assert (found.name, found.dtype) == ("tiny", "float32")
    assert found.prices.scheduler_s(8, 0) > 0
    assert any("round 1, batch 1" in line for line in told)


def test_each_link_has_its_own_figures(bare: TokenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock moved by the copies themselves: saves 1 s and 0.01 s a page, restores 2 s and 0.02 s."""
    now = [0.0]

    def copies(_host: object, plan: StepPlan) -> None:
        now[0] += 1 + 0.01 * len(plan.saves) if plan.saves else 2 + 0.02 * len(plan.restores)

    monkeypatch.setattr(measure_links, "_synchronised", copies)
    monkeypatch.setattr(measure_links.time, "perf_counter", lambda: now[0])
    found = measure_links.host_links(bare.pool)
    assert found.save is not None
    assert found.restore is not None
    assert found.save.latency_s == pytest.approx(1)
    assert found.save.bytes_per_s == pytest.approx(bare.pool.page_bytes / 0.01)
    assert found.restore.latency_s == pytest.approx(2)
    assert found.restore.bytes_per_s == pytest.approx(bare.pool.page_bytes / 0.02)


def test_settings_and_pools_that_do_not_fit_are_refused(bare: TokenEngine) -> None:
    with pytest.raises(ConfigError, match=r"seconds=0: give seconds > 0"):
        Settings(seconds=0)
    with pytest.raises(ConfigError, match=r"clock='sun': give one of wall, cpu"):
        Settings(clock="sun")
    with pytest.raises(ConfigError, match=r"129 pages of 16: the loaded pool has 128 of 16"):
        bare.loop(KernelConfig(total_pages=129, page_size=16))
    with pytest.raises(ConfigError, match=r"8 pages of 32"):
        bare.loop(KernelConfig(total_pages=8, page_size=32))


def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(command)
    return made


def test_the_command_writes_the_file_and_keeps_stdout_for_json(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    with one_thread():
        done = CliRunner().invoke(
            app(),
            f"--out {out} --model {folder} --dtype float32 --device cpu --threads 1 --clock cpu --json "
            "--kv-tokens 2048 --max-running 4 --max-batched-tokens 64 --seconds 1",
        )
    assert done.exit_code == 0, done.output
    assert CostModel.load(out) == CostModel.model_validate_json(done.stdout)
    assert json.loads(done.stdout)["name"] == "cost"
    extent = r"cpu clock, contexts to \d+, chunks to \d+, 4 decodes$"
    assert re.search(extent, CostModel.load(out).source)


def test_the_command_refuses_a_folder_as_its_file(tmp_path: Path) -> None:
    done = CliRunner().invoke(app(), ["--out", str(tmp_path)])
    assert isinstance(done.exception, InputError)
    assert "a folder; give the file to write" in str(done.exception)


def test_the_command_does_not_replace_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = CliRunner().invoke(app(), ["--out", str(tmp_path / "pipe"), "--model", str(tmp_path / "none")])
    assert isinstance(done.exception, InputError)
    assert "no ordinary file" in str(done.exception)
