"""What a store folder holds, and in which order its pages are evicted. Owns: `FileIndex`, a small SQLite
file.

Rules:
1. The caller holds the folder's lock, so nothing in here waits for another process.
2. A row is committed before its page is written, and dropped after the page is gone. So whenever a process is
   killed, every page on the disk has a row. A row without a page only takes room until it is evicted.
3. As in the kernel's tree (docs/decisions/0003), a use is written to the last page of its run only, and
   passes to the parent when that page goes.
4. Uses are numbered by the index's own clock: the machine's nanoseconds, or one more than the last use if the
   machine's clock has not moved on. So setting the machine's clock changes no order.
5. The index does not survive a power loss (there is no fsync). A damaged index is thrown away and rebuilt
   from the folder.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_VERSION = 2
_SCHEMA = (
    "CREATE TABLE pages (key BLOB PRIMARY KEY, parent BLOB, bytes INTEGER NOT NULL, used INTEGER NOT NULL,"
    " children INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID",
    "CREATE INDEX leaves ON pages (used) WHERE children = 0",
    "CREATE INDEX below ON pages (parent)",
    "CREATE TABLE whole (bytes INTEGER NOT NULL, clock INTEGER NOT NULL)",
    "INSERT INTO whole VALUES (0, 0)",
    "CREATE TRIGGER added AFTER INSERT ON pages BEGIN"
    " UPDATE whole SET bytes = bytes + new.bytes, clock = max(clock, new.used);"
    " UPDATE pages SET children = (SELECT count(*) FROM pages WHERE parent = new.key) WHERE key = new.key;"
    " UPDATE pages SET children = children + 1 WHERE key = new.parent; END",
    "CREATE TRIGGER dropped AFTER DELETE ON pages BEGIN"
    " UPDATE whole SET bytes = bytes - old.bytes;"
    " UPDATE pages SET children = children - 1, used = max(used, old.used) WHERE key = old.parent; END",
    f"PRAGMA user_version = {_VERSION}",
)


class Row(NamedTuple):
    """One page.

    parent: the key of the page before it; None for a prefix's first page.
    bytes: the size of its file.
    used: its last use on the index's clock, nanoseconds; also the modification time of its file.
    """

    key: bytes
    parent: bytes | None
    bytes: int
    used: int


class FileIndex:
    """See the module's rules. Raises sqlite3.Error.

    inode: by it a caller sees whether the file at `path` is still the one that is open.
    scan: called if the index is new; returns the rows of the folder's pages.
    """

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
        with self.change():
            for statement in _SCHEMA:
                self._db.execute(statement)
            for row in rows:
                self._insert(row)

    def _insert(self, row: Row) -> None:
        self._db.execute("INSERT INTO pages (key, parent, bytes, used) VALUES (?, ?, ?, ?)", row)

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """A block of changes that are all made or, if it raises, not made at all."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    # -- what there is ----------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Bytes of all pages."""
        return int(self._db.execute("SELECT bytes FROM whole").fetchone()[0])

    @property
    def file_bytes(self) -> int:
        """Bytes that the index itself takes on the disk."""
        return self._path.stat().st_size

    def size(self, key: bytes) -> int | None:
        """Bytes of a page; None if it has no row."""
        found = self._db.execute("SELECT bytes FROM pages WHERE key = ?", (key,)).fetchone()
        return None if found is None else int(found[0])

    def after(self, key: bytes, count: int) -> list[tuple[bytes, int]]:
        """Keys and bytes of the `count` rows that come after `key` in the order of keys."""
        query = "SELECT key, bytes FROM pages WHERE key > ? ORDER BY key LIMIT ?"
        return self._db.execute(query, (key, count)).fetchall()

    def next_victim(self, spared: tuple[bytes, bytes]) -> tuple[bytes, int] | None:
        """Key and bytes of the page to evict next: of the pages with none after them, the one used longest
        ago. None if no page is left. spared: keys that are not to be taken."""
        query = "SELECT key, bytes FROM pages WHERE children = 0 AND key NOT IN (?, ?) ORDER BY used LIMIT 1"
        found: tuple[bytes, int] | None = self._db.execute(query, spared).fetchone()
        return found

    # -- changes: inside `change` -----------------------------------------------------------------

    def next_use(self) -> int:
        """A number for a use that is made now; it is larger than all before it."""
        self._db.execute("UPDATE whole SET clock = max(clock + 1, ?)", (time.time_ns(),))
        return int(self._db.execute("SELECT clock FROM whole").fetchone()[0])

    def add(self, row: Row) -> None:
        """Add a row, in the place of the one with the same key if there is one."""
        self.drop(row.key)
        self._insert(row)

    def drop(self, key: bytes) -> None:
        self._db.execute("DELETE FROM pages WHERE key = ?", (key,))

    def use(self, key: bytes, used: int) -> None:
        self._db.execute("UPDATE pages SET used = ? WHERE key = ?", (used, key))

    def set_aside(self, key: bytes) -> None:
        """Pass over a page that cannot be deleted. Its room stays taken, and other pages are evicted, its
        parent among them. It is tried again after all other pages have been used or evicted."""
        found = self._db.execute("SELECT bytes FROM pages WHERE key = ?", (key,)).fetchone()
        if found is not None:
            self.add(Row(key, None, found[0], self.next_use()))

    def close(self) -> None:
        self._db.close()
