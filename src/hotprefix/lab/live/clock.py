"""What a live run is timed by. Owns: `WallClock` and `CpuClock`.

Rules: seconds from 0 at the run's start, never backwards. `CpuClock` is this thread's processor time, and
waiting skips time instead of taking it: on a machine that others use, that is what an engine on one CPU
thread takes when it has the machine for itself.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def __call__(self) -> float: ...

    def wait_until(self, when: float) -> None:
        """Let time pass to `when` (nothing if that is over)."""
        ...


class WallClock:
    """Real time."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._zero

    def wait_until(self, when: float) -> None:
        time.sleep(max(0.0, when - self()))


class CpuClock:
    """Processor time and skipped waits."""

    def __init__(self) -> None:
        self._zero = time.thread_time()

    def __call__(self) -> float:
        return time.thread_time() - self._zero

    def wait_until(self, when: float) -> None:
        self._zero -= max(0.0, when - self())


CLOCKS: dict[str, type[WallClock] | type[CpuClock]] = {"wall": WallClock, "cpu": CpuClock}
