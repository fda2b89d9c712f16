"""The event log: complete, private, bounded, readable after a crash."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hotprefix.engine.config import EngineConfig
from hotprefix.errors import ConfigError, InputError
from hotprefix.kernel import events as ev
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.request import Namespace
from hotprefix.records import schema as sc
from hotprefix.records.event_log import EventLog
from hotprefix.records.fingerprint import Fingerprinter, load_key
from hotprefix.records.of_event import OF_EVENT, of_event
from hotprefix.records.open_recorder import open_recorder
from hotprefix.records.parts import parts_of
from hotprefix.records.read_log import BadLine, ReadReport, read_log
from hotprefix.records.recorder import Recorder, RecordOptions
from tests.support.observed import WatchedDriver, program, run

KEY = b"0123456789abcdef0123456789abcdef"
HEADER = sc.Header(
    t=5.0, run="a", part=0, wall=1000.0, hotprefix="0", model="m", fingerprint="f", key="k", page_size=4
)


def recorded(path: Path, seed: int = 3, **options: Any) -> tuple[WatchedDriver, list[ev.Event]]:
    """A random program's log, and the events it was made of."""
    seen: list[ev.Event] = []

    class Both(Recorder):
        def event(self, event: ev.Event) -> None:
            seen.append(event)
            super().event(event)

    recorder = Both(RecordOptions(KEY, path, **options))
    driver = run(program(seed), recorder)
    recorder.close()
    return driver, seen


def read(path: Path, **options: Any) -> list[sc.Record]:
    return list(read_log(path, ReadReport(), **options))


def test_every_kind_of_event_has_a_record() -> None:
    classes = {c for c in vars(ev).values() if isinstance(c, type) and issubclass(c, ev.Event)}
    assert classes - {ev.Event} == set(OF_EVENT)
    for kind in sc.KINDS:
        assert "k" in kind.__annotations__, kind


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_log_says_what_happened_in_order(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"log{suffix}"
    driver, seen = recorded(path)
    records = read(path)
    assert isinstance(records[0], sc.Header)
    assert records[0].config["total_pages"] == driver.config.total_pages
    beside = (sc.Header, sc.RequestInfo, sc.End)
    told = [of_event(e) for e in seen]
    assert [r for r in records if not isinstance(r, beside)] == [r for r in told if not isinstance(r, beside)]
    count = Counter(type(r) for r in records)
    assert count[sc.RequestInfo] == count[sc.Enqueue] + count[sc.Reject]
    assert count[sc.Enqueue] == len(driver.prompts)
    ends = {r.request: r for r in records if isinstance(r, sc.End)}
    assert len(ends) == count[sc.End] == len(driver.finish)
    assert [dataclasses.replace(ends[r.request], answer=None) for r in told if isinstance(r, sc.End)] == [
        r for r in told if isinstance(r, sc.End)
    ]
    times = [r.t for r in records]
    assert times == sorted(times)


def test_both_formats_hold_the_same_records(tmp_path: Path) -> None:
    recorded(tmp_path / "a.jsonl")
    recorded(tmp_path / "a.parquet")
    lines, columns = read(tmp_path / "a.jsonl"), read(tmp_path / "a.parquet")
    assert lines[1:] == columns[1:]
    first, second = lines[0], columns[0]
    assert dataclasses.replace(first, run="", wall=0.0) == dataclasses.replace(second, run="", wall=0.0)  # type: ignore[call-arg]


def test_neither_tokens_nor_key_are_in_the_log(tmp_path: Path) -> None:
    """The prompt's ids appear in no form in which they could be looked for."""
    secret = [1_900_000_000 + 7919 * i for i in range(40)]
    recorder = Recorder(RecordOptions(KEY, tmp_path / "log.jsonl"))
    driver = WatchedDriver(recorder, page_size=4)
    request = _request(secret)  # the fake model cannot run such ids, so they are only submitted
    recorder.submitted(request, driver.now, driver.now)
    driver.kernel.submit(request, driver.now)
    progress = driver.kernel.abort("secret", driver.now)
    assert progress is not None
    recorder.ended(progress._replace(said=tk.encode(secret)), driver.now)
    recorder.close()
    assert any(isinstance(r, sc.End) and r.answer for r in read(tmp_path / "log.jsonl"))
    raw = (tmp_path / "log.jsonl").read_bytes()
    assert b"secret" in raw, "the request is there"
    for token in secret:
        assert str(token).encode() not in raw
        assert token.to_bytes(4, "little") not in raw
        assert token.to_bytes(4, "little").hex().encode() not in raw
    assert b"alice" not in raw, "a session's name is the client's"
    assert KEY not in raw
    assert KEY.hex().encode() not in raw
    allowed = {f.name for kind in sc.KINDS for f in dataclasses.fields(kind)}
    for line in raw.splitlines():
        assert set(json.loads(line)) <= allowed


def _request(tokens: list[int]) -> Any:
    from hotprefix.kernel.request import Request

    return Request("secret", tk.encode(tokens), 4, session="chat of alice")


def test_fingerprints_show_sharing_and_need_the_key() -> None:
    mine, other = Fingerprinter(KEY, 4), Fingerprinter(bytes(32), 4)
    a, b = tk.encode(range(20)), tk.encode([*range(8), 99, *range(9, 20)])
    one, two = mine.pages(Namespace(), a), mine.pages(Namespace(), b)
    assert len(one) == 5
    assert all(len(name) == 16 for name in one)
    assert (one[:2], set(one[2:]) & set(two[2:])) == (two[:2], set()), "chained: one page changes all later"
    assert not set(one) & set(mine.pages(Namespace(salt="t"), a)), "tenants share nothing"
    assert not set(one) & set(other.pages(Namespace(), a)), "another key gives other names"
    assert mine.pages(Namespace(), a[:-4])[:4] == one[:4]
    assert len(mine.pages(Namespace(), a[:-4])) == 4, "only whole pages"
    assert mine.pages(Namespace(), a, most=2) == one[:2]
    assert mine.key_name != other.key_name


def test_a_key_file_that_is_no_good_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no\\.key"):
        load_key(tmp_path / "no.key")
    short = tmp_path / "short.key"
    short.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="5 bytes"):
        load_key(short)
    short.write_bytes(KEY + b"\n")
    assert load_key(short) == KEY
    assert load_key(None) != load_key(None)


# -- the writer -----------------------------------------------------------------------------------


def step(t: float, number: int = 0) -> sc.Step:
    return sc.Step(
        t=t, step=number, ok=True, prefill_tokens=1, decode_tokens=0, running=1, waiting=0, free=1,
        evictable=0, protected=0,
    )  # fmt: skip


def test_a_log_rotates_by_size_and_parts_are_one_log(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log.jsonl", HEADER, part_bytes=2000)
    for number in range(100):
        log.put(step(6.0 + number, number))
        if number % 10 == 9:
            wait_for(lambda n=number: log.written == n + 1)
    log.close()
    parts = parts_of(tmp_path / "log.jsonl")
    assert len(parts) > 3
    assert [p.name for p in parts[:2]] == ["log.jsonl", "log.00001.jsonl"]
    records = read(tmp_path / "log.jsonl")
    headers = [r for r in records if isinstance(r, sc.Header)]
    assert [h.part for h in headers] == list(range(len(parts)))
    assert [r.step for r in records if isinstance(r, sc.Step)] == list(range(100))


def wait_for(done: Any) -> None:
    for _ in range(20_000):
        if done():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it did not happen")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_log_that_exists_is_continued_beside_it(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"log{suffix}"
    for run_name in ("a", "b", "c"):
        log = EventLog(path, dataclasses.replace(HEADER, run=run_name))
        log.put(step(6.0))
        log.close()
    records = read(path)
    assert [r.run for r in records if isinstance(r, sc.Header)] == ["a", "b", "c"]
    assert len(records) == 6


def test_a_full_queue_drops_counts_and_says_where(tmp_path: Path) -> None:
    release, log = threading.Event(), EventLog(tmp_path / "log.jsonl", HEADER, queue=4)

    def slow() -> sc.Record:
        release.wait(60)
        return step(6.0)

    log.put(slow)
    log._wake.set()
    wait_for(lambda: not log._items)  # the thread holds the slow one now
    for number in range(10):
        log.put(ev.Evicted(7.0, tuple(range(number))))
    assert log.dropped == 6
    release.set()
    wait_for(lambda: log.written >= 5)
    log.put(ev.Evicted(8.0, (1,)))
    log.close()
    records = read(tmp_path / "log.jsonl")
    assert [type(r).__name__ for r in records] == ["Header", "Step", *["Evict"] * 4, "Dropped", "Evict"]
    assert records[-2] == sc.Dropped(t=8.0, count=6)


def test_a_disk_that_fails_ends_the_log_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "log.jsonl", HEADER)

    def full(records: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log._part, "write", full)
    log.put(step(6.0))
    wait_for(lambda: log.failed is not None)
    log.put(step(7.0))
    log.close()
    assert log.dropped == 1
    assert "No space" in str(log.failed)


def test_a_log_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.jsonl or \.parquet"):
        EventLog(tmp_path / "log.txt", HEADER)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="events file"):
        EventLog(tmp_path / "file" / "log.jsonl", HEADER)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("log.txt", "give a name that ends with"),
        ("file/log.jsonl", "cannot write there: .*; give a file in a folder that can be written"),
        ("file/deeper/log.parquet", "cannot write there: "),
        ("shut/log.jsonl", "cannot write there: "),
        ("shut/deeper/log.jsonl", "cannot write there: "),
    ],
)
def test_a_bad_place_is_found_before_a_model_is_looked_for(tmp_path: Path, name: str, words: str) -> None:
    from hotprefix.server.serve import build

    (tmp_path / "file").write_text("")
    (tmp_path / "shut").mkdir(0o500)
    if name.startswith("shut") and os.access(tmp_path / "shut", os.W_OK):
        pytest.skip("this user may write everywhere")
    path = str(tmp_path / name)
    with pytest.raises(ConfigError, match=f"events={path!r}: {words}") as caught:
        build(EngineConfig(model="no/such/model", events=path), lambda line: None)
    assert caught.value.param == "events"


def test_a_parquet_log_without_its_package_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match="pip install"):
        open_recorder(EngineConfig(events=str(tmp_path / "log.parquet")))


def test_the_folder_is_made_and_nothing_left_in_it(tmp_path: Path) -> None:
    open_recorder(EngineConfig(events=str(tmp_path / "new" / "log.jsonl")))
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]
    assert list((tmp_path / "new").iterdir()) == []


# -- damaged logs ---------------------------------------------------------------------------------


def test_a_torn_tail_is_read_up_to_it(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    recorded(path)
    whole = path.read_bytes()
    complete = read(path)
    for cut in (1, 7, len(whole.splitlines()[-1]) - 1):
        path.write_bytes(whole[:-cut])
        report = ReadReport()
        assert list(read_log(path, report)) == complete[:-1]
        assert (report.torn, report.skipped) == (1, 0)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{}", "k: missing, so this is no record of an event log"),
        ("not json", "Invalid JSON"),
        ('{"k":"nope","t":9}', "does not match any of the expected tags"),
        ('{"k":"evict","t":9,"l1":"many"}', "l1: Input should be a valid array"),
        ('{"k":"evict","t":9}', "l1: Field required"),
        ('{"k":"evict","t":5.5,"l1":[1]}', "t: time goes back from 6.0 to 5.5"),
        (
            '{"k":"request","t":6.5,"request":"a","arrived":7,"prompt_tokens":1,"max_tokens":1,"priority":0,'
            '"pages":[]}',
            "arrived: 7.0 is later than the record itself, 6.5",
        ),
        ("[" * 100_000, "Invalid JSON"),
        ("\x00\xff", "Invalid JSON"),
    ],
)
def test_a_bad_line_is_named_or_skipped(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "log.jsonl"
    good = [json.dumps(sc.values(r)) for r in (HEADER, step(6.0), step(7.0))]
    raw = "\n".join([good[0], good[1], line, good[2], ""]).encode("latin-1")
    path.write_bytes(raw)
    with pytest.raises(BadLine) as caught:
        read(path)
    message = str(caught.value)
    assert "log.jsonl, line 3: " in message
    assert reason in message
    report = ReadReport()
    assert len(list(read_log(path, report, skip_bad=True))) == 3
    assert (report.skipped, report.torn) == (1, 0)
    assert reason in str(report.first_bad)


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such log"):
        read(tmp_path / "log.jsonl")
    with pytest.raises(InputError, match="ends with"):
        read(tmp_path / "log.csv")
    (tmp_path / "log.jsonl").write_text(json.dumps(sc.values(step(1.0))) + "\n")
    with pytest.raises(BadLine, match="no header"):
        read(tmp_path / "log.jsonl")
    (tmp_path / "log.parquet").write_text("PAR1 not really")
    with pytest.raises(InputError, match=r"log\.parquet"):
        read(tmp_path / "log.parquet")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no record"),
        (b"\x00" * 300, "holds no record, only the beginning of one"),
        (json.dumps(sc.values(HEADER)).encode()[:100], "holds no record, only the beginning of one"),
        (
            b"INFO started\nINFO done\n",
            "no line is a record of an event log; the first: .*line 1: .*Invalid JSON",
        ),
    ],
)
def test_a_file_without_any_record_is_no_quiet_log(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        list(read_log(path, ReadReport(), skip_bad=True))


def test_a_log_of_another_schema_says_which_one(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for version in (1, 99):
        path.write_text(json.dumps({**sc.values(HEADER), "schema": version}) + "\n")
        with pytest.raises(
            BadLine, match=f"the log has version {version}; this hotprefix reads 2: read it with"
        ):
            read(path)


def test_a_reader_ignores_fields_it_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rows = [sc.values(HEADER), {**sc.values(step(6.0)), "new": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(path)[1] == step(6.0)


def test_reading_holds_no_more_than_a_line(tmp_path: Path) -> None:
    """The reader is an iterator over the file: it has not read the end when the start comes out."""
    path = tmp_path / "log.jsonl"
    with path.open("w") as file:
        file.write(json.dumps(sc.values(HEADER)) + "\n")
        for number in range(20_000):
            file.write(json.dumps(sc.values(step(6.0 + number))) + "\n")
    records = read_log(path, report := ReadReport())
    next(records)
    next(records)
    assert report.records == 2
    os.truncate(path, path.stat().st_size // 2)
    assert sum(1 for _ in records) < 12_000
