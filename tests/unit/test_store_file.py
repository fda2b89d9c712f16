"""The folder store: whole pages or none, a quota that holds, use order, and an index that heals."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from hotprefix.engine.stores.envelope import HEADER_BYTES, VERSION, pack
from hotprefix.engine.stores.errors import LinkError, PageError, Reason
from hotprefix.engine.stores.file import MIN_QUOTA, FileStore
from tests.support.stores import key, keys

SIZE = 100_000
FITS = 9  # pages of SIZE in the smallest quota, beside the index and its slack


def page(number: int, size: int = SIZE) -> bytes:
    return number.to_bytes(2, "little") * (size // 2)


def make(path: Path, *numbers: int, quota: int = MIN_QUOTA) -> FileStore:
    store = FileStore(path / "l3", quota)
    for number in numbers:
        store.put(key(number), page(number))
    return store


def make_chain(path: Path, *numbers: int) -> FileStore:
    """A store with these pages, each of which is the parent of the next."""
    store = make(path)
    parent = None
    for number in numbers:
        store.put(key(number), pack(key(number), page(number, SIZE - HEADER_BYTES), parent))
        parent = key(number)
    return store


def held(store: FileStore, numbers: Sequence[int]) -> list[int]:
    return [n for n, data in zip(numbers, store.get(keys(*numbers)), strict=True) if data is not None]


def kept(store: FileStore, numbers: Sequence[int]) -> list[int]:
    found = store.get(keys(*numbers))
    assert all(data in (None, page(n)) for n, data in zip(numbers, found, strict=True))
    return [n for n, data in zip(numbers, found, strict=True) if data is not None]


def disk_bytes(path: Path) -> int:
    return sum(q.stat().st_size for q in path.rglob("*") if q.is_file())


def reason_of(action: object, *arguments: object) -> Reason:
    with pytest.raises(LinkError) as caught:
        action(*arguments)  # type: ignore[operator]
    return caught.value.reason


# -- pages --------------------------------------------------------------------------------------------


def test_pages_come_back_and_stop_at_a_hole(tmp_path: Path) -> None:
    store = make(tmp_path, 1, 2, 4)
    assert store.get(keys(1, 2, 3, 4)) == [page(1), page(2), None, page(4)]
    assert store.present(keys(1, 2, 3, 4)) == 2
    store.put(key(1), page(9))
    store.remove(key(2))
    store.remove(key(2))
    assert store.get(keys(1, 2)) == [page(9), None]


def test_another_store_on_the_same_folder_sees_everything(tmp_path: Path) -> None:
    """This holds after a restart too (rule 41)."""
    first, second = make(tmp_path, 1), make(tmp_path, 2)
    assert kept(first, [1, 2]) == kept(second, [1, 2]) == [1, 2]
    first.close()
    assert kept(make(tmp_path), [1, 2]) == [1, 2]


def test_a_folder_that_is_not_there_is_a_miss_until_the_first_put(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "a" / "b", MIN_QUOTA)
    assert (store.get(keys(1)), store.present(keys(1))) == ([None], 0)
    store.touch(keys(1))
    assert not (tmp_path / "a").exists()
    store.put(key(1), page(1))
    assert kept(store, [1]) == [1]
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0


def test_pages_vanish_and_come_back_while_the_store_is_open(tmp_path: Path) -> None:
    """One file and then the whole folder are deleted by hand: the pages are misses (rule 37)."""
    store = make(tmp_path, 1, 2)
    next((tmp_path / "l3").rglob(key(1).hex())).unlink()
    assert kept(store, [1, 2]) == [2]
    shutil.rmtree(tmp_path / "l3")
    assert kept(store, [1, 2]) == []
    store.put(key(3), page(3))
    assert kept(store, [1, 2, 3]) == [3]


# -- quota and use ------------------------------------------------------------------------------------


def test_the_quota_holds_after_every_put_and_the_oldest_go_first(tmp_path: Path) -> None:
    store = make(tmp_path)
    for number in range(30):
        store.put(key(number), page(number))
        assert disk_bytes(tmp_path) <= MIN_QUOTA
    assert kept(store, range(30)) == list(range(30 - FITS, 30))


def test_used_pages_stay_though_only_touched(tmp_path: Path) -> None:
    store = make(tmp_path, *range(FITS))
    for number in (1, 0):
        store.touch(keys(number))
    for number in range(10, 14):
        store.put(key(number), page(number))
    assert kept(store, range(14)) == [0, 1, 6, 7, 8, 10, 11, 12, 13]


def test_touched_pages_go_before_newer_ones(tmp_path: Path) -> None:
    """The pages were all touched, in one order. What is put after that is newer than all of them."""
    store = make(tmp_path, *range(FITS))
    store.touch(keys(*range(FITS)))
    for number in range(10, 10 + FITS):
        store.put(key(number), page(number))
    assert kept(store, range(10 + FITS)) == list(range(10, 10 + FITS))


def test_a_touched_page_is_weighed_against_newer_ones(tmp_path: Path) -> None:
    """It was touched before the others were put, so it is older than they are, although the index learns of
    the touch only now."""
    store = make_chain(tmp_path, 0, 1, 2, 3)
    store.touch(keys(0, 1, 2, 3))
    for number in (4, 5, 6, 7, 8, 10):
        store.put(key(number), page(number))
    assert held(store, range(11)) == [0, 1, 2, 4, 5, 6, 7, 8, 10]


def test_a_chains_tail_goes_before_its_head(tmp_path: Path) -> None:
    """The chain was saved head first, in two runs, and then touched as one chain (rules 15 and 40)."""
    store = make_chain(tmp_path, *range(FITS))
    store.touch(keys(*range(FITS)))
    for number in range(10, 14):
        store.put(key(number), page(number))
    assert held(store, range(FITS)) == [0, 1, 2, 3, 4]


def test_another_process_touch_counts(tmp_path: Path) -> None:
    store, other = make(tmp_path, *range(FITS)), make(tmp_path)
    other.touch(keys(0))
    store.put(key(10), page(10))
    assert kept(store, [0, 1]) == [0]


def test_replacing_a_page_counts_it_once(tmp_path: Path) -> None:
    store = make(tmp_path, 1, 2)
    for _ in range(20):
        store.put(key(1), page(1))
    assert kept(store, [1, 2]) == [1, 2]


def test_a_smaller_quota_is_reached_with_the_next_put(tmp_path: Path) -> None:
    make(tmp_path, *range(20), quota=3 * MIN_QUOTA)
    make(tmp_path, 30)
    assert disk_bytes(tmp_path) <= MIN_QUOTA


def test_a_page_larger_than_the_quota_is_refused(tmp_path: Path) -> None:
    store = make(tmp_path, 1)
    assert reason_of(store.put, key(2), bytes(MIN_QUOTA)) is Reason.FULL
    assert kept(store, [1]) == [1]


@pytest.mark.parametrize("hours", [-1, 1000])
def test_a_clock_that_is_set_back_changes_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """After the jump, new pages are not the first to be evicted for as long as the clock lags. A process that
    starts after it agrees."""
    real, jump = time.time_ns, [0]
    monkeypatch.setattr(time, "time_ns", lambda: real() + jump[0])
    store = make(tmp_path, *range(FITS))
    for jump[0] in (hours * 3_600 * 10**9, 0):
        for number in (20, 21):
            store.put(key(number + jump[0]), page(number))
        store = make(tmp_path)
    survivors = list(range(4, FITS))
    assert kept(store, range(FITS)) == survivors
    (tmp_path / "l3" / f"v{VERSION}" / "index.db").unlink()
    for number in (30, 31):
        store.put(key(number), page(number))
    assert kept(store, range(FITS)) == survivors[2:], "the files tell the order too"


class Undeletable:
    """Makes deleting these pages' files fail. tried: how often each was tried."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
        self.tried: Counter[str] = Counter()
        names, real = {key(number).hex() for number in numbers}, Path.unlink

        def unlink(path: Path, missing_ok: bool = False) -> None:
            if path.name in names:
                self.tried[path.name] += 1
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            real(path, missing_ok=missing_ok)

        monkeypatch.setattr(Path, "unlink", unlink)


def test_a_file_that_cannot_be_deleted_is_stepped_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file stays and its room stays taken; everything else goes on. It is tried again after all other
    files."""
    store = make(tmp_path, *range(FITS))
    stuck = Undeletable(monkeypatch, 0)
    for number in range(10, 10 + 2 * FITS):
        store.put(key(number), page(number))
        assert disk_bytes(tmp_path) <= MIN_QUOTA
    assert held(store, range(40)) == [0, *range(11 + FITS, 10 + 2 * FITS)]
    assert stuck.tried.total() == 3, "once in each round"
    assert store.passed_over() == {Reason.DENIED: 3}


def test_a_chain_whose_tail_cannot_be_deleted_goes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_chain(tmp_path, *range(FITS))
    Undeletable(monkeypatch, FITS - 1)
    for number in range(10, 14):
        store.put(key(number), page(number))
    assert held(store, range(FITS)) == [0, 1, 2, 3, FITS - 1]


def test_when_no_file_can_be_deleted_the_quota_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(tmp_path, *range(FITS))
    Undeletable(monkeypatch, *range(FITS))
    assert reason_of(store.put, key(10), page(10)) is Reason.DENIED
    assert disk_bytes(tmp_path) <= MIN_QUOTA
    assert kept(store, range(11)) == list(range(FITS))


def test_files_that_others_delete_cost_no_room_for_long(tmp_path: Path) -> None:
    """Rows of vanished files would take the room of pages that are there, so with each page that is evicted
    the files of a few other rows are looked for."""
    small, count = 4_000, 220
    store = FileStore(tmp_path / "l3", MIN_QUOTA)
    for number in range(count):
        store.put(key(number), page(number, small))
    for number in range(count // 2, count):
        next((tmp_path / "l3").rglob(key(number).hex())).unlink()
    for number in range(1000, 1100):
        store.put(key(number), page(number, small))
        assert disk_bytes(tmp_path) <= MIN_QUOTA
    lost = [n for n in range(count // 2) if store.get(keys(n)) == [None]]
    assert 0 < len(lost) <= 50, "without that look as many as were put"


def test_a_page_that_is_removed_leaves_its_use_to_the_one_before_it(tmp_path: Path) -> None:
    store = make_chain(tmp_path, 0, 1)
    for number in range(2, FITS):
        store.put(key(number), page(number))
    store.touch(keys(0, 1))
    store.remove(key(1))
    for number in (10, 11):
        store.put(key(number), page(number))
    assert held(store, range(12)) == [0, 3, 4, 5, 6, 7, 8, 10, 11]


# -- trouble ------------------------------------------------------------------------------------------


class FailingWrites:
    """Makes the first `count` writes of pages stop half-way, as a full disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, code: int) -> None:
        self.left = count
        real = Path.write_bytes

        def write_bytes(path: Path, data: bytes) -> int:
            if path.name == "incoming" and self.left:
                self.left -= 1
                real(path, data[: len(data) // 2])
                raise OSError(code, os.strerror(code))
            return real(path, data)

        monkeypatch.setattr(Path, "write_bytes", write_bytes)


def test_a_full_disk_makes_room_from_our_own_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(tmp_path, 1, 2)
    FailingWrites(monkeypatch, 1, errno.ENOSPC)
    store.put(key(3), page(3))
    assert kept(store, [1, 2, 3]) == [2, 3]


def test_a_disk_that_stays_full_leaves_no_half_page_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is a counted failure, and puts succeed again when there is room (rule 37)."""
    store = make(tmp_path, 1)
    FailingWrites(monkeypatch, 2, errno.ENOSPC)
    assert reason_of(store.put, key(3), page(3)) is Reason.FULL
    assert store.get(keys(3)) == [None]
    assert not list(tmp_path.rglob("incoming"))
    for number in range(20):
        store.put(key(number), page(number))
        assert disk_bytes(tmp_path) <= MIN_QUOTA
    assert len(kept(store, range(20))) == FITS


@pytest.mark.parametrize(
    ("code", "reason"),
    [(errno.ESTALE, Reason.DOWN), (errno.EROFS, Reason.DENIED), (errno.ENOMEM, Reason.FAILED)],
)
def test_errors_of_the_system_have_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: Reason
) -> None:
    store = make(tmp_path, 1)
    FailingWrites(monkeypatch, 1, code)
    assert reason_of(store.put, key(2), page(2)) is reason

    def refuse(_: Path) -> bytes:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert reason_of(store.get, keys(1)) is reason


class FailingReads:
    """Makes reading one page fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, code: int) -> None:
        real, name = Path.read_bytes, key(number).hex()

        def read_bytes(path: Path) -> bytes:
            if path.name == name:
                raise OSError(code, os.strerror(code))
            return real(path)

        monkeypatch.setattr(Path, "read_bytes", read_bytes)


def test_a_read_that_fails_later_keeps_what_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(tmp_path, 1, 2, 3)
    FailingReads(monkeypatch, 2, errno.ESTALE)
    assert store.get(keys(1, 2, 3)) == [page(1)]
    assert reason_of(store.get, keys(2, 3)) is Reason.DOWN


@pytest.mark.parametrize(
    ("code", "reason"),
    [(errno.EIO, Reason.UNREADABLE), (errno.EISDIR, Reason.UNREADABLE), (errno.EACCES, Reason.DENIED)],
)
def test_a_page_that_cannot_be_read_is_no_fault_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: Reason
) -> None:
    store = make(tmp_path, 1, 2, 3)
    FailingReads(monkeypatch, 2, code)
    first, second, third = store.get(keys(1, 2, 3))
    assert (first, third) == (page(1), page(3))
    assert isinstance(second, PageError)
    assert second.reason is reason


def test_a_path_that_cannot_be_a_folder_is_down(tmp_path: Path) -> None:
    (tmp_path / "l3").write_text("a file")
    store = FileStore(tmp_path / "l3", MIN_QUOTA)
    assert store.get(keys(1)) == [None]
    assert reason_of(store.put, key(1), page(1)) is Reason.DOWN


@pytest.mark.parametrize("damage", ["rubbish", "zeros", "deleted", "other"])
def test_a_damaged_index_is_made_anew_from_the_folder(tmp_path: Path, damage: str) -> None:
    """It does not matter whether the store had it open. The pages stay, and so does the quota."""
    store = make(tmp_path, *range(FITS))
    path = tmp_path / "l3" / f"v{VERSION}" / "index.db"
    contents = {"rubbish": b"not an index " * 999, "zeros": bytes(4096), "other": b""}
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(contents[damage])
    for number in range(10, 13):
        store.put(key(number), page(number))
    fresh = make(tmp_path, 13)
    assert kept(fresh, range(14)) == [4, 5, 6, 7, 8, 10, 11, 12, 13]
    assert disk_bytes(tmp_path) <= MIN_QUOTA


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "l3" / f"v{VERSION}" / "ab"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    make(tmp_path, *range(30))
    assert (folder / "notes.txt").read_text() == "mine"
