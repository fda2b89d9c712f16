"""Alibaba's Qwen-Bailian traces: sessions by parent_chat_id, closed loop, blocks that are hashed singly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotprefix.lab.trace.info import info
from hotprefix.lab.trace.open_trace import open_trace
from hotprefix.lab.trace.problems import BadTrace
from tests.support.traces import write_lines


def chat(number: int, parent: int = -1, at: float = 0.0, blocks: int = 2, **changes: Any) -> dict[str, Any]:
    """A line in the form that the data set's README shows."""
    return {
        "chat_id": number, "parent_chat_id": parent, "timestamp": at, "input_length": 16 * blocks - 5,
        "output_length": 7, "type": "text", "turn": 1, "hash_ids": list(range(blocks)),
    } | changes  # fmt: skip


def test_chats_become_sessions(tmp_path: Path) -> None:
    rows = [chat(159, at=61.114), chat(7, at=62.0), chat(160, 159, 70.5, 3), chat(161, 160, 80.0, 4),
            chat(162, 160, 81.0, 4)]  # fmt: skip
    trace = open_trace(write_lines(tmp_path / "qwen_traceA_blksz_16.jsonl", rows))
    assert (trace.provenance.format, trace.block_size) == ("bailian", 16)
    assert trace.has_sessions
    first, other, second, third, again = trace
    assert [r.session for r in (first, other, second, third, again)] == ["159", "7", "159", "159", "159"]
    assert [r.parent for r in (first, other, second, third, again)] == [None, None, "159", "160", "160"]
    assert (first.arrival_s, other.arrival_s) == (0.0, pytest.approx(0.886))
    assert (first.think_s, second.think_s, third.think_s, again.think_s) == pytest.approx(
        (None, 9.386, 9.5, 10.5)
    )
    assert first.blocks.tolist() == second.blocks.tolist()[:2]
    assert (first.input_length, first.output_length) == (27, 7)
    assert any("parent's arrival" in note for note in trace.provenance.notes)


def test_a_block_is_its_hash_and_all_before_it(tmp_path: Path) -> None:
    """Hashes are of single blocks, so the same hash after other blocks is another block."""
    rows = [chat(1, hash_ids=[5, 6]), chat(2, hash_ids=[9, 6]), chat(3, blocks=3, hash_ids=[5, 5, 6])]
    found = [request.blocks.tolist() for request in open_trace(write_lines(tmp_path / "q.jsonl", rows))]
    assert found == [[0, 1], [2, 3], [0, 4, 5]]


def test_a_parent_outside_the_file_begins_a_session(tmp_path: Path) -> None:
    rows = [chat(2, 1), chat(3, 1, 4.0), chat(4, 3, 5.0)]
    trace = open_trace(write_lines(tmp_path / "q.jsonl", rows))
    assert [(r.session, r.parent) for r in trace] == [("1", None), ("1", None), ("1", "3")]
    assert info(trace).requests == 3


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([chat(1), chat(1)], "line 2: chat_id: 1 stands twice"),
        ([chat(2, 1), chat(1)], "line 2: chat_id: 1 was named as a parent by an earlier line; sort"),
        ([chat(1, at=5.0), chat(2, 1, 4.0)], "line 2: timestamp: 4.0 is before that of chat 1"),
        ([chat(1, hash_ids=[1, 2, 3])], "line 1: hash_ids: 3 ids for 27 tokens"),
        ([chat(1, -2)], "line 1: parent_chat_id: "),
        ([chat(1, at=1764000000000)], "line 1: timestamp: .* would be Unix time in ms"),
    ],
)
def test_what_contradicts_itself_is_told(tmp_path: Path, rows: list[Any], says: str) -> None:
    with pytest.raises(BadTrace, match=says):
        list(open_trace(write_lines(tmp_path / "q.jsonl", rows)))


def test_a_skipped_parent_loses_no_child(tmp_path: Path) -> None:
    rows = [chat(1), "{", chat(2, 1, 3.0, hash_ids=[]), chat(3, 2, 6.0), chat(4, 3, 7.0)]
    trace = open_trace(write_lines(tmp_path / "q.jsonl", rows), skip_bad=True)
    assert [(r.id, r.session, r.parent) for r in trace] == [
        ("1", "1", None),
        ("3", "2", None),
        ("4", "2", "3"),
    ]
    assert trace.report.skipped == 2
