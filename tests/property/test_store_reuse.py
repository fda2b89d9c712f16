"""Every page that an evicting store holds can be reused, whatever was put, touched and evicted, and whatever
failed.

Pages are named by their path: (0, 1) comes right after (0,). A page can be reused if every page of its path
is in the store. A page that cannot be reused is worthless, however many of them a store holds.
"""

from __future__ import annotations

import errno
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotprefix.engine.stores.envelope import HEADER_BYTES, pack
from hotprefix.engine.stores.errors import LinkError, PageError, Reason
from hotprefix.engine.stores.file import MIN_QUOTA, FileStore
from hotprefix.lab.sim.lower_tiers import Store as ModelStore
from tests.support.stores import payload

PathKey = tuple[int, ...]
SIZE = 100_000
FITS = 9  # pages of SIZE in the smallest quota, beside the index and its slack
HOUR_NS = 3_600 * 10**9

paths = st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=7).map(tuple)


def name(path: PathKey) -> bytes:
    return bytes(path) + bytes([255]) * (32 - len(path))


def run_to(path: PathKey) -> list[PathKey]:
    return [path[:n] for n in range(1, len(path) + 1)]


def frame(path: PathKey) -> bytes:
    parent = name(path[:-1]) if len(path) > 1 else None
    return pack(name(path), payload(len(path), SIZE - HEADER_BYTES), parent)


class Files:
    """One folder, the machine's clock, and what goes wrong with them.

    stuck: names of files that cannot be deleted.
    full: how many of the next writes find the disk full.
    """

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name) / "l3"
        self.patch = pytest.MonkeyPatch()
        self.jump = 0
        self.stuck: set[str] = set()
        self.full = 0
        real_unlink, real_write, real_time = Path.unlink, Path.write_bytes, time.time_ns

        def unlink(path: Path, *arguments: Any, **named: Any) -> None:
            if path.name in self.stuck:
                raise PermissionError(errno.EPERM, "immutable")
            real_unlink(path, *arguments, **named)

        def write_bytes(path: Path, data: bytes) -> int:
            if path.name == "incoming" and self.full:
                self.full -= 1
                real_write(path, data[: len(data) // 2])
                raise OSError(errno.ENOSPC, "full")
            return real_write(path, data)

        self.patch.setattr(Path, "unlink", unlink)
        self.patch.setattr(Path, "write_bytes", write_bytes)
        self.patch.setattr(time, "time_ns", lambda: real_time() + self.jump)

    def file(self, path: PathKey) -> Path:
        return next(iter(self.root.glob(f"v*/??/{name(path).hex()}")), self.root / "nothing")

    def held(self) -> set[PathKey]:
        names = [bytes.fromhex(path.name) for path in self.root.glob("v*/??/*")]
        return {tuple(key.rstrip(b"\xff")) for key in names}

    def disk_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())

    def close(self) -> None:
        self.patch.undo()
        self.folder.cleanup()


class FileMachine(RuleBasedStateMachine):
    """Two processes put and touch pages in one folder, while the clock jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.files = Files()
        self.stores = [FileStore(self.files.root, MIN_QUOTA) for _ in range(2)]

    @rule(path=paths, who=st.integers(0, 1))
    def save(self, path: PathKey, who: int) -> None:
        for each in run_to(path):
            self.put(each, who)

    def put(self, path: PathKey, who: int) -> None:
        """Put pages as the worker does: only those that are not there yet."""
        if not self.stores[who].present([name(path)]):
            try:
                self.stores[who].put(name(path), frame(path))
            except (PageError, LinkError) as error:
                self.refused(path, error)

    def refused(self, path: PathKey, error: PageError | LinkError) -> None:
        assert isinstance(error, PageError), "the store itself is well"

    @rule(path=paths, who=st.integers(0, 1))
    def touch(self, path: PathKey, who: int) -> None:
        self.stores[who].touch([name(each) for each in run_to(path)])

    @rule(hours=st.sampled_from([-1, 1, -24]))
    def the_clock_jumps(self, hours: int) -> None:
        self.files.jump += hours * HOUR_NS

    @rule(who=st.integers(0, 1))
    def a_process_ends(self, who: int) -> None:
        self.stores[who].close()
        self.stores[who] = FileStore(self.files.root, MIN_QUOTA)

    @invariant()
    def the_quota_holds(self) -> None:
        assert self.files.disk_bytes() <= MIN_QUOTA

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        self.files.close()


class SoundFiles(FileMachine):
    """If nothing fails, the folder holds what the simulator's store holds, page by page."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ModelStore(FITS)
        self.known: set[PathKey] = set()

    def put(self, path: PathKey, who: int) -> None:
        super().put(path, who)
        self.model.put(name(path), name(path[:-1]) if len(path) > 1 else None)
        self.known.add(path)

    @rule(path=paths, who=st.integers(0, 1))
    def touch(self, path: PathKey, who: int) -> None:
        super().touch(path, who)
        self.model.touch([name(each) for each in run_to(path)])

    @invariant()
    def all_it_holds_can_be_reused(self) -> None:
        held = self.files.held()
        assert held == {path for path in self.known if self.model.leading((name(path),))}
        assert all(path[:-1] in held for path in held if len(path) > 1)

    def teardown(self) -> None:
        if self.known:
            self.save((9,) * FITS, 0)
            assert {path for path in self.files.held() if path[0] == 9} == set(run_to((9,) * FITS))
        super().teardown()


class FailingFiles(FileMachine):
    """Files vanish or cannot be deleted, disks are full, indices are lost. All other pages that are held,
    except those that come after such pages, can be reused, and the store goes on taking pages."""

    def __init__(self) -> None:
        super().__init__()
        self.cut: set[PathKey] = set()

    @precondition(lambda self: len(self.files.stuck) < 4)
    @rule(path=paths)
    def a_file_cannot_be_deleted(self, path: PathKey) -> None:
        self.files.stuck.add(name(path).hex())
        self.cut.add(path)

    @rule()
    def all_files_can_be_deleted(self) -> None:
        self.files.stuck.clear()

    @rule(path=paths)
    def a_file_vanishes(self, path: PathKey) -> None:
        if path in self.files.held() and name(path).hex() not in self.files.stuck:
            self.files.file(path).unlink()
            self.cut.add(path)

    @rule(writes=st.integers(1, 3))
    def the_disk_is_full(self, writes: int) -> None:
        self.files.full = writes

    @rule()
    def the_index_is_lost(self) -> None:
        for index in self.files.root.glob("v*/index.db"):
            index.unlink()

    @rule(path=paths)
    def remove(self, path: PathKey) -> None:
        """Remove a page that proved unusable."""
        if path in self.files.held():
            self.stores[0].remove(name(path))
            self.cut.add(path)

    def refused(self, path: PathKey, error: PageError | LinkError) -> None:
        if isinstance(error, LinkError):
            assert error.reason is Reason.FULL
            self.files.full = 0

    @invariant()
    def the_rest_can_be_reused(self) -> None:
        held = self.files.held()
        for path in held - self.cut:
            cut_off = any(each in self.cut for each in run_to(path)[:-1])
            assert cut_off or len(path) == 1 or path[:-1] in held, f"{path} cannot be reused"

    def teardown(self) -> None:
        self.files.full = 0
        fresh = run_to((9,) * (FITS - 5))  # beside 4 files that cannot be deleted
        self.save(fresh[-1], 0)
        assert set(fresh) <= self.files.held(), "the store takes no pages any more"
        super().teardown()


TestSound = SoundFiles.TestCase
TestSound.settings = settings(max_examples=40, stateful_step_count=25)
TestFailing = FailingFiles.TestCase
TestFailing.settings = settings(max_examples=60, stateful_step_count=25)
