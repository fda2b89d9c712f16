"""What a store folder holds, and when it was used. Owns: `FileIndex`, a small SQLite file.

Rules: whoever uses it holds the folder's lock, so nothing in here ever waits for another process. A row
is committed before its page is written and dropped after the page is gone, so the rows never say less
than what is on the disk, whenever a process is killed; a row without a page costs room until it is
evicted, no more. `used` is the page file's modification time, nanoseconds, as of when it was last seen.
Not durable against power loss (no fsync): a damaged index is thrown away and made anew from the folder.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_VERSION = 1
_SCHEMA = (
    "CREATE TABLE pages (key BLOB PRIMARY KEY, bytes INTEGER NOT NULL, used INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE INDEX by_use ON pages (used)",
    "CREATE TABLE total (bytes INTEGER NOT NULL)",
    "INSERT INTO total VALUES (0)",
    "CREATE TRIGGER added AFTER INSERT ON pages BEGIN UPDATE total SET bytes = bytes + new.bytes; END",
    "CREATE TRIGGER dropped AFTER DELETE ON pages BEGIN UPDATE total SET bytes = bytes - old.bytes; END",
    f"PRAGMA user_version = {_VERSION}",
)

Row = tuple[bytes, int, int]  # key, bytes, used


class FileIndex:
    """See the module's rules. inode: tells whether the file at `path` is still the one that is open.
    scan: the folder's pages, asked for where the index is new. Raises sqlite3.Error."""

    def __init__(self, path: Path, scan: Callable[[], Iterable[Row]]) -> None:
        self._path = path
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode = TRUNCATE")
            self._db.execute("PRAGMA synchronous = OFF")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise sqlite3.DatabaseError(f"index version {version}, expected {_VERSION}")
            if version == 0:
                self._make(scan())
            self.inode = path.stat().st_ino
        except BaseException:
            self._db.close()
            raise

    def _make(self, rows: Iterable[Row]) -> None:
        with self._transaction():
            for statement in _SCHEMA:
                self._db.execute(statement)
            self._db.executemany("INSERT INTO pages VALUES (?, ?, ?)", rows)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @property
    def total(self) -> int:
        """Bytes of all pages."""
        return int(self._db.execute("SELECT bytes FROM total").fetchone()[0])

    @property
    def file_bytes(self) -> int:
        """Bytes the index takes itself."""
        return self._path.stat().st_size

    def oldest(self, count: int) -> list[Row]:
        """The `count` pages used longest ago, oldest first."""
        query = "SELECT key, bytes, used FROM pages ORDER BY used LIMIT ?"
        return self._db.execute(query, (count,)).fetchall()

    def change(self, drop: Iterable[bytes], put: Iterable[Row]) -> None:
        """Drop rows, then put rows, all or nothing."""
        put = list(put)
        with self._transaction():
            gone = [(key,) for key in drop] + [(row[0],) for row in put]
            self._db.executemany("DELETE FROM pages WHERE key = ?", gone)
            self._db.executemany("INSERT INTO pages VALUES (?, ?, ?)", put)

    def close(self) -> None:
        self._db.close()
