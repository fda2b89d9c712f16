"""Files that hold no lines of a trace are named for what they are; in files that hold them in an unusual
form, no request is lost."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from pathlib import Path

import pytest
import zstandard

from hotprefix.lab.trace.open_trace import open_trace
from hotprefix.lab.trace.problems import BadTrace
from tests.support.traces import mooncake, session, write_lines

BOM = b"\xef\xbb\xbf"
LINES = b"".join(json.dumps(mooncake(timestamp=n, hash_ids=[n, n + 9])).encode() + b"\n" for n in range(3))
AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,4808,10\n"


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("wrap", [bytes, gzip.compress, zstandard.compress])
def test_a_byte_order_mark_loses_no_request(tmp_path: Path, skip_bad: bool, wrap: object) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(wrap(BOM + LINES + BOM + LINES))  # type: ignore[operator]
    trace = open_trace(path, skip_bad=skip_bad)
    assert len(list(trace)) == 6, "two such files may have been put together"
    assert trace.report.skipped == 0


def test_every_format_takes_a_byte_order_mark(tmp_path: Path) -> None:
    own = b'{"hotprefix_trace":1,"block_size":64,"name":"t","has_prefixes":false,"has_sessions":false}\n'
    own += b'{"id":"a","input_length":5,"output_length":1,"arrival_s":0.0}\n'
    sessions = write_lines(tmp_path / "s", [session([[0.0, 0, 64, 1, -1, 0, 1, 0, 1, None, "u", None, 0]])])
    for content in (own, AZURE, sessions.read_bytes(), LINES):
        path = tmp_path / "t"
        path.write_bytes(BOM + content)
        assert len(list(open_trace(path))) == len(list(open_trace(_plain(tmp_path, content))))


def _plain(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "plain"
    path.write_bytes(content)
    return path


def tar(mode: str) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode=mode) as archive:  # type: ignore[call-overload]
        info = tarfile.TarInfo("data/trace.jsonl")
        info.size = len(LINES)
        archive.addfile(info, io.BytesIO(LINES))
    return held.getvalue()


def zipped() -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("trace.jsonl", LINES)
    return held.getvalue()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            tar("w"),
            r"a tar archive, its first member is 'data/trace.jsonl': unpack it \(tar -xf t\) and give one",
        ),
        (tar("w:gz"), "a tar archive, its first member is 'data/trace.jsonl'"),
        (zipped(), "a zip archive: unpack it"),
        (bz2.compress(LINES), "compressed with bzip2: decompress it"),
        (lzma.compress(LINES), "compressed with xz: decompress it"),
        (LINES.decode().encode("utf-16"), "text in UTF-16: write it as UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:41ac\n", "a pointer of Git LFS"),
    ],
)
@pytest.mark.parametrize("format", ["auto", "mooncake", "agents", "hotprefix"])
def test_what_is_no_trace_is_told_by_its_name(tmp_path: Path, content: bytes, says: str, format: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(BadTrace, match=rf"^{path}: {says}"):
        list(open_trace(path, format=format, skip_bad=True))
