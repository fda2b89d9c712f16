"""`hotprefix inspect`: figures, page, exit statuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hotprefix.errors import InputError
from hotprefix.records import schema as sc
from hotprefix.records.log_summary import PREFIXES, summarize
from hotprefix.records.recorder import Recorder, RecordOptions
from hotprefix.report.inspect import inspect_log
from tests.support.observed import WatchedDriver, program, run

KEY = b"0123456789abcdef0123456789abcdef"


def recorded(path: Path, seed: int = 0, length: int = 120) -> WatchedDriver:
    recorder = Recorder(RecordOptions(KEY, path), wall=lambda: 1_700_000_000.0)
    driver = run(program(seed, length), recorder)
    recorder.close()
    return driver


class Checker(HTMLParser):
    """Balanced tags; nothing loaded from anywhere."""

    EMPTY = frozenset({"meta", "br", "rect", "line", "circle", "polyline"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.labels: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert tag not in ("script", "img", "link", "iframe", "object"), tag
        assert not {"src", "srcset", "onload"} & set(values)
        if tag == "svg":
            assert values["role"] == "img"
            self.labels.append(str(values["aria-label"]))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.EMPTY

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_file_and_says_what_the_log_says(tmp_path: Path) -> None:
    driver = recorded(tmp_path / "log.jsonl")
    found = inspect_log(tmp_path / "log.jsonl", tmp_path / "out" / "report.html")
    html = (tmp_path / "out" / "report.html").read_text()
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    assert len(checker.labels) == len(set(checker.labels)) > 6
    assert not re.search(r"https?://|@import|url\(", html)
    assert "nan" not in html.lower().replace("tenant", "")
    group = found["groups"]["all"]
    assert group["requests"] == len(driver.finish)
    assert f"{driver.kernel.counters.lost_waiting_tokens:,}" in html
    for row in found["slowest"]:
        assert row["request"] in html
    for item in found["hottest"]:
        assert item["prefix"] in html
    assert json.loads(json.dumps(found)) == found


def test_an_empty_log_and_one_that_is_still_written_have_a_page(tmp_path: Path) -> None:
    recorder = Recorder(RecordOptions(KEY, tmp_path / "log.jsonl"))
    WatchedDriver(recorder)
    recorder.close()
    assert inspect_log(tmp_path / "log.jsonl", tmp_path / "a.html")["groups"]["all"]["requests"] == 0
    raw = (tmp_path / "log.jsonl").read_bytes()
    recorded(tmp_path / "full.jsonl")
    lines = (tmp_path / "full.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "log.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]) + lines[-1][:9])
    found = inspect_log(tmp_path / "log.jsonl", tmp_path / "a.html")
    assert found["read"]["torn"] == 1
    assert "cut line" in (tmp_path / "a.html").read_text()
    assert found["outcomes"]["open"] > 0
    assert raw


def test_a_place_where_no_page_can_be_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    recorded(log, length=30)
    before = log.read_bytes()
    for out, words in (
        (log, "the log itself"),
        (tmp_path, "Is a directory"),
        (log / "a.html", "File exists|Not a"),
    ):
        with pytest.raises(InputError, match=words):
            inspect_log(log, out)
    assert log.read_bytes() == before


def test_names_from_a_log_are_escaped(tmp_path: Path) -> None:
    """A log may come from anywhere."""
    evil = "<script>alert(1)</script>"
    rows: list[sc.Record] = [
        sc.Header(t=0.0, run="r", part=0, wall=1.0, hotprefix="0", model=evil, fingerprint="f", key="k",
                  page_size=4),
        sc.RequestInfo(t=1.0, request=evil, arrived=1.0, prompt_tokens=4, max_tokens=1, priority=0,
                       pages=[evil]),
        sc.Enqueue(t=1.0, request=evil, prompt_tokens=4, matched=0, parked=False),
        sc.FirstToken(t=2.0, request=evil),
        sc.End(t=3.0, request=evil, reason="stop", device=0, host=0, storage=0, computed=4, recomputed=0,
               outputs=1, retractions=0),
    ]  # fmt: skip
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(sc.values(row)) + "\n" for row in rows))
    inspect_log(path, tmp_path / "a.html")
    html = (tmp_path / "a.html").read_text()
    assert "<script" not in html
    Checker().feed(html)


def cli(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "from hotprefix.cli import main; main()",
        "inspect",
        *map(str, arguments),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_line(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    recorded(log, length=30)
    done = cli(log, "--out", tmp_path / "a.html", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["totals"]["runs"] == 1
    assert (tmp_path / "a.html").exists()
    with log.open("a") as file:
        file.write('{"k":"evict","t":1e9,"l1":"x"}\n')
    bad = cli(log, "--json")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert re.search(r"log\.jsonl, line \d+: l1: .*array", bad.stderr)
    assert bad.stderr.strip().count("\n") == 0
    skipped = cli(log, "--json", "--skip-bad")
    assert skipped.returncode == 0
    assert json.loads(skipped.stdout)["read"]["skipped"] == 1
    for arguments in ([tmp_path / "none.jsonl", "--json"], [log]):
        assert cli(*arguments).returncode == 2


def big_log(path: Path, requests: int) -> None:
    with path.open("w") as file:

        def write(record: sc.Record) -> None:
            file.write(json.dumps(sc.values(record)) + "\n")

        write(sc.Header(t=0.0, run="r", part=0, wall=1.0, hotprefix="0", model="m", fingerprint="f", key="k",
                        page_size=4))  # fmt: skip
        for n in range(requests):
            t, name = n * 0.1, f"r{n}"
            write(sc.RequestInfo(t=t, request=name, arrived=t, prompt_tokens=4, max_tokens=1, priority=0,
                                 pages=[name]))  # fmt: skip
            write(sc.Enqueue(t=t, request=name, prompt_tokens=4, matched=0, parked=False))
            write(sc.Admit(t=t, request=name, matched=0, matched_at_enqueue=0, restored_host=0,
                           restored_storage=0, cached=0, again=False))  # fmt: skip
            write(sc.FirstToken(t=t, request=name))
            write(sc.End(t=t, request=name, reason="stop", device=0, host=0, storage=0, computed=4,
                         recomputed=0, outputs=1, retractions=0))  # fmt: skip


@pytest.mark.slow
def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    peaks = []
    for requests in (15_000, 45_000):
        big_log(tmp_path / "log.jsonl", requests)
        tracemalloc.start()
        summary = summarize(tmp_path / "log.jsonl")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert summary.groups["all"].requests == requests
        assert len(summary.prefixes) <= 2 * PREFIXES
    assert peaks[1] < 1.2 * peaks[0] + 1_000_000
