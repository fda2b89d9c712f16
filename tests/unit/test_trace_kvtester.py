"""kv-cache-tester's own files: read as they are, gathered into one file, compared with what was published."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from hotprefix.lab.trace.fit_agents import fit_agents
from hotprefix.lab.trace.info import info
from hotprefix.lab.trace.kvtester import as_session, gather
from hotprefix.lab.trace.open_trace import open_trace
from hotprefix.lab.trace.problems import BadTrace, Report
from hotprefix.lab.trace.published import PUBLISHED, CopyState, Published, check


def request(t: float, ids: list[int], **changes: Any) -> dict[str, Any]:
    """A request in the form of the project's files at commit 94f6046."""
    return {
        "t": t, "type": "n", "model": "opus", "in": 64 * len(ids) + 9, "out": 5, "hash_ids": ids,
        "input_types": ["text"], "output_types": ["text"], "stop": "tool_use", "api_time": 2.5,
        "think_time": 0.0,
    } | changes  # fmt: skip


def original(*requests: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "id": "trace_0001", "models": ["opus"], "block_size": 64, "hash_id_scope": "local",
        "tool_tokens": 100, "system_tokens": 28, "requests": list(requests), "totals": {},
    } | changes  # fmt: skip


def folder(tmp_path: Path, *files: dict[str, Any]) -> Path:
    for number, held in enumerate(files, 1):
        (tmp_path / f"trace_{number:04}.json").write_text(json.dumps(held))
    return tmp_path


SUB = {"type": "subagent", "agent_id": "agent_001", "t": 3.0004, "models": ["haiku"], "requests": [
    request(0.0, [40, 41], model="haiku"),
    request(6.0, [40, 41, 42], model="haiku", input_types=["text", "tool_result"]),
]}  # fmt: skip
FIRST = original(request(0.0, [1, 2, 3]), SUB, request(5.0, [1, 2, 9, 10], input_types=["tool_result"]),
                 request(12.0, [1, 2, 3, 4], stop=""))  # fmt: skip
ROWS = [
    [0.0, 0, 201, 5, -1, 0, 3, 0.0, 2.5, None, "u", "tool_use", 0],
    [3.0004, 1, 137, 5, -1, 0, 2, 0.0, 2.5, None, "u", "tool_use", "haiku"],
    [5.0, 0, 265, 5, 0, 2, 2, 0.0, 2.5, None, "r", "tool_use", 0],
    [9.0004, 1, 201, 5, 1, 2, 1, 0.0, 2.5, None, "ru", "tool_use", "haiku"],
    [12.0, 0, 265, 5, 0, 3, 1, 0.0, 2.5, None, "u", "", 0],
]


def test_prompts_become_what_they_keep_and_what_is_new() -> None:
    """A prompt keeps blocks of the earlier prompt that shares most with it (of equals the latest). Here the
    last row keeps blocks of the first."""
    found = as_session(json.dumps(FIRST).encode())
    assert found["rows"] == ROWS
    assert [found[name] for name in ("id", "models", "block_size", "tool_tokens", "system_tokens")] == [
        "trace_0001", ["opus"], 64, 100, 28,
    ]  # fmt: skip


def test_a_folder_a_file_and_the_gathered_file_are_the_same_trace(tmp_path: Path) -> None:
    second = original(request(0.0, [5]), id="trace_0002")
    path = folder(tmp_path, FIRST, second)
    gathered = tmp_path / "sessions.jsonl"
    gathered.write_bytes(b"".join(line for _, line in gather(path) if line is not None))
    whole, again = info(open_trace(path)), info(open_trace(gathered))
    assert (whole.requests, whole.sessions, whole.format) == (6, 2, "agents")
    assert dataclasses.replace(whole, name="", source="") == dataclasses.replace(again, name="", source="")
    assert info(open_trace(path / "trace_0001.json")).requests == 5
    assert fit_agents(path, Report())["fit"]["sessions"] == 2


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path, FIRST, original(request(0.0, [1, 2]), request(1.0, [2, 1])))
    says = r"trace_0002.json, line 1: requests.hash_ids: 2 stands after 1 and after None"
    with pytest.raises(BadTrace, match=says):
        list(open_trace(path))
    with pytest.raises(BadTrace, match=says):
        list(gather(path))
    trace = open_trace(path, skip_bad=True)
    assert len(list(trace)) == 5
    assert trace.report.skipped == 1


def test_a_folder_of_other_things_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match=r"a folder without trace_\*.json"):
        open_trace(tmp_path)


def test_files_beyond_a_size_are_left_out_and_told(tmp_path: Path) -> None:
    path = folder(tmp_path, FIRST, original(request(0.0, [5]), id="trace_0002"))
    least = (path / "trace_0002.json").stat().st_size
    assert [line is None for _, line in gather(path, least)] == [True, False]
    assert [line is None for _, line in gather(path)] == [False, False]


# -- published ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_a_copy_is_compared_by_its_content(tmp_path: Path, packed: bool) -> None:
    content = b'{"a":1}\n'
    one = Published("t.jsonl", "o/r", "0" * 40, "p", "MIT", hashlib.sha256(content).hexdigest())
    assert check(one, tmp_path) is CopyState.ABSENT
    path = tmp_path / ("t.jsonl.gz" if packed else "t.jsonl")
    wrap = gzip.compress if packed else bytes
    path.write_bytes(wrap(content))
    assert check(one, tmp_path) is CopyState.SAME
    path.write_bytes(wrap(content + b"\n"))
    assert check(one, tmp_path) is CopyState.DIFFERS


@pytest.mark.parametrize("one", PUBLISHED, ids=lambda one: one.name)
def test_how_to_get_a_trace_is_told(one: Published) -> None:
    assert len(one.commit) == 40
    assert len(one.sha256) == 64
    steps = " ".join(one.steps("traces"))
    for part in (one.commit, one.repository, one.path, f"traces/{one.name}"):
        assert part in steps
