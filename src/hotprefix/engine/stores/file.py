"""Pages in a folder, shared by any number of processes on one machine. Owns: `FileStore`.

Rules:
1. Reading takes no lock. Writing takes a lock on `<root>/v2/lock`, which the system releases when a process
   dies.
2. A page is written to `v2/incoming` and renamed, so it is there whole or not at all. A writer that dies
   leaves at most that one file, and the next writer overwrites it.
3. Nothing is synced to the disk. After a power loss a page may be damaged; its checksum shows that, and it is
   a miss like any other.
4. Pages plus index never exceed the quota, over all processes that name the same quota.
5. A page is evicted only after all pages that come after it. Among the pages without later ones, the one used
   longest ago goes first (`index.py` keeps that order). So what is held can always be reused from a prefix's
   first page on.
6. A file that cannot be deleted is counted, and another is deleted instead.
7. The folder's name contains the envelope's version; folders of older versions are deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from urllib.parse import SplitResult, unquote

from hotprefix.engine.stores.base import KEY_BYTES
from hotprefix.engine.stores.envelope import HEADER_BYTES, VERSION, parent_of
from hotprefix.engine.stores.errors import LinkError, PageError, Reason
from hotprefix.engine.stores.index import FileIndex, Row
from hotprefix.engine.stores.url import Options, parse_bytes
from hotprefix.errors import ConfigError

DEFAULT_QUOTA = "10GB"
MIN_QUOTA = 1 << 20
_PAGES = f"??/{'[0-9a-f]' * 2 * KEY_BYTES}"
_SLACK = 64 << 10  # index growth and journal within one change
_VICTIMS = 64  # most pages deleted in one change of the index, and most files tried in vain in one put
_LOOKS = 4  # with each page deleted, so many other rows are checked for their files
_LATEST = 1 << 62  # nanoseconds: the year 2116; a file's time beyond it is not believed
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_DOWN = {errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENODEV, errno.ENXIO, errno.ESTALE}
_OF_ONE_PAGE = {  # a bad sector or a changed mode is no reason to stop reading the others
    errno.EIO: Reason.UNREADABLE,
    errno.EISDIR: Reason.UNREADABLE,
    errno.EACCES: Reason.DENIED,
    errno.EPERM: Reason.DENIED,
}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
_SQLITE = {
    sqlite3.SQLITE_FULL: Reason.FULL,
    sqlite3.SQLITE_READONLY: Reason.DENIED,
    sqlite3.SQLITE_PERM: Reason.DENIED,
    sqlite3.SQLITE_CANTOPEN: Reason.DOWN,
}


class FileStore:
    """See the module's rules and `Store`. quota: bytes.

    The folder is created by the first put, and only its owner can read it, because pages tell what was in a
    prompt.
    """

    def __init__(self, root: Path, quota: int) -> None:
        if quota < MIN_QUOTA:
            raise ConfigError(f"quota={quota} bytes is too small: give at least {MIN_QUOTA}", param="quota")
        self._root = root
        self._quota = quota
        self._dir = root / f"v{VERSION}"
        self._mutex = threading.Lock()
        self._index: FileIndex | None = None
        self._looked_at = b""
        self._passed_over: Counter[Reason] = Counter()

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

    def passed_over(self) -> Mapping[Reason, int]:
        return dict(self._passed_over)

    # -- reading ----------------------------------------------------------------------------------

    def get(self, keys: Sequence[bytes]) -> list[bytes | PageError | None]:
        pages: list[bytes | PageError | None] = []
        for key in keys:
            try:
                pages.append(self._path(key).read_bytes())
            except (FileNotFoundError, NotADirectoryError):
                pages.append(None)
            except OSError as error:
                if error.errno in _OF_ONE_PAGE:
                    pages.append(PageError(_OF_ONE_PAGE[error.errno], f"{type(error).__name__}: {error}"))
                elif pages:
                    break
                else:
                    raise _link_error(error) from error
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

    # -- writing ----------------------------------------------------------------------------------

    def put(self, key: bytes, wrapped: bytes) -> None:
        self._change(lambda index: self._put(index, key, wrapped))

    def touch(self, keys: Sequence[bytes]) -> None:
        if self._index_path.exists():
            self._change(lambda index: self._touch(index, keys))

    def remove(self, key: bytes) -> None:
        if self._index_path.exists():
            self._change(lambda index: self._remove(index, key))

    def close(self) -> None:
        if self._mutex.acquire(timeout=0.1):  # if a hung disk holds it, the process's end closes the files
            self._drop_index()
            self._mutex.release()

    def _touch(self, index: FileIndex, keys: Sequence[bytes]) -> None:
        """Mark the last page of the leading run that is there; its use counts for the pages before it."""
        run = list(takewhile(lambda key: index.size(key) is not None, keys))
        if run:
            with index.change():
                used = index.next_use()
                index.use(run[-1], used)
            with contextlib.suppress(OSError):  # the file's time counts if the index has to be rebuilt
                os.utime(self._path(run[-1]), ns=(used, used))

    def _remove(self, index: FileIndex, key: bytes) -> None:
        with index.change():
            self._delete(index, key)

    def _delete(self, index: FileIndex, key: bytes) -> bool | Reason:
        """Delete a page. True: done. False: its file was gone already. A reason: it cannot be deleted."""
        try:
            self._path(key).unlink()
            there = True
        except (FileNotFoundError, NotADirectoryError):
            there = False
        except OSError as error:
            reason = _reason(error)
            self._passed_over[reason] += 1
            index.set_aside(key)
            return reason
        index.drop(key)
        return there

    def _put(self, index: FileIndex, key: bytes, wrapped: bytes) -> None:
        size, parent = len(wrapped), parent_of(wrapped)
        budget = self._quota - index.file_bytes - _SLACK
        if size > budget:
            raise LinkError(Reason.FULL, f"a page of {size} bytes does not fit a quota of {self._quota}")
        if parent is not None and index.size(parent) is None:
            raise PageError(Reason.MISSING, "the page before it is not in the store")
        spared = (key, parent or key)
        self._make_room(index, spared, rows=index.total + size - budget, disk=0)
        try:
            self._write(index, key, parent, wrapped)
        except (OSError, sqlite3.Error) as error:
            if _reason(error) is not Reason.FULL:
                raise
            self._evict(index, spared, rows=0, disk=size)  # the disk is full: make room from our own pages
            self._write(index, key, parent, wrapped)

    def _write(self, index: FileIndex, key: bytes, parent: bytes | None, wrapped: bytes) -> None:
        path, incoming = self._path(key), self._dir / "incoming"
        with index.change():
            used = index.next_use()
            index.add(Row(key, parent, len(wrapped), used))
        try:
            incoming.write_bytes(wrapped)
            os.utime(incoming, ns=(used, used))
            path.parent.mkdir(exist_ok=True)
            incoming.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                incoming.unlink()
            if not path.exists():
                with index.change():
                    index.drop(key)
            raise

    # -- making room ------------------------------------------------------------------------------

    def _make_room(self, index: FileIndex, spared: tuple[bytes, bytes], *, rows: int, disk: int) -> None:
        """Evict until `rows` and `disk` bytes are free (see `_evict`). Raises PageError if only pages before
        the one to be put are left, LinkError if the pages left cannot be deleted."""
        lacking, reason = self._evict(index, spared, rows=rows, disk=disk)
        if lacking > 0 and reason is not None:
            raise LinkError(
                reason, f"{lacking} bytes over the quota of {self._quota}: files cannot be deleted"
            )
        if lacking > 0:
            raise PageError(Reason.FULL, f"a quota of {self._quota} bytes holds no more of this prefix")

    def _evict(
        self, index: FileIndex, spared: tuple[bytes, bytes], *, rows: int, disk: int
    ) -> tuple[int, Reason | None]:
        """Evict pages until the index counts `rows` bytes less and the disk holds `disk` bytes less. Stops
        early if no page is left or too many files cannot be deleted. Returns how many of the `rows` bytes are
        still missing, and why the last of those files could not be deleted (None if all could)."""
        tried, reason = 0, None
        victim = index.next_victim(spared) if rows > 0 or disk > 0 else None
        while victim is not None:
            with index.change():
                for _ in range(_VICTIMS):
                    key, size = victim
                    gone = self._delete(index, key)
                    if isinstance(gone, Reason):
                        tried, reason = tried + 1, gone
                    else:
                        rows -= size
                        disk -= size if gone else 0
                        rows -= self._forget_vanished(index)
                    more = (rows > 0 or disk > 0) and tried < _VICTIMS
                    victim = index.next_victim(spared) if more else None
                    if victim is None:
                        break
        return rows, reason

    def _forget_vanished(self, index: FileIndex) -> int:
        """Drop rows whose files have vanished, because other programs delete files and such rows take the
        room of pages that are there. Each call checks the next few rows, so that all get their turn. Returns
        the bytes of the rows dropped."""
        rows = index.after(self._looked_at, _LOOKS)
        self._looked_at = rows[-1][0] if len(rows) == _LOOKS else b""
        gone = [(key, size) for key, size in rows if not _may_be_there(self._path(key))]
        for key, _ in gone:
            index.drop(key)
        return sum(size for _, size in gone)

    # -- the folder -------------------------------------------------------------------------------

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._dir / name[:2] / name

    def _change(self, action: Callable[[FileIndex], None]) -> None:
        """Run an action that writes, while no other thread or process writes. If the index is damaged it is
        rebuilt and the action is tried once more. Raises LinkError."""
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
            if not path.exists():
                self._delete_older()
            self._index = FileIndex(path, self._scan)
        return self._index

    def _delete_older(self) -> None:
        """Delete the folders of older formats: their pages cannot be read any more, and the quota does not
        count them."""
        for folder in (self._root / f"v{version}" for version in range(1, VERSION)):
            for path in (*folder.glob(_PAGES), *(folder / name for name in ("index.db", "incoming", "lock"))):
                with contextlib.suppress(OSError):
                    path.unlink()
            for path in (*folder.glob("??"), folder):
                with contextlib.suppress(OSError):  # it holds files of other programs
                    path.rmdir()

    def _drop_index(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None

    def _scan(self) -> Iterator[Row]:
        for path in self._dir.glob(_PAGES):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                used = min(max(stat.st_mtime_ns, 0), _LATEST)
                yield Row(bytes.fromhex(path.name), _parent_in(path), stat.st_size, used)


def _parent_in(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return parent_of(file.read(HEADER_BYTES))
    except OSError:
        return None


def _may_be_there(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


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
