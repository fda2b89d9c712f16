"""Writing our own format. Owns: `write_trace`, `whole_file`, `check_suffix`, `check_name`.

Rules: the file appears whole or not at all. It is written in the same folder under a temporary name and
renamed; if there is an error or an interrupt, the temporary file is removed.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

from hotprefix.errors import InputError
from hotprefix.lab.trace.canonical import VERSION, Recent, best_base, to_runs
from hotprefix.lab.trace.line_fields import MAX_SECONDS
from hotprefix.lab.trace.trace_request import Trace, TraceRequest

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_PLAIN = (
    "arrival_s", "session", "parent", "think_s", "kind", "tools", "namespace", "priority", "hold_s",
)  # fmt: skip


def write_trace(trace: Trace, path: Path) -> int:
    """Write a trace to .jsonl, .jsonl.gz or .jsonl.zst; returns the number of requests. Equal traces give
    equal bytes. Raises InputError for the path's name or folder, and whatever reading raises."""
    check_suffix(path)
    count, recent = 0, Recent()
    with whole_file(path) as file:
        file.write(_line(_header(trace)))
        for request in trace:
            file.write(_line(_request(request, recent, trace.block_size)))
            count += 1
    return count


def _header(trace: Trace) -> dict[str, Any]:
    return {
        "hotprefix_trace": VERSION,
        "block_size": trace.block_size,
        "name": trace.name,
        "has_prefixes": trace.has_prefixes,
        "has_sessions": trace.has_sessions,
        "source": trace.provenance.source,
        "notes": trace.provenance.notes,
    }


def _request(request: TraceRequest, recent: Recent, block_size: int) -> dict[str, Any]:
    written: dict[str, Any] = {
        "id": request.id,
        "input_length": request.input_length,
        "output_length": request.output_length,
    }
    written |= {name: value for name in _PLAIN if (value := getattr(request, name)) not in (None, "", 0)}
    for name in ("arrival_s", "think_s"):
        seconds = getattr(request, name)
        if seconds is not None:
            if seconds > MAX_SECONDS:
                raise InputError(
                    f"request {request.id}: {name}={seconds:g}; a trace holds at most {MAX_SECONDS:g} seconds"
                )
            written[name] = seconds
    base, keep = best_base(request.blocks, recent.of(request.session))
    if base is not None:
        written |= {"base": base, "keep": keep}
    if len(request.blocks) > keep:
        written["blocks"] = list(to_runs(request.blocks[keep:]))
    if request.output_blocks is not None:
        written["output_blocks"] = list(to_runs(request.output_blocks))
    recent.add(request, block_size)
    return written


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def check_suffix(path: Path) -> None:
    """Raises InputError if the name does not end as one of the formats does."""
    if not path.name.endswith(SUFFIXES):
        raise InputError(f"{path}: give a name that ends with {', '.join(SUFFIXES)}", param="out")


def check_name(path: Path) -> None:
    """Raises InputError if a rename onto this name would replace something that is no file: a folder, a pipe,
    a device."""
    if path.is_dir():
        raise InputError(f"{path}: a folder; give the file to write", param="out")
    if path.exists() and not path.is_file():  # if the user may, a rename would make /dev/null a file
        raise InputError(f"{path}: no ordinary file; give the file to write", param="out")


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, compressed as its name's ending says. Raises InputError as `check_name` does, and if
    the folder takes no file or the disk is full."""
    check_name(path)
    temporary = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        with os.fdopen(handle, "wb") as raw, _compressed(raw, path.suffix) as file:
            yield file
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}", param="out") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _compressed(raw: BinaryIO, suffix: str) -> BinaryIO:
    """The compressing file over `raw`. It stores neither name nor time, so equal traces give equal bytes."""
    if suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0))
    if suffix == ".zst":
        return cast(BinaryIO, zstandard.ZstdCompressor(level=9).stream_writer(raw))
    return raw


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
