"""The real kernel and simulator, compiled and interpreted: the same log and tables, byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hotprefix
from hotprefix import compiled
from hotprefix.commands.compile import build

SCRIPT = """
import json, sys
from pathlib import Path
import hotprefix.kernel.kernel, hotprefix.lab.sim.instance
from hotprefix.kernel.config import *
from hotprefix.cost.model import Link, Links
from hotprefix.cost.presets import load_cost
from hotprefix.lab.sim.replay import Replay
from hotprefix.lab.sim.simulate import simulate
from hotprefix.lab.sim.arrivals import Loop
from hotprefix.lab.trace.open_trace import open_trace

folder = Path(sys.argv[1])
link = Link(latency_s=1e-4, bytes_per_s=1e9)
host = TierConfig(pages=4000, storage=True)
for name, options in {
    "plain": {"flight": Flight.COALESCED, "refresh": Refresh.QUEUE_INFORMED},
    "tiers": {"tiers": host, "eviction": Eviction.REUSE},
    "ordered": {"order": Order.PRIORITY, "preemption": True, "eviction": Eviction.SIEVE},
    "exact": {"flight": Flight.EXACT_PREFILL, "publication": Publication.PREFILL, "order": Order.LPM},
}.items():
    kernel = KernelConfig(total_pages=3000, page_size=64, max_batched_tokens=2048, max_running=16, **options)
    replay = Replay(
        kernel, load_cost("llama-3.1-8b.1xh100.fp8"), instances=2, loop=Loop.CLOSED, concurrency=12,
        links=Links(save=link, restore=link, put=link, fetch=link),
        log=folder / f"{name}.log",
    )
    tables = simulate(replay, open_trace("sample:agents"), block_size=64)
    tables.requests.write_csv(folder / f"{name}.csv")
print(json.dumps([hotprefix.kernel.kernel.__file__, hotprefix.lab.sim.instance.__file__]))
"""


@pytest.mark.slow
def test_compiled_and_interpreted_write_the_same_bytes(tmp_path: Path) -> None:
    package = Path(hotprefix.__file__).parent
    cache = tmp_path / "hotprefix" / "compiled"
    cache.mkdir(parents=True, mode=0o700)
    build(package, cache / compiled.digest(package), optimise=0)
    written = {}
    for interpreted in ("0", "1"):
        folder = tmp_path / f"interpreted-{interpreted}"
        folder.mkdir()
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HOTPREFIX_INTERPRETED": interpreted}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(folder)], env=env, capture_output=True, text=True, check=False
        )
        assert not done.returncode, done.stderr
        ours = [Path(file).suffix == ".py" for file in json.loads(done.stdout)]
        assert ours == [interpreted == "1"] * 2
        written[interpreted] = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    assert len(written["0"]) == 8
    assert all(written["0"].values())
    assert written["0"] == written["1"]
