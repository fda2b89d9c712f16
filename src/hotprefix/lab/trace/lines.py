"""Lines of a trace file. Owns: opening plain, gzip and zstd files and folders of files, and passing each line
to a format's importer.

Rules:
1. The compression is recognised by the first bytes, not by the file's name. A file that cannot hold lines of
   a trace (an archive, another compression or encoding) is an error that says what the file is and what to
   do.
2. One line is held at a time, of at most MAX_LINE bytes. A byte order mark, which some editors put first, is
   removed.
3. A file that ends inside its compression is an error even if bad lines are skipped, because the missing
   lines cannot be counted.
4. A folder is read as its FILES, by name.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol, cast

import zstandard

from hotprefix.lab.trace.problems import BadTrace, Report
from hotprefix.lab.trace.trace_request import TraceRequest

MAX_LINE = 256 * 2**20
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
BOM: Final = b"\xef\xbb\xbf"
FILES: Final = "trace_*.json"
_FOREIGN: Final = (
    (b"PK\x03\x04", "a zip archive: unpack it and give one of its files"),
    (b"7z\xbc\xaf", "a 7z archive: unpack it and give one of its files"),
    (b"\xfd7zXZ", "compressed with xz: decompress it (xz -d), or compress it with gzip or zstd"),
    (b"BZh", "compressed with bzip2: decompress it (bzip2 -d), or compress it with gzip or zstd"),
    (b"\xff\xfe", "text in UTF-16: write it as UTF-8"),
    (b"\xfe\xff", "text in UTF-16: write it as UTF-8"),
    (b"version https://git-lfs", "a pointer of Git LFS and not the file: fetch that (git lfs pull)"),
)
_TAR_AT: Final = 257


class Importer(Protocol):
    """A format's reader; each reading makes a new one. Raises ValueError for a line that is no request, with
    a message of the form "field: reason"."""

    def take(self, line: int, raw: bytes) -> Sequence[TraceRequest]: ...


def read_requests(path: Path, importer: Importer, report: Report) -> Iterator[TraceRequest]:
    """All requests of a file, line after line. Raises BadTrace, also if there is not a single request."""
    found = False
    for file in files_of(path):
        for number, raw in lines(file):
            try:
                requests = importer.take(number, raw)
            except (ValueError, RecursionError) as error:
                report.bad(file, number, error)
                continue
            for request in requests:
                found = True
                yield request
    if not found:
        left = f" ({report.skipped} bad lines were skipped, the first: {report.first_bad})"
        raise BadTrace(f"{path}: holds no request{left if report.skipped else ''}", param="trace")


def files_of(path: Path) -> list[Path]:
    """The file itself, or a folder's FILES by name. Raises BadTrace if a folder has none."""
    if not path.is_dir():
        return [path]
    found = sorted(path.glob(FILES))
    if not found:
        raise BadTrace(f"{path}: a folder without {FILES}; give a file, or a folder of such", param="trace")
    return found


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each line with its number, from 1; blank lines are left out. Raises BadTrace if there is no such file,
    if it is cut off, is not what its first bytes say or holds no lines of a trace, or if a line is longer
    than MAX_LINE."""
    with _reading(path) as place:
        while line := place.file.readline(MAX_LINE + 1):
            place.line += 1
            if len(line) > MAX_LINE:
                raise BadTrace(f"{path}, line {place.line}: longer than {MAX_LINE} bytes", param="trace")
            line = line.removeprefix(BOM)
            if place.line == 1:
                _refuse_foreign(path, line)
            if line.strip():
                yield place.line, line


def whole_content(path: Path) -> Iterator[bytes]:
    """The uncompressed content in pieces. Raises BadTrace if there is no such file, or if it is cut off or is
    not what its first bytes say."""
    with _reading(path) as place:
        while piece := place.file.read(2**20):
            yield piece


@dataclass(slots=True)
class _Place:
    file: BinaryIO
    line: int = 0


@contextmanager
def _reading(path: Path) -> Iterator[_Place]:
    """The open file, and the place that the reader has reached. Raises BadTrace for errors while it is
    read."""
    place: _Place | None = None
    try:
        with _open(path) as file:
            place = _Place(file)
            yield place
    except EOFError:
        number = place.line if place is not None else 0
        raise BadTrace(f"{path}: cut off after line {number}; fetch it again", param="trace") from None
    except (OSError, zlib.error, zstandard.ZstdError) as error:
        number = place.line if place is not None else 0
        raise BadTrace(f"{path}, after line {number}: {error}", param="trace") from error


def _refuse_foreign(path: Path, line: bytes) -> None:
    """Raises BadTrace if the first line shows that the file holds no lines: it begins with the mark of an
    archive or encoding, or has that of a tar in its first header."""
    for mark, what in _FOREIGN:
        if line.startswith(mark):
            raise BadTrace(f"{path}: {what}", param="trace")
    if line[_TAR_AT : _TAR_AT + 5] == b"ustar":
        name = line[:100].rstrip(b"\0").split(b"\0")[0].decode(errors="replace")
        raise BadTrace(
            f"{path}: a tar archive, its first member is {name!r}: unpack it (tar -xf {path.name}) and give "
            "one of its files",
            param="trace",
        )


def first_bytes(path: Path, count: int) -> bytes:
    """The file's first bytes, as stored. Raises BadTrace."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror or error}", param="trace") from None


def _open(path: Path) -> BinaryIO:
    start = first_bytes(path, 4)
    if start.startswith(GZIP):
        return cast(BinaryIO, gzip.open(path, "rb"))
    if start.startswith(ZSTD):
        return io.BufferedReader(_Zstd(path), 2**20)
    return path.open("rb")


class _Zstd(io.RawIOBase):
    """The decompressed bytes of all frames. The library's own reader takes a cut-off frame for the end of the
    file, so the frames are followed here."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            raw = self._frame.unused_data if self._frame.eof else b""
            raw = raw or self._file.read(2**16)
            if not raw:
                if not self._frame.eof:
                    raise EOFError
                return 0
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready = self._frame.decompress(raw)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
