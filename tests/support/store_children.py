"""Child processes of the store tests: `python -m tests.support.store_children COMMAND URL ARGUMENT`.

Rules: a child says what it saw in its exit status and on stdout; it imports no torch and starts fast.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hotprefix.engine.stores.file import FileStore
from hotprefix.engine.stores.index import FileIndex
from hotprefix.engine.stores.open_store import open_store
from hotprefix.engine.stores.worker import StoreWorker
from hotprefix.engine.stores.worker_config import WorkerConfig
from tests.support.stores import PATIENCE_S, key, keys, payload

SIZE = 100_000


def raw_page(number: int) -> bytes:
    return number.to_bytes(2, "little") * (SIZE // 2)


def disk_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def check_pages(root: Path, numbers: range) -> int:
    """Every page is whole; how many there are."""
    pages = FileStore(root, 1 << 30).get([key(number) for number in numbers])
    for number, page in zip(numbers, pages, strict=True):
        assert page in (None, raw_page(number)), f"page {number} is damaged"
    return sum(page is not None for page in pages)


def fill(url: str, first: str) -> None:
    """Put 40 pages from number `first` on, a few of them shared with the other children."""
    store = open_store(url)
    for number in range(40):
        shared = number % 4 == 0
        chosen = number if shared else int(first) + number
        store.put(key(chosen), raw_page(chosen))
        store.touch(keys(chosen))


def save(url: str, count: str) -> None:
    """Put `count` pages through a worker."""
    worker = StoreWorker(open_store(url), WorkerConfig(page_bytes=SIZE))
    for number in range(int(count)):
        assert worker.submit_put(key(number), payload(number, SIZE))
    assert worker.drain(PATIENCE_S)
    assert worker.close() == 0


def load(url: str, count: str) -> None:
    """Fetch `count` + 1 pages through a worker; prints how many came right."""
    import threading

    ready = threading.Event()
    config = WorkerConfig(page_bytes=SIZE, timeout_s=PATIENCE_S)
    worker = StoreWorker(open_store(url), config, on_ready=ready.set)
    worker.submit_fetch("all", keys(*range(int(count) + 1)))
    assert ready.wait(PATIENCE_S)
    [fetched] = worker.poll()
    assert worker.close() == 0
    assert list(fetched.payloads) == [payload(n, SIZE) for n in range(len(fetched.payloads))]
    print(len(fetched.payloads), fetched.reason, hash("seed") % 1000)


class Fuse:
    """Kills its own process at the nth thing it does to the disk."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def step(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def arm(self) -> None:
        """Before every system event and SQL statement, and in the middle of every page written."""
        sys.addaudithook(self.step)
        real_write, real_change = Path.write_bytes, FileIndex.change

        def write_bytes(path: Path, data: bytes) -> int:
            real_write(path, data[: len(data) // 2])
            self.step()
            return real_write(path, data)

        def change(index: FileIndex) -> AbstractContextManager[None]:
            index._db.set_trace_callback(self.step)
            return real_change(index)

        setattr(Path, "write_bytes", write_bytes)  # noqa: B010
        setattr(FileIndex, "change", change)  # noqa: B010


def killed(root: str, first: str) -> None:
    """Fork writers that kill themselves one step later each time, until one gets through. Each begins
    on the folder that the last one left. Prints how many died."""
    deaths = 0
    while True:
        pid = os.fork()
        if pid == 0:
            store = FileStore(Path(root), 1 << 20)
            Fuse(deaths + 1).arm()
            for number in range(int(first) + deaths, int(first) + deaths + 2):
                store.put(key(number), raw_page(number))
            os._exit(0)
        if os.waitpid(pid, 0)[1] == 0:
            break
        deaths += 1
        assert disk_bytes(Path(root)) <= 1 << 20, f"over the quota after death {deaths}"
        check_pages(Path(root), range(int(first) + deaths + 2))
    print(deaths)


if __name__ == "__main__":
    {"fill": fill, "save": save, "load": load, "killed": killed}[sys.argv[1]](*sys.argv[2:])
