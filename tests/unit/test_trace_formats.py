"""Readers of published formats: what they read from good lines, and their messages about bad ones."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from hotprefix.errors import ConfigError, InputError
from hotprefix.lab.trace.cc_sessions import Assumed, SessionStarts
from hotprefix.lab.trace.info import info
from hotprefix.lab.trace.open_trace import open_trace
from hotprefix.lab.trace.problems import (
    BadTrace,
    NoPrefixes,
    NoSessions,
    require_prefixes,
    require_sessions,
)
from hotprefix.records import schema as sc
from hotprefix.records.parts import open_part
from tests.support.traces import mooncake, row, session, write_lines

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def blocks_of(path: Path, **options: Any) -> list[list[int]]:
    return [request.blocks.tolist() for request in open_trace(path, **options)]


# -- Mooncake ------------------------------------------------------------------------------------------


def test_mooncake_rows_become_requests(tmp_path: Path) -> None:
    rows = [mooncake(timestamp=27000, hash_ids=[7, 9]), mooncake(timestamp=27500, hash_ids=[7, 10])]
    trace = open_trace(write_lines(tmp_path / "m.jsonl.gz", rows))
    assert (trace.name, trace.block_size, trace.has_prefixes, trace.has_sessions) == ("m", 512, True, False)
    first, second = trace
    assert (first.id, first.input_length, first.output_length) == ("1", 1000, 5)
    assert (first.blocks.dtype, first.blocks.tolist(), second.blocks.tolist()) == ("int32", [7, 9], [7, 10])
    assert (first.arrival_s, second.arrival_s) == (0.0, 0.5)
    assert [request.id for request in trace] == ["1", "2"], "it can be read again"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (mooncake(hash_ids=[0]), "hash_ids: 1 ids for 1000 tokens"),
        (mooncake(hash_ids=[0, 1, 2]), "hash_ids: 3 ids for 1000 tokens"),
        (mooncake(hash_ids=[3, 3]), "hash_ids: the same id stands twice"),
        (mooncake(hash_ids=[0, -1]), "hash_ids.1: "),
        (mooncake(hash_ids=[0, True]), "hash_ids.1: "),
        (mooncake(input_length=0, hash_ids=[]), "input_length: "),
        (mooncake(input_length=-5), "input_length: "),
        (mooncake(input_length=True), "input_length: "),
        (mooncake(input_length="1000"), "input_length: "),
        (mooncake(input_length=10**30), "input_length: "),
        (mooncake(output_length=-1), "output_length: "),
        (mooncake(output_length=1.5), "output_length: "),
        (mooncake(timestamp=-5), "timestamp: -5.0 is negative"),
        (mooncake(timestamp=True), "timestamp: "),
        (json.dumps(mooncake()).replace('"timestamp": 0', '"timestamp": NaN'), "timestamp: "),
        (mooncake(timestamp=10**40), "timestamp: "),
        (mooncake(timestamp=0.25), "timestamp: 0.25 has a fraction"),
        ({"timestamp": 1}, "input_length: Field required"),
        ("[]", "the line: "),
        ("{", "the line: Invalid JSON"),
        ("[" * 100000, "the line: "),
    ],
)
def test_a_bad_line_is_named_and_can_be_skipped(tmp_path: Path, line: Any, says: str) -> None:
    path = write_lines(tmp_path / "m.jsonl", [mooncake(), line, mooncake()])
    with pytest.raises(BadTrace) as caught:
        list(open_trace(path))
    assert str(caught.value).startswith(f"{path}, line 2: {says}")
    assert "--skip-bad" in str(caught.value)
    trace = open_trace(path, skip_bad=True)
    assert [request.id for request in trace] == ["1", "3"]
    assert trace.report.skipped == 1
    assert says in (trace.report.first_bad or "")
    list(trace)
    assert trace.report.skipped == 1, "a second reading counts anew"


def test_large_ids_are_numbered_anew_from_the_start_or_not_at_all(tmp_path: Path) -> None:
    rows = [mooncake(hash_ids=[2**63, 5]), mooncake(hash_ids=[2**63, 2**80])]
    assert blocks_of(write_lines(tmp_path / "m.jsonl", rows)) == [[0, 1], [0, 2]]
    rows = [mooncake(hash_ids=[2**30 - 1, 5]), mooncake(hash_ids=[2**30 - 1, 2**30])]
    path = write_lines(tmp_path / "m.jsonl", rows)
    with pytest.raises(BadTrace, match="line 2: hash_ids: 1073741824 is beyond 1073741823"):
        list(open_trace(path))
    assert blocks_of(path, skip_bad=True) == [[2**30 - 1, 5]]


def test_another_block_size_can_be_given(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "m.jsonl", [mooncake(hash_ids=[0, 1, 2, 3])])
    assert blocks_of(path, block_size=256) == [[0, 1, 2, 3]]
    with pytest.raises(BadTrace, match="1000 tokens, but blocks of 512 tokens make 2;"):
        list(open_trace(path))


# -- time ----------------------------------------------------------------------------------------------


def stamped(tmp_path: Path, *stamps: float, **options: Any) -> list[tuple[str, float | None]]:
    rows = [mooncake(timestamp=stamp) for stamp in stamps]
    return [(r.id, r.arrival_s) for r in open_trace(write_lines(tmp_path / "t.jsonl", rows), **options)]


def test_small_disorder_is_sorted_and_equal_times_keep_their_order(tmp_path: Path) -> None:
    assert stamped(tmp_path, 500, 0, 500, 250) == [("2", 0.0), ("4", 0.25), ("1", 0.5), ("3", 0.5)]
    trace = open_trace(tmp_path / "t.jsonl")
    list(trace)
    assert trace.report.reordered == 2


def test_great_disorder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match=r"request 1026: arrives 1.025 s before .* sort the file"):
        stamped(tmp_path, *range(1, 1026), 0)
    with pytest.raises(BadTrace, match="sort the file"):
        stamped(tmp_path, *range(1, 2000), 0)


def test_absolute_milliseconds_count_from_the_first(tmp_path: Path) -> None:
    assert stamped(tmp_path, 1_700_000_000_000, 1_700_000_000_001) == [("1", 0.0), ("2", 0.001)]


def test_seconds_where_milliseconds_are_declared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match=r"timestamp: 1700000000.0 would be Unix time in s.*--time-unit"):
        stamped(tmp_path, 1_700_000_000, 1_700_000_001)
    assert stamped(tmp_path, 1_700_000_000, 1_700_000_001, time_unit="s") == [("1", 0.0), ("2", 1.0)]
    assert stamped(tmp_path, 0.0, 0.5, time_unit="s") == [("1", 0.0), ("2", 0.5)]
    assert stamped(tmp_path, 1_700_000_000, 1_700_000_001, time_unit="ms") == [("1", 0.0), ("2", 0.001)]


# -- files ---------------------------------------------------------------------------------------------


def test_a_cut_gzip_is_an_error_with_skipping_too(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(json.dumps(mooncake(n=n)).encode() + b"\n" for n in range(2000)))
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadTrace, match=r"cut.jsonl.gz: cut off after line \d+"):
        list(open_trace(path, skip_bad=True))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b"hello\n", "no known format"),
        (b"\xff\xfe{}\n", "text in UTF-16"),
        (b"\x1f\x8bnonsense", "Unknown compression method|cut off"),
        (b"\x28\xb5\x2f\xfdnonsense", "zstd"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadTrace, match=says):
        open_trace(path)


def test_options_out_of_range(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "m.jsonl", [mooncake()])
    for options in ({"limit": 0}, {"block_size": -1}, {"format": "csv"}):
        with pytest.raises(InputError, match=next(iter(options))):
            open_trace(path, **options)
    with pytest.raises(BadTrace, match="No such file"):
        open_trace(tmp_path / "absent")
    with pytest.raises(BadTrace, match=r"a folder without trace_\*.json"):
        open_trace(tmp_path)
    with pytest.raises(InputError, match="sample:agents"):
        open_trace("sample:other")


def test_a_file_of_bad_lines_only(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "m.jsonl", [mooncake(input_length=0)])
    with pytest.raises(
        BadTrace, match=r"holds no request .1 bad lines were skipped, the first: .*input_length"
    ):
        list(open_trace(path, skip_bad=True))


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(json.dumps(mooncake()).encode() + b'\n{"hash_ids": "\xff"}\n')
    with pytest.raises(BadTrace, match="line 2: the line: Invalid JSON"):
        list(open_trace(path))


def test_limit_counts_requests(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "m.jsonl", [mooncake()] * 5)
    assert len(list(open_trace(path, limit=3))) == 3
    assert len(list(open_trace(path, limit=9))) == 5


# -- Azure ---------------------------------------------------------------------------------------------


def azure(tmp_path: Path, *lines: str, **options: Any) -> list[tuple[int, int, float | None]]:
    path = write_lines(tmp_path / "a.csv", [AZURE, *lines])
    return [(r.input_length, r.output_length, r.arrival_s) for r in open_trace(path, **options)]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_azure_has_seven_digits_and_no_zone(
    tmp_path: Path, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seventh digit counts, and a change of the local clock does not reorder requests (rule 62)."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    rows = ["2023-03-26 01:59:59.9999999,4808,10\r", "2023-03-26 03:00:00.0000001,3180,8\r"]
    assert azure(tmp_path, *rows) == [(4808, 10, 0.0), (3180, 8, 3600.0000002)]
    monkeypatch.undo()
    time.tzset()


def test_azure_offsets_are_obeyed(tmp_path: Path) -> None:
    rows = ["2024-05-10 02:00:00.5+02:00,1,0", "2024-05-10 00:00:01+00:00,2,0"]
    assert azure(tmp_path, *rows) == [(1, 0, 0.0), (2, 0, 0.5)]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("yesterday,1,1", "TIMESTAMP: 'yesterday' is no date"),
        ("2023-11-16 18:17:03.,1,1", "TIMESTAMP: .* has no fraction"),
        ("2023-11-16 18:17:03,0,1", "ContextTokens: '0'"),
        ("2023-11-16 18:17:03,1,-1", "GeneratedTokens: '-1'"),
        ("2023-11-16 18:17:03,NaN,1", "ContextTokens: 'NaN'"),
        ("2023-11-16 18:17:03,true,1", "ContextTokens: 'true'"),
        ("2023-11-16 18:17:03,1", "the line: 2 columns"),
    ],
)
def test_azure_faults(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(BadTrace, match=f"line 3: {says}"):
        azure(tmp_path, "2023-11-16 18:17:03,1,1", line)
    assert len(azure(tmp_path, "2023-11-16 18:17:03,1,1", line, skip_bad=True)) == 1


def test_prefix_experiments_refuse_lengths_without_prefixes(tmp_path: Path) -> None:
    trace = open_trace(write_lines(tmp_path / "a.csv", [AZURE, "2023-11-16 18:17:03,100,1"]))
    with pytest.raises(
        NoPrefixes, match=r"refresh-off-on needs prefixes, but trace 'a' records arrivals and"
    ):
        require_prefixes(trace, "refresh-off-on")
    with pytest.raises(NoSessions, match="closed loop needs sessions"):
        require_sessions(trace, "closed loop")
    found = info(trace)
    assert (found.block_size, found.ideal_reuse_share, found.input_tokens) == (None, None, 100)


# -- coding agents -------------------------------------------------------------------------------------


def test_keep_and_new_are_expanded(tmp_path: Path) -> None:
    rows = [row(tokens=300), row(5, tokens=450, parent=0, keep=3), row(9, tokens=330, parent=0, keep=4)]
    trace = open_trace(write_lines(tmp_path / "c.jsonl", [session(rows)]))
    assert [r.blocks.tolist() for r in trace] == [[0, 1, 2, 3], [0, 1, 2, 4, 5, 6, 7], [0, 1, 2, 3, 8]]
    assert (trace.block_size, trace.has_sessions) == (64, True)
    first, second, third = trace
    assert (first.parent, first.think_s, first.arrival_s) == (None, None, 0.0)
    assert (second.parent, second.think_s, second.arrival_s) == ("s/0", 3.0, 5.0)
    assert (third.parent, third.think_s, third.session, third.kind) == ("s/1", 2.0, "s", "user")


def test_options_that_contradict_the_file_are_refused(tmp_path: Path) -> None:
    sessions = write_lines(tmp_path / "c.jsonl", [session([row()])])
    assert open_trace(sessions, block_size=64).block_size == 64
    with pytest.raises(InputError, match="written with block size 64, but 32 was asked for"):
        open_trace(sessions, block_size=32)
    lengths = tmp_path / "a.csv"
    lengths.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,1\n")
    with pytest.raises(InputError, match="holds no blocks, but 32 was asked for"):
        open_trace(lengths, block_size=32)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(BadTrace, match="empty"):
        open_trace(tmp_path / "empty.jsonl", format="agents")


def test_sessions_share_tools_and_system_prompt_only_where_assumed(tmp_path: Path) -> None:
    lines = [session([row()]), session([row()], id="t"), session([row()], id="u", system_tokens=92)]
    path = write_lines(tmp_path / "c.jsonl", [*lines, session([row(model=1)], id="v")])
    assert blocks_of(path) == [[0, 1, 2, 3], [0, 1, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13]]
    apart = Assumed(shared_prefix=False)
    assert blocks_of(path, assumed=apart) == [[n, n + 1, n + 2, n + 3] for n in (0, 4, 8, 12)]
    notes = [" ".join(open_trace(path, assumed=a).provenance.notes) for a in (Assumed(), apart)]
    assert "shared between sessions with equal" in notes[0]
    assert "sessions share nothing" in notes[1]


def test_another_model_shares_nothing(tmp_path: Path) -> None:
    rows = [row(), row(5, parent=0, keep=3, model=1), row(9, parent=1, keep=4, model="n")]
    trace = open_trace(write_lines(tmp_path / "c.jsonl", [session(rows)]))
    assert [r.blocks.tolist() for r in trace] == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    assert [r.namespace for r in trace] == ["m", "n", "n"]


def test_who_waits_for_whom(tmp_path: Path) -> None:
    """A sub-agent starts after the main agent's latest request that had ended or, if none had, after its
    latest request."""
    rows = [
        row(0, api=2.0), row(5, api=10.0), row(6, 1, api=1.0), row(9, 1, api=None), row(20, 0), row(20.5, 2),
        row(21, 1), row(22, 2, api=1.0), row(22.5, 2),
    ]  # fmt: skip
    trace = open_trace(write_lines(tmp_path / "c.jsonl", [session(rows)]))
    parents = [r.parent and int(r.parent.partition("/")[2]) for r in trace]
    assert parents == [None, 0, 0, 2, 1, 1, 3, 5, 7]
    # row 3's service time was not recorded: the session's median, 2 s, stands in
    assert [r.think_s for r in trace] == [None, 3.0, 4.0, 2.0, 5.0, 5.5, 10.0, 0.0, 0.0]
    assert [r.think_s for r in trace][7] == 0.0, "an overlap is no negative think time"
    early = [row(0, 1), row(1, 0, api=9.0), row(2, 3)]
    trace = open_trace(write_lines(tmp_path / "d.jsonl", [session(early)]))
    assert [(r.parent, r.think_s) for r in trace] == [(None, None), (None, None), ("s/1", 0.0)]


def test_answers_are_found_in_the_prompt_that_goes_on(tmp_path: Path) -> None:
    rows = [
        row(tokens=200, out=100),
        row(5, tokens=400, parent=0, keep=3, out=100),
        row(9, tokens=448, parent=1, keep=5),
    ]
    path = write_lines(tmp_path / "c.jsonl", [session(rows)])
    assert [r.output_blocks for r in open_trace(path)] == [None] * 3
    found = [r.output_blocks for r in open_trace(path, assumed=Assumed(answers=True))]
    assert found[0] is not None
    assert found[0].tolist() == [3], "tokens 192 to 256 of the context, prompt's end and answer"
    assert found[1:] == [None, None], "row 2 changes row 1's last block, so it does not go on"
    prompts = [r.blocks.tolist() for r in open_trace(path, assumed=Assumed(answers=True))]
    assert prompts[0] == [0, 1, 2, 3], "block 3 is the prompt's partial one, and the answer completes it"


def test_the_last_token_of_an_answer_has_no_kv(tmp_path: Path) -> None:
    for out, blocks in ((64, None), (65, [3])):
        rows = [row(tokens=192, out=out), row(5, tokens=320, parent=0, keep=3)]
        first, _ = open_trace(
            write_lines(tmp_path / "c.jsonl", [session(rows)]), assumed=Assumed(answers=True)
        )
        assert first.blocks.tolist() == [0, 1, 2]
        found = first.output_blocks
        assert (None if found is None else found.tolist()) == blocks


def test_session_starts(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", [session([row(), row(7)], id=str(n)) for n in range(400)])

    def arrivals(**options: Any) -> list[float]:
        return [r.arrival_s or 0.0 for r in open_trace(path, sessions=SessionStarts(**options))]

    assert arrivals()[:4] == [0.0, 7.0, 0.0, 7.0]
    starts = arrivals(rate=0.5, seed=3)[::2]
    assert starts == sorted(starts)
    assert starts[0] == 0.0
    assert 1.7 < starts[-1] / 399 < 2.3, "two seconds on average"
    assert arrivals(rate=0.5, seed=3)[::2] == starts != arrivals(rate=0.5, seed=4)[::2]
    with pytest.raises(ConfigError, match=r"rate=0\.0"):
        SessionStarts(rate=0.0)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([session([row(new=3)])], "rows.0: keep . new = 3 blocks for 256 tokens"),
        ([session([row(), row(parent=0, keep=5, new=-1)])], "rows.1.new"),
        (
            [session([row(), row(tokens=320, parent=0, keep=5)])],
            "rows.1.keep: 5 blocks of a prompt that has 4",
        ),
        ([session([row(parent=0)])], "rows.0.parent: 0 is not an earlier row"),
        ([session([row(parent=-2)])], "rows.0.parent: -2 is not an earlier row"),
        ([session([row(5), row(4)])], "rows.1.t: time goes back from 5.0 to 4.0"),
        ([session([row(model=2)])], "rows: model 2 is not among"),
        ([session([row(tokens=0)])], "rows.0.in: "),
        ([session([row(out=-1)])], "rows.0.out: "),
        ([session([row()], cols=["t"])], "cols: "),
        ([session([row()]), session([row()])], "id: session 's' stands twice"),
        ([session([row()]), session([row()], id="t", block_size=32)], "block_size: 32, but 64"),
    ],
)
def test_sessions_that_contradict_themselves(tmp_path: Path, lines: list[Any], says: str) -> None:
    path = write_lines(tmp_path / "c.jsonl", lines)
    with pytest.raises(BadTrace, match=f"line {len(lines)}: {says}"):
        list(open_trace(path))


# -- our own event log ---------------------------------------------------------------------------------


def header(run: str = "a", wall: float = 1000.0) -> sc.Header:
    return sc.Header(
        t=5.0, run=run, part=0, wall=wall, hotprefix="0", model="m", fingerprint="f", key="k", page_size=4
    )


def asked(t: float, name: str, tokens: int, *pages: str) -> sc.RequestInfo:
    return sc.RequestInfo(
        t=t, request=name, arrived=t, prompt_tokens=tokens, max_tokens=9, priority=1, pages=list(pages)
    )


def ended(t: float, name: str, outputs: int) -> sc.End:
    return sc.End(t=t, request=name, reason="stop", outputs=outputs, retractions=0)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_event_log_is_a_trace(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"log{suffix}"
    part = open_part(path, header())
    part.write(
        [asked(6.0, "x", 9, "p", "q"), asked(7.0, "y", 6, "p"), ended(8.0, "y", 3), ended(9.5, "x", 2)]
    )
    part.write([asked(10.0, "z", 3)])
    part.close()
    trace = open_trace(path)
    assert (trace.block_size, trace.has_sessions) == (4, False)
    found = [(r.id, r.input_length, r.output_length, r.blocks.tolist(), r.arrival_s) for r in trace]
    assert found == [("x", 9, 2, [0, 1], 0.0), ("y", 6, 3, [0], 1.0), ("z", 3, 0, [], 4.0)]
    assert {r.priority for r in trace} == {1}


def test_a_log_of_two_runs_goes_on_in_wall_time(tmp_path: Path) -> None:
    for number, (run, wall) in enumerate([("a", 1000.0), ("b" * 32, 1060.0)]):
        part = open_part(tmp_path / f"log{'' if not number else '.00001'}.jsonl", header(run, wall))
        part.write([asked(6.0, "x", 9, "p", "q")])
        part.close()
    found = [(r.id, r.arrival_s) for r in open_trace(tmp_path / "log.jsonl")]
    assert found == [("x", 0.0), ("bbbbbbbb/x", 60.0)]


def test_a_log_whose_pages_do_not_fit(tmp_path: Path) -> None:
    part = open_part(tmp_path / "log.jsonl", header())
    part.write([asked(6.0, "x", 9, "p")])
    part.close()
    with pytest.raises(BadTrace, match="request x: pages: 1 ids for 9 tokens"):
        list(open_trace(tmp_path / "log.jsonl"))
