"""Pages in a folder, shared by any number of processes on one machine. Owns: `FileStore`.

Rules: reading takes no lock. Writing does: a lock on `<root>/v1/lock` that the system takes back when a
process dies. A page is written to `v1/incoming` and renamed, so it is there whole or not at all; a dead
writer leaves at most that one file, and the next writer overwrites it. Nothing is synced to the disk:
after a power loss a page may be damaged, which its checksum tells, and that is a miss like any other.
The quota holds for pages plus index at every moment, over all processes that name the same one; pages
used longest ago (by modification time, which `touch` sets) go first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import SplitResult, unquote

from hotprefix.engine.stores.base import KEY_BYTES
from hotprefix.engine.stores.errors import LinkError, Reason
from hotprefix.engine.stores.index import FileIndex, Row
from hotprefix.engine.stores.url import Options, parse_bytes
from hotprefix.errors import ConfigError

DEFAULT_QUOTA = "10GB"
MIN_QUOTA = 1 << 20
_SLACK = 64 << 10  # index growth and journal within one change
_VICTIMS = 64
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_DOWN = {errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENODEV, errno.ENXIO, errno.ESTALE}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
_SQLITE = {
    sqlite3.SQLITE_FULL: Reason.FULL,
    sqlite3.SQLITE_READONLY: Reason.DENIED,
    sqlite3.SQLITE_PERM: Reason.DENIED,
    sqlite3.SQLITE_CANTOPEN: Reason.DOWN,
}


class FileStore:
    """See the module's rules and `Store`. quota: bytes. Creates the folder with the first put, readable
    by its owner only: pages tell what was in a prompt."""

    def __init__(self, root: Path, quota: int) -> None:
        if quota < MIN_QUOTA:
            raise ConfigError(f"quota={quota} bytes is too small: give at least {MIN_QUOTA}", param="quota")
        self._root = root
        self._quota = quota
        self._dir = root / "v1"
        self._mutex = threading.Lock()
        self._index: FileIndex | None = None

    @classmethod
    def from_url(cls, url: SplitResult) -> FileStore:
        """file:///absolute/path?quota=10GB"""
        options = Options(url, {"quota"})
        path = unquote(url.path)
        if url.netloc not in ("", "localhost") or not path.strip("/"):
            raise ConfigError(
                f"{options.shown!r} names no absolute path: write file:///path/to/folder", param="l3"
            )
        return cls(Path(path), parse_bytes(options.get("quota", DEFAULT_QUOTA), "quota"))

    def describe(self) -> str:
        return f"file://{self._root}?quota={self._quota}"

    # -- reading ----------------------------------------------------------------------------------

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        pages: list[bytes | None] = []
        for key in keys:
            try:
                pages.append(self._path(key).read_bytes())
            except (FileNotFoundError, NotADirectoryError):
                pages.append(None)
            except OSError as error:
                if not pages:
                    raise _link_error(error) from error
                break
        return pages

    def present(self, keys: Sequence[bytes]) -> int:
        count = 0
        for key in keys:
            try:
                self._path(key).stat()
            except (FileNotFoundError, NotADirectoryError):
                break
            except OSError as error:
                raise _link_error(error) from error
            count += 1
        return count

    def touch(self, keys: Sequence[bytes]) -> None:
        now = time.time_ns()
        for depth, key in enumerate(keys):
            with contextlib.suppress(OSError):
                os.utime(self._path(key), ns=(now - depth * 1000,) * 2)

    # -- writing ----------------------------------------------------------------------------------

    def put(self, key: bytes, framed: bytes) -> None:
        self._change(lambda index: self._put(index, key, framed))

    def remove(self, key: bytes) -> None:
        self._change(lambda index: self._remove(index, key))

    def close(self) -> None:
        if self._mutex.acquire(timeout=0.1):  # else a hung disk holds it; the process's end will do
            self._drop_index()
            self._mutex.release()

    def _remove(self, index: FileIndex, key: bytes) -> None:
        self._path(key).unlink(missing_ok=True)
        index.change([key], [])

    def _put(self, index: FileIndex, key: bytes, framed: bytes) -> None:
        size = len(framed)
        budget = self._quota - index.file_bytes - _SLACK
        if size > budget:
            raise LinkError(Reason.FULL, f"a page of {size} bytes does not fit a quota of {self._quota}")
        self._evict(index, rows=index.total + size - budget, disk=0)
        try:
            self._write(index, key, framed)
        except (OSError, sqlite3.Error) as error:
            if _reason(error) is not Reason.FULL:
                raise
            self._evict(index, rows=0, disk=size)  # others filled the disk: make room from our own
            self._write(index, key, framed)

    def _write(self, index: FileIndex, key: bytes, framed: bytes) -> None:
        path, incoming, now = self._path(key), self._dir / "incoming", time.time_ns()
        index.change([], [(key, len(framed), now)])
        try:
            incoming.write_bytes(framed)
            os.utime(incoming, ns=(now, now))
            path.parent.mkdir(exist_ok=True)
            incoming.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                incoming.unlink()
            if not path.exists():
                index.change([key], [])
            raise

    def _evict(self, index: FileIndex, *, rows: int, disk: int) -> None:
        """Evict, oldest first, until `rows` bytes less are accounted for and `disk` bytes less are on
        the disk, or nothing is left. A page used since the index last looked is only noted."""
        while rows > 0 or disk > 0:
            drop: list[bytes] = []
            put: list[Row] = []
            for key, size, used in index.oldest(_VICTIMS):
                if (rows <= 0 and disk <= 0) or any(used > noted[2] for noted in put):
                    break
                path = self._path(key)
                seen = _mtime(path)
                if seen is not None and seen > used:
                    put.append((key, size, seen))
                    continue
                path.unlink(missing_ok=True)
                drop.append(key)
                rows -= size
                disk -= size if seen is not None else 0
            if not drop and not put:
                return
            index.change(drop, put)

    # -- the folder -------------------------------------------------------------------------------

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._dir / name[:2] / name

    def _change(self, action: Callable[[FileIndex], None]) -> None:
        """Run an action that writes, alone among all threads and processes. A damaged index is made
        anew, once. Raises LinkError."""
        try:
            with self._mutex, self._lock_folder():
                try:
                    action(self._open_index())
                except sqlite3.DatabaseError as error:
                    if _code(error) not in _DAMAGED:
                        raise
                    self._drop_index()
                    self._index_path.unlink(missing_ok=True)
                    action(self._open_index())
        except (OSError, sqlite3.Error) as error:
            raise _link_error(error) from error

    @contextlib.contextmanager
    def _lock_folder(self) -> Iterator[None]:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._dir.mkdir(exist_ok=True)
        path = self._dir / "lock"
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if path.exists() and os.fstat(lock).st_ino == path.stat().st_ino:
                    yield
                    return
            finally:
                os.close(lock)

    @property
    def _index_path(self) -> Path:
        return self._dir / "index.db"

    def _open_index(self) -> FileIndex:
        path = self._index_path
        if self._index is not None and (not path.exists() or path.stat().st_ino != self._index.inode):
            self._drop_index()
        if self._index is None:
            self._index = FileIndex(path, self._scan)
        return self._index

    def _drop_index(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None

    def _scan(self) -> Iterator[Row]:
        for path in self._dir.glob(f"??/{'[0-9a-f]' * 2 * KEY_BYTES}"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                yield bytes.fromhex(path.name), stat.st_size, stat.st_mtime_ns


def _mtime(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; an error of our own or the module's counts as a damaged file."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF


def _reason(error: OSError | sqlite3.Error) -> Reason:
    if isinstance(error, sqlite3.Error):
        return _SQLITE.get(_code(error), Reason.FAILED)
    for codes, reason in ((_FULL, Reason.FULL), (_DENIED, Reason.DENIED), (_DOWN, Reason.DOWN)):
        if error.errno in codes:
            return reason
    return Reason.FAILED


def _link_error(error: OSError | sqlite3.Error) -> LinkError:
    return LinkError(_reason(error), f"{type(error).__name__}: {error}")
