"""`hotprefix trace`: what it writes to stdout and to stderr, and its exit status."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from hotprefix import cli
from hotprefix.commands.trace import app
from hotprefix.errors import InputError
from hotprefix.lab.trace.info import info
from hotprefix.lab.trace.open_trace import open_trace
from hotprefix.lab.trace.write_trace import whole_file
from tests.support.traces import mooncake, row, session, write_lines


class Done(NamedTuple):
    stdout: str
    stderr: str


Trace = Callable[..., Done]


@pytest.fixture
def trace(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Trace:
    """Runs the command as a shell would: takes arguments, returns the exit status and both streams."""
    root = typer.Typer()
    root.add_typer(app, name="trace")
    monkeypatch.setattr(cli, "app", root)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str | Path, status: int = 0) -> Done:
        monkeypatch.setattr(sys, "argv", ["hotprefix", "trace", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        done = Done(*capsys.readouterr())
        assert (ended.value.code or 0) == status, done.stderr
        return done

    return run


def test_info_as_json(trace: Trace, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "m.jsonl", [mooncake(), mooncake(timestamp=1500, hash_ids=[0, 2]), "{"])
    refused = trace("info", path, "--json", status=2)
    assert refused.stdout == ""
    assert refused.stderr.startswith(f"hotprefix: {path}, line 3: the line: Invalid JSON")
    assert refused.stderr.count("\n") == 1
    done = trace("info", path, "--json", "--skip-bad")
    found = json.loads(done.stdout)
    wanted = {"requests": 2, "input_tokens": 2000, "output_tokens": 10, "block_size": 512, "span_s": 1.5}
    assert {name: found[name] for name in wanted} == wanted
    assert (found["ideal_reuse_share"], found["skipped_lines"]) == (0.25, 1)
    assert f"1 bad lines skipped; the first: {path}, line 3" in done.stderr
    table = trace("info", path, "--skip-bad")
    assert table.stdout == ""
    assert "ideal_reuse_share" in table.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["info", "absent.jsonl"], "absent.jsonl: No such file"),
        (["info", "sample:agents", "--time-unit", "min"], "--time-unit min: there are s, ms, us, ns"),
        (["info", "sample:agents", "--limit", "0"], "--limit 0: give 1 or more"),
        (["generate", "bursts", "--out", "x.jsonl", "--set", "size"], "--set size: give name=value"),
        (["generate", "bursts", "--out", "x.jsonl", "--set", "size=0"], "bursts.size=0: "),
        (["generate", "burst", "--out", "x.jsonl"], "generator 'burst': there are agents, bursts"),
        (["generate", "bursts", "--out", "x.jsonl", "--params", "absent"], "absent: give a JSON"),
        (["convert", "sample:agents", "--out", "x.csv"], "x.csv: give a name that ends with"),
        (["convert", "sample:agents", "--out", "/nowhere/x.jsonl"], "/nowhere/x.jsonl: No such file"),
        (["convert", "sample:agents", "--out", "x.jsonl", "--session-rate", "1"], "--session-rate 1: "),
        (["convert", "sample:agents", "--out", "x.jsonl", "--answers"], "answers: "),
        (["info", "sample:agents", "--shared-prefix"], "--shared-prefix: sample:agents is of format"),
        (["convert", "sample:agents", "--out", "x.jsonl", "--no-shared-prefix"], "--shared-prefix: "),
        (["convert", "sample:agents", "--out", "x.jsonl", "--seed", "3"], "--seed 3: draws session starts"),
        (["generate", "bursts", "--out", "x.jsonl", "--set", "every_s=1e9", "--set", "bursts=2000"],
         "request b1000/0: arrival_s=1e+12; a trace holds at most 1e+12 seconds"),
    ],
)  # fmt: skip
def test_bad_usage_is_one_clear_line(trace: Trace, arguments: list[str], says: str, tmp_path: Path) -> None:
    done = trace(*arguments, status=2)
    assert done.stdout == ""
    assert done.stderr.startswith(f"hotprefix: {says}")
    assert done.stderr.count("\n") == 1


def test_a_folder_is_no_file_to_write(trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").mkdir()
    done = trace("generate", "bursts", "--out", tmp_path / "t.jsonl", status=2)
    assert done.stderr == f"hotprefix: {tmp_path / 't.jsonl'}: a folder; give the file to write\n"
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_a_pipe_is_not_replaced_by_a_file(trace: Trace, tmp_path: Path) -> None:
    pipe = tmp_path / "t.jsonl"
    os.mkfifo(pipe)
    done = trace("generate", "bursts", "--out", pipe, status=2)
    assert done.stderr == f"hotprefix: {pipe}: no ordinary file; give the file to write\n"
    assert pipe.is_fifo()


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(of: Path, to: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with (
        pytest.raises(InputError, match=r"t.json: No space left on device"),
        whole_file(tmp_path / "t.json") as file,
    ):
        file.write(b"{}")
    assert not list(tmp_path.iterdir())


def test_convert_reads_as_replay_would(trace: Trace, tmp_path: Path) -> None:
    lines = [session([row(), row(4)]), session([row()], id="t")]
    path = write_lines(tmp_path / "c.jsonl.gz", lines)
    trace("convert", path, "--session-rate", "0.5", "--seed", "3", "--out", tmp_path / "t.jsonl.zst")
    found = info(open_trace(tmp_path / "t.jsonl.zst"))
    assert (found.requests, found.sessions) == (3, 2)
    assert found.ideal_reused_blocks == 2, "sessions share tools and system prompt"
    assert json.loads(trace("info", path, "--json").stdout)["ideal_reused_blocks"] == 0, (
        "info assumes nothing"
    )
    assert json.loads(trace("info", path, "--json", "--shared-prefix").stdout)["ideal_reused_blocks"] == 2
    assert "Poisson, 0.5 a second, seed 3" in " ".join(found.notes)


def test_fit_then_generate(trace: Trace, tmp_path: Path) -> None:
    rows = [row(0), row(5, tokens=640, parent=0, keep=4, inp="r"), row(9, tokens=700, parent=1, keep=10)]
    path = write_lines(tmp_path / "c.jsonl", [session(rows, id=str(n)) for n in range(5)])
    fitted, out = tmp_path / "fitted.json", tmp_path / "t.jsonl.gz"
    trace("fit", path, "--out", fitted)
    made = ["generate", "agents", "--params", fitted, "--set", "sessions=3", "--seed", "2"]
    trace(*made, "--out", out)
    first = out.read_bytes()
    trace(*made, "--out", out)
    assert out.read_bytes() == first
    assert info(open_trace(out)).sessions == 3
    done = trace("generate", "bursts", "--params", fitted, "--out", out, status=2)
    assert "holds parameters of generator 'agents'" in done.stderr
    assert out.read_bytes() == first


def test_check_says_everything_and_fails(trace: Trace, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "m.jsonl", [mooncake(), mooncake(hash_ids=[1, 0]), "{"])
    done = trace("check", path, "--json", status=2)
    found = json.loads(done.stdout)
    assert (found["requests"], found["skipped"], len(found["problems"])) == (2, 1, 2)
    assert done.stderr == f"hotprefix: {path}: 3 faults of 2 kinds\n"
    good = trace("check", "sample:agents")
    assert "348 requests, no fault found" in good.stderr
    assert good.stdout == ""


@pytest.mark.parametrize("command", ["info", "convert", "generate", "check", "fit"])
def test_help_has_an_example(trace: Trace, command: str) -> None:
    assert f"Example: hotprefix trace {command} " in trace(command, "--help").stdout


def test_info_is_written_for_people(trace: Trace, tmp_path: Path) -> None:
    rows = [mooncake(timestamp=7 * n, input_length=600 + n % 400) for n in range(2000)]
    shown = trace("info", write_lines(tmp_path / "m.jsonl", rows)).stderr
    found = {
        cells[1].strip(): cells[2].strip() for line in shown.splitlines() if len(cells := line.split("│")) > 3
    }
    wanted = {
        "requests": "2,000", "input_tokens": "1,599,000", "ideal_reuse_share": "99.95 %", "span_s": "13.99 s",
        "has_sessions": "no", "think_s": "-", "input_length": "p50 799.5  p90 959.1  p99 995  max 999",
    }  # fmt: skip
    assert found.items() >= wanted.items()


def test_gather_then_compare_with_what_was_published(trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "trace_1.json").write_text(
        '{"id":"s","models":["m"],"block_size":64,"hash_id_scope":"local","tool_tokens":1,"system_tokens":1,'
        '"requests":[{"t":0.0,"type":"n","model":"m","in":70,"out":5,"hash_ids":[1],"input_types":["text"]}]}'
    )
    out = tmp_path / "cc_weka_sessions_b64.jsonl.gz"
    assert "1 sessions, 0 files left out" in trace("gather", tmp_path, "--out", out).stderr
    assert json.loads(trace("info", out, "--json").stdout)["requests"] == 1
    done = trace("published", "--folder", tmp_path, status=2)
    assert "cc_weka_sessions_b64.jsonl: differs" in done.stdout
    assert "mooncake_fast25_conversation_b512.jsonl: absent" in done.stdout
    assert "raw.githubusercontent.com/kvcache-ai/Mooncake/" in done.stdout
    assert done.stderr.startswith(f"hotprefix: {tmp_path}: cc_weka_sessions_b64.jsonl differ")
    assert trace("gather", tmp_path, "--out", tmp_path / "x.csv", status=2).stderr.count("\n") == 1


def test_published_without_a_folder_tells_how_to_get_them(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOTPREFIX_TRACES", raising=False)
    done = trace("published")
    assert "not looked for: set HOTPREFIX_TRACES" in done.stdout
    found = json.loads(trace("published", "--json").stdout)
    assert {one["state"] for one in found} == {None}
    assert all(one["get"] for one in found)
    monkeypatch.setenv("HOTPREFIX_TRACES", "nowhere")
    assert "nowhere: no such folder" in trace("published", status=2).stderr
