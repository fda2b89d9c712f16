"""Lines of a trace file. Owns: opening plain, gzip and zstd files, and handing each line to a format.

Rules: the first bytes tell the compression, not the name. A line is held at a time, none longer than
MAX_LINE. A file that ends inside its compression is an error, with or without skipping: what is missing
cannot be counted.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import zstandard

from hotprefix.lab.trace.problems import BadTrace, Report
from hotprefix.lab.trace.record import TraceRequest

MAX_LINE = 256 * 2**20
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class Importer(Protocol):
    """A format's reader; one for each reading. Raises ValueError for a line that is no request, its message
    "field: reason"."""

    def take(self, line: int, raw: bytes) -> Sequence[TraceRequest]: ...


def read_requests(path: Path, importer: Importer, report: Report) -> Iterator[TraceRequest]:
    """All requests of a file, line after line. Raises BadTrace, also where there is not a single one."""
    found = False
    for number, raw in lines(path):
        try:
            requests = importer.take(number, raw)
        except (ValueError, RecursionError) as error:
            report.bad(path, number, error)
            continue
        for request in requests:
            found = True
            yield request
    if not found:
        left = f" ({report.skipped} bad lines were skipped, the first: {report.first_bad})"
        raise BadTrace(f"{path}: holds no request{left if report.skipped else ''}", param="trace")


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Line number from 1, and the line; blank ones are left out. Raises BadTrace: no such file, cut, not
    what its first bytes say, or a line beyond MAX_LINE."""
    number = 0
    try:
        with _open(path) as file:
            while line := file.readline(MAX_LINE + 1):
                number += 1
                if len(line) > MAX_LINE:
                    raise BadTrace(f"{path}, line {number}: longer than {MAX_LINE} bytes", param="trace")
                if line.strip():
                    yield number, line
    except EOFError:
        raise BadTrace(f"{path}: cut off after line {number}; fetch it again", param="trace") from None
    except (OSError, zlib.error, zstandard.ZstdError) as error:
        raise BadTrace(f"{path}, after line {number}: {error}", param="trace") from error


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
    """Decompressed bytes of all frames. The library's own reader takes a cut frame for the end of the
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
