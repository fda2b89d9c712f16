"""Several processes on one folder: quota, kill -9 at every step, different hash seeds."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from hotprefix.engine.stores.envelope import VERSION
from hotprefix.engine.stores.file import FileStore
from tests.support.store_children import check_pages, disk_bytes, raw_page
from tests.support.stores import key

ROOT = Path(__file__).parents[2]
QUOTA = 10_000_000


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.store_children", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(child: subprocess.Popen[str]) -> str:
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    return output


def locked_disk_bytes(root: Path) -> int:
    """Between two writes of whichever process."""
    with (root / f"v{VERSION}" / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return disk_bytes(root)


def test_four_processes_keep_one_quota(tmp_path: Path) -> None:
    """160 pages of 100 kB by four writers into 10 MB."""
    root = tmp_path / "l3"
    children = [start("fill", f"file://{root}?quota={QUOTA}", 1000 * n) for n in range(1, 5)]
    seen = 0
    while any(child.poll() is None for child in children):
        if (root / f"v{VERSION}" / "lock").exists():
            seen = max(seen, locked_disk_bytes(root))
            assert seen <= QUOTA
    for child in children:
        finish(child)
    assert QUOTA * 0.9 < disk_bytes(root) <= QUOTA
    assert check_pages(root, range(5000)) >= 95


def test_a_writer_killed_at_any_step_leaves_whole_pages_and_a_quota_that_holds(tmp_path: Path) -> None:
    root = tmp_path / "l3"
    store = FileStore(root, 1 << 20)
    for number in range(12):
        store.put(key(number), raw_page(number))
    deaths = int(finish(start("killed", root, 100)))
    assert deaths > 30
    assert disk_bytes(root) <= 1 << 20
    check_pages(root, range(1000))
    for number in range(500, 509):
        store.put(key(number), raw_page(number))
        assert disk_bytes(root) <= 1 << 20
    assert check_pages(root, range(500, 509)) == 9
    assert not list(root.rglob("incoming"))


def test_processes_with_different_hash_seeds_share_pages(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/l3?quota=10MB"
    finish(start("save", url, 20, PYTHONHASHSEED="1"))
    outputs = [finish(start("load", url, 20, PYTHONHASHSEED=seed)).split() for seed in ("1", "2")]
    assert [output[:2] for output in outputs] == [["20", "missing"]] * 2
    assert outputs[0][2] != outputs[1][2]
