"""Our own trace format: nothing is lost, no file is half-written, and a contradiction is named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotprefix.errors import InputError
from hotprefix.lab.trace.canonical import OF_SESSION, SESSIONS, from_runs, to_runs
from hotprefix.lab.trace.open_trace import open_trace
from hotprefix.lab.trace.problems import BadTrace, Report
from hotprefix.lab.trace.streamed import StreamedTrace
from hotprefix.lab.trace.trace_request import Provenance, TraceRequest
from hotprefix.lab.trace.write_trace import write_trace
from tests.support.traces import write_lines

HEADER = {"hotprefix_trace": 1, "block_size": 16, "name": "n", "has_prefixes": True, "has_sessions": True}


def ids(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def request(name: str = "a", tokens: int = 40, *blocks: int, **changes: Any) -> TraceRequest:
    held = ids(*(blocks or (0, 1)))
    return TraceRequest(**{"id": name, "input_length": tokens, "output_length": 9, "blocks": held} | changes)


def made(*requests: TraceRequest, fail: BaseException | None = None, sessions: bool = True) -> StreamedTrace:
    def read(report: Report) -> Iterator[TraceRequest]:
        yield from requests
        if fail is not None:
            raise fail

    return StreamedTrace("n", 16, True, sessions, Provenance("s", "f", ("one", "two")), read)


def plain(trace: StreamedTrace) -> list[dict[str, Any]]:
    found = []
    for r in trace:
        values = {f.name: getattr(r, f.name) for f in dataclasses.fields(r)}
        found.append({k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()})
    return found


EVERYTHING = made(
    request("a", 40, 5, 6, 7, arrival_s=0.0, session="s", output_blocks=ids(8), namespace="m", priority=-2),
    request("b", 70, 5, 6, 8, 9, arrival_s=2.5, session="s", parent="a", think_s=0.0, kind="tool",
            tools={"ü": [1]}),
    TraceRequest(
        id="c", input_length=15, output_length=0, blocks=ids(), arrival_s=1.0, output_blocks=ids()
    ),
)  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_what_was_written_is_read(tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"t{suffix}"
    assert write_trace(EVERYTHING, out) == 3
    again = open_trace(out)
    assert plain(again) == plain(EVERYTHING)
    assert (again.name, again.block_size, again.has_prefixes, again.has_sessions) == ("n", 16, True, True)
    assert (again.provenance.source, again.provenance.notes) == ("s", ("one", "two"))
    first = out.read_bytes()
    write_trace(again, out)
    assert out.read_bytes() == first, "equal traces, equal bytes"
    assert suffix != ".jsonl.gz" or first[4:8] == bytes(4), "a gzip header without its time"
    assert out.stat().st_mode & 0o044, "not only for its owner, as temporary files are"


def test_a_prompt_is_written_relative_to_what_it_continues(tmp_path: Path) -> None:
    write_trace(EVERYTHING, tmp_path / "t.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert lines[1]["blocks"] == [[5, 3]]
    assert (lines[2]["base"], lines[2]["keep"], lines[2]["blocks"]) == ("a", 3, [9])
    assert "base" not in lines[3]


def test_an_answer_can_be_kept(tmp_path: Path) -> None:
    trace = made(
        request("a", 40, 5, 6, arrival_s=0.0, session="s", output_blocks=ids(20)),
        request("b", 64, 5, 6, 20, 30, arrival_s=1.0, session="s"),
    )
    write_trace(trace, tmp_path / "t.jsonl")
    last = json.loads((tmp_path / "t.jsonl").read_text().splitlines()[-1])
    assert (last["base"], last["keep"], last["blocks"]) == ("a", 3, [30])
    assert plain(open_trace(tmp_path / "t.jsonl")) == plain(trace)


def test_bases_come_from_bounded_memory(tmp_path: Path) -> None:
    same = [request(str(n), 40, n, n, arrival_s=0.0, session="s") for n in range(OF_SESSION)]
    near = [*same, request("z", 40, 0, 0, arrival_s=0.0, session="s")]
    far = [*same, request("y", 40, 99, 99, arrival_s=0.0, session="s"), near[-1]]
    others = [request(f"o{n}", 40, 500, n, arrival_s=0.0, session=f"o{n}") for n in range(SESSIONS)]
    for requests, based in ((near, True), (far, False), ([*same, *others, near[-1]], False)):
        write_trace(made(*requests), tmp_path / "t.jsonl")
        assert ("base" in json.loads((tmp_path / "t.jsonl").read_text().splitlines()[-1])) is based
        assert len(list(open_trace(tmp_path / "t.jsonl"))) == len(requests)


@pytest.mark.parametrize(
    "values", [(), (3,), (3, 4, 5), (3, 5, 4), (1, 2, 9, 10, 11, 4), (2**30 - 2, 2**30 - 1)]
)
def test_runs(values: tuple[int, ...]) -> None:
    runs = [tuple(run) if isinstance(run, list) else run for run in to_runs(ids(*values))]
    assert from_runs(runs, "blocks", 10).tolist() == list(values)
    assert len(runs) <= len(values)


@pytest.mark.parametrize("fail", [KeyboardInterrupt(), BadTrace("bad")])
def test_nothing_half_written_stays(tmp_path: Path, fail: BaseException) -> None:
    out = tmp_path / "t.jsonl.gz"
    with pytest.raises(type(fail)):
        write_trace(made(request(arrival_s=0.0), fail=fail), out)
    assert list(tmp_path.iterdir()) == []
    out.write_text("before")
    with pytest.raises(type(fail)):
        write_trace(made(request(arrival_s=0.0), fail=fail), out)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["before"]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"t\.csv: give a name that ends with \.jsonl"):
        write_trace(EVERYTHING, tmp_path / "t.csv")
    with pytest.raises(InputError, match="No such file"):
        write_trace(EVERYTHING, tmp_path / "absent" / "t.jsonl")


@pytest.mark.parametrize("cut", [1, 60, 200])
def test_a_cut_zstd_file_is_no_shorter_trace(tmp_path: Path, cut: int) -> None:
    out = tmp_path / "t.jsonl.zst"
    write_trace(made(*(request(str(n), arrival_s=float(n)) for n in range(5000))), out)
    out.write_bytes(out.read_bytes()[:-cut])
    with pytest.raises(BadTrace, match="cut off after line"):
        list(open_trace(out))


def test_frames_of_zstd_follow_each_other(tmp_path: Path) -> None:
    for n in (1, 2):
        write_trace(made(request(str(n), arrival_s=float(n)), sessions=False), tmp_path / f"{n}.jsonl.zst")
    whole = tmp_path / "both.jsonl.zst"
    whole.write_bytes(b"".join((tmp_path / f"{n}.jsonl.zst").read_bytes() for n in (1, 2)))
    with pytest.raises(BadTrace, match="line 3: id: Field required"):  # the second frame's header
        list(open_trace(whole))


def line(**changes: Any) -> dict[str, Any]:
    return {"id": "a", "input_length": 40, "output_length": 4, "arrival_s": 0.0, "blocks": [0, 1]} | changes


BEFORE = line(id="x", session="s")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (line(id="x"), "id: 'x' stands twice"),
        (line(parent="x", think_s=1.0), "parent: 'x' is no earlier request of session None"),
        (line(parent="y", think_s=1.0, session="s"), "parent: 'y' is no earlier request of session 's'"),
        (line(parent="x", think_s=1.0, session="t"), "parent: 'x' is no earlier request of session 't'"),
        (line(parent="a", think_s=1.0, session="s"), "parent: 'a' is no earlier"),
        (line(parent="x", session="s"), "think_s: belongs to"),
        (line(think_s=1.0), "think_s: belongs to"),
        (line(parent="x", session="s", think_s=-1.0), "think_s: Input should be greater"),
        (line(arrival_s=None), "arrival_s: missing"),
        (line(arrival_s=1.7e9), "arrival_s: 1700000000.0 looks like Unix time"),
        (line(arrival_s=-1), "arrival_s: "),
        (line(arrival_s="0"), "arrival_s: "),
        (line(arival_s=0), "arival_s: Unexpected keyword"),
        (line(blocks=[0]), "blocks: 1 ids for 40 tokens"),
        (line(blocks=[[0, 10**9]]), "blocks: more than the 3 ids"),
        (line(blocks=[[2**30 - 1, 2]]), "blocks: id 1073741824 is beyond 1073741823"),
        (line(blocks=[0, 1.0]), "blocks.1."),
        (line(blocks=[0, True]), "blocks.1."),
        (line(blocks=[0, -1]), "blocks.1."),
        (line(session="s", base="y", keep=1), "base: 'y' is not among"),
        (line(base="x", keep=1), "base: 'x' is not among"),
        (line(session="s", base="x", keep=3), "keep: 3 blocks of a context that has 2"),
        (line(keep=1), "keep: 1 blocks, but there is no base"),
        (line(output_blocks=[1, 2]), "output_blocks: more than the 1 ids"),
        (line(input_length=0, blocks=[]), "input_length: "),
    ],
)  # fmt: skip
def test_lines_that_contradict_themselves(tmp_path: Path, bad: dict[str, Any], says: str) -> None:
    path = write_lines(tmp_path / "t.jsonl", [HEADER, BEFORE, bad, line(id="z")])
    with pytest.raises(BadTrace) as caught:
        list(open_trace(path))
    assert str(caught.value).startswith(f"{path}, line 3: {says}")
    trace = open_trace(path, skip_bad=True)
    assert [r.id for r in trace] == ["x", "z"]
    assert trace.report.skipped == 1


@pytest.mark.parametrize(
    ("header", "rows", "says"),
    [
        (HEADER | {"hotprefix_trace": 2}, [], "line 1: hotprefix_trace: "),
        (HEADER | {"block_size": 0}, [], "line 1: block_size: "),
        (HEADER, [], "holds no request"),
        (HEADER | {"has_prefixes": False}, [line()], "line 2: blocks: given, but the header says"),
        (HEADER | {"has_sessions": False}, [BEFORE], "line 2: session: given, but the header says"),
    ],
)
def test_headers(tmp_path: Path, header: dict[str, Any], rows: list[Any], says: str) -> None:
    path = write_lines(tmp_path / "t.jsonl", [header, *rows])
    with pytest.raises(BadTrace, match=says):
        list(open_trace(path))


def test_a_block_size_that_was_asked_for(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [HEADER, BEFORE])
    assert open_trace(path, block_size=16).block_size == 16
    with pytest.raises(InputError, match="written with block size 16, but 32 was asked for"):
        open_trace(path, block_size=32)


def test_a_unit_of_time_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [HEADER, BEFORE])
    with pytest.raises(InputError, match="time_unit=ns: n is of format hotprefix"):
        open_trace(path, time_unit="ns")


def test_a_value_that_is_wrong_is_told(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [HEADER, line(priority="high")])
    with pytest.raises(BadTrace, match=r"line 2: priority: .*integer \('high' was given\); --skip-bad"):
        list(open_trace(path))
    path = write_lines(tmp_path / "h.jsonl", [HEADER | {"block_size": 1.5}, BEFORE])
    with pytest.raises(BadTrace, match=r"line 1: block_size: .*integer \(1.5 was given\)$"):
        open_trace(path, skip_bad=True)


def test_arrivals_without_sessions_are_sorted(tmp_path: Path) -> None:
    rows = [line(id="b", arrival_s=2), line(id="a", arrival_s=1), line(id="c", arrival_s=2)]
    path = write_lines(tmp_path / "t.jsonl", [HEADER | {"has_sessions": False}, *rows])
    assert [(r.id, r.arrival_s) for r in open_trace(path)] == [("a", 1.0), ("b", 2.0), ("c", 2.0)]
