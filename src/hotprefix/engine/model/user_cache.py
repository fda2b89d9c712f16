"""The per-user cache on disk. Owns: atomic JSON and file writes into it.

Rules: everything in the cache can be made again, so a reader treats a damaged entry as absent. If writing
fails (no space, no permission) there is one warning, and the caller goes on without a cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


def identity(path: Path) -> list[Any]:
    """Values that change when a file is replaced or written to (size, times, inode), found without reading
    it."""
    info = path.stat()
    return [str(path.resolve()), info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]


def digest(*parts: Any) -> str:
    """SHA-256 (hex) over the parts as JSON, so that parts of different types or lengths never run
    together."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which appears under `path` complete or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if the file is absent, damaged or holds no object."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file, complete or not at all. Raises OSError."""
    with atomic_write(path) as file:
        file.write(json.dumps(value).encode())
