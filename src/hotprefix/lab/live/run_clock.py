"""The clocks that time a live run. Owns: `WallClock` and `CpuClock`.

Rules: seconds from 0 at the run's start, never backwards. `CpuClock` counts this thread's processor time, and
a wait moves it forward without waiting. So on a machine that other programs use too, it shows the time that
an engine on one CPU thread would take if it had the machine for itself.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def __call__(self) -> float: ...

    def wait_until(self, when: float) -> None:
        """Let time pass until `when`; does nothing if `when` is past."""
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
    """This thread's processor time, plus the waits that were skipped."""

    def __init__(self) -> None:
        self._zero = time.thread_time()

    def __call__(self) -> float:
        return time.thread_time() - self._zero

    def wait_until(self, when: float) -> None:
        self._zero -= max(0.0, when - self())


CLOCKS: dict[str, type[WallClock] | type[CpuClock]] = {"wall": WallClock, "cpu": CpuClock}
