"""The kernel's own cost of one step: CPU microseconds of plan + commit, with no model behind it.

usage: python bench/kernel_step.py [--profile ORDER]

A full batch decodes while 200 requests wait behind it (prompts of 2,000 tokens that share a warm prefix of
1,024); then slots are free but pages are not, so that every step tries to admit. Target: 1 ms a step.
Process time; each row is the median, the 90th percentile and the maximum of its steps.
"""

from __future__ import annotations

import cProfile
import gc
import statistics
import sys
import time

from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import KernelConfig, Order
from hotprefix.kernel.kernel import Kernel
from hotprefix.kernel.plan import StepOutcome
from hotprefix.kernel.request import Request

WAITING = 200
STEPS = 300
PAGE = 16
COMMON = tk.encode(range(1024))


def prompt(n: int, length: int = 2000) -> bytes:
    return COMMON + tk.encode(range(5000 * n, 5000 * n + length - 1024))


class Timed:
    """A kernel, and the time each of its steps took."""

    def __init__(self, config: KernelConfig) -> None:
        self.kernel = Kernel(config)
        self.times: list[float] = []
        self._now = 0.0

    def submit(self, name: str, tokens: bytes, outputs: int) -> None:
        self.kernel.submit(Request(name, tokens, outputs), self._now)

    def step(self) -> None:
        self._now += 0.01
        start = time.process_time_ns()
        plan = self.kernel.plan(self._now)
        chunks = tuple(plan.chunks)  # as a driver has them written out
        planned = time.process_time_ns()
        outcome = StepOutcome(sampled={c.request: 7 for c in chunks if c.samples})
        resumed = time.process_time_ns()
        if plan.chunks:
            self.kernel.commit(plan, outcome, self._now)
        self.times.append((time.process_time_ns() - resumed + planned - start) / 1000)


def scenario(order: Order, running: int, slots: int) -> Timed:
    """`running` requests decode, 200 wait. slots > running: pages for one more request are lacking."""
    pages = 64 + running * 181 + 60  # each runs to 3,919 positions; a waiting one needs 98 pages of its own
    config = KernelConfig(
        total_pages=pages, page_size=PAGE, max_running=slots, order=order, output_reserve=1.0
    )
    timed = Timed(config)
    for n in range(running):
        timed.submit(f"running{n}", prompt(n), 16 * 120)
    while timed.kernel.status().waiting or len(timed.times) < 40:
        timed.step()
    for n in range(WAITING):
        timed.submit(f"waiting{n}", prompt(1000 + n), 600)
    for _ in range(5):
        timed.step()
    assert timed.kernel.status().running == running
    assert timed.kernel.status().waiting == WAITING
    timed.times.clear()
    return timed


def measure(order: Order, running: int, slots: int) -> None:
    timed = scenario(order, running, slots)
    gc.collect()
    gc.disable()
    for _ in range(STEPS):
        timed.step()
    gc.enable()
    assert timed.kernel.status().running == running
    ranked = sorted(timed.times)
    state = "slots full" if slots == running else "pages full"
    print(
        f"{order:9} {running:3} running, {WAITING} waiting, {state}: {statistics.median(ranked):7.0f} us"
        f"   (p90 {ranked[STEPS * 9 // 10]:6.0f}, max {ranked[-1]:6.0f}, n={STEPS})"
    )


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--profile":
        timed = scenario(Order(sys.argv[2]), 8, 64)
        with cProfile.Profile() as profile:
            for _ in range(STEPS):
                timed.step()
        profile.print_stats("tottime")
        return
    for running in (8, 64):
        for order in Order:
            measure(order, running, running)
            measure(order, running, running + 8)


if __name__ == "__main__":
    main()
