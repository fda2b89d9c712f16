"""`hotprefix replay`: its files, its statuses, its words."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from hotprefix.commands.replay import replay
from hotprefix.errors import InputError
from hotprefix.lab.experiment.load import shipped
from tests.support.experiments import in_this_process
from tests.unit.test_experiment_run import FILE

app = typer.Typer()
app.command()(replay)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("hotprefix.lab.experiment.one_run.sweep", in_this_process)
    return


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "tiny.toml").write_text(FILE)
    return str(tmp_path / "tiny.toml")


def call(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def refusal(*words: str) -> str:
    found = call(*words)
    assert isinstance(found.exception, InputError), found.exception
    return found.exception.message


def test_it_writes_the_files_scripts_depend_on(path: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = call(path, "--seeds", "1", "--set", "slo.ttft_s=1", "--out", str(out), "--json")
    assert found.exit_code == 0, found.output
    summary = json.loads(found.stdout)
    assert summary == json.loads((out / "summary.json").read_text())
    held = json.loads((out / "experiment.json").read_text())
    assert held["name"] == "tiny"
    assert held["hash"] in json.dumps(summary)
    assert held["hash"][:12] in (out / "report.html").read_text()
    assert f"hotprefix replay {path} --seeds 1 --set slo.ttft_s=1 --out DIR" in json.dumps(summary)
    assert (out / "requests.parquet").is_file()
    with (out / "metrics.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["metric"] == "requests"]
    assert sorted((r["condition"], r["arm"], float(r["value"])) for r in rows) == [
        ("tight", "lfu", 18.0), ("tight", "lru", 18.0), ("wide", "lfu", 18.0), ("wide", "lru", 18.0),
    ]  # fmt: skip


def test_a_failed_run_makes_the_status_1_after_everything_was_written(path: str, tmp_path: Path) -> None:
    text = FILE.replace("bound = true", "").replace(
        "[[conditions]]", "[kernel.tiers]\npages = 8\n[[conditions]]", 1
    )
    Path(path).write_text(text)
    found = call(
        path, "--seeds", "1", "--set", "cost=" + str(_bare(tmp_path)), "--out", str(tmp_path / "out")
    )
    assert found.exit_code == 1
    assert "4 runs have no result" in found.output
    assert len(json.loads((tmp_path / "out" / "summary.json").read_text())["problems"]) == 4
    assert (tmp_path / "out" / "report.html").is_file()


def _bare(folder: Path) -> Path:
    """A cost model that knows no links, which tiers need."""
    from hotprefix.cost.presets import load_cost

    cost = json.loads(load_cost("llama-3.1-8b.1xh100.fp8").model_dump_json())
    (folder / "bare.json").write_text(json.dumps({**cost, "links": {}}))
    return folder / "bare.json"


def test_the_folder_of_another_experiment_is_refused_unless_forced(path: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert call(path, "--seeds", "1", "--out", out).exit_code == 0
    said = refusal(path, "--seeds", "1", "--limit", "17", "--out", out)
    assert said.startswith(f"--out {out}: holds tiny ")
    assert "give another folder, or --force" in said
    assert call(path, "--seeds", "1", "--limit", "17", "--out", out, "--force").exit_code == 0


def test_bad_usage_is_said_in_one_line(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "out")
    assert "give an experiment and --out" in refusal(path)
    assert "give a folder that can be written" in refusal(path, "--out", str(tmp_path / "file" / "out"))
    assert "--jobs 0: give a whole number >= 1" in refusal(path, "--jobs", "0", "--out", out)
    assert "seeds=0: give greater than or equal to 1" in refusal(path, "--seeds", "0", "--out", out)
    assert "No such file" in refusal(path, "--trace", str(tmp_path / "none.jsonl"), "--out", out)


def test_the_shipped_experiments_are_listed() -> None:
    found = call("--list")
    assert found.exit_code == 0
    assert [line.split()[0] for line in found.stdout.splitlines()] == list(shipped())
    assert set(json.loads(call("--list", "--json").stdout)) == set(shipped())


@pytest.mark.parametrize(
    "given", [["--seeds", "3"], ["--set", "load.speed=2"], ["--jobs", "2"], ["--ray"], ["--force"]]
)
def test_options_of_experiments_are_refused_against_live(given: list[str], tmp_path: Path) -> None:
    found = refusal("--against-live", "--out", str(tmp_path), *given)
    assert found.startswith(f"{given[0]}: belongs to experiments")
