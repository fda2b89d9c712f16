"""Time in a file. Owns: turning a format's timestamps into seconds, and requests into order of arrival.

Rules:
1. A format declares its unit of time, and the caller may override it. A number that cannot be of that unit is
   an error, never a guess. Every line is checked, because the unit may change in the middle of a file.
2. Arrivals count from the first request, so absolute and relative timestamps give the same trace.
3. Requests are sorted by arrival; equal arrivals keep their order. The sort looks WINDOW requests ahead,
   because logs that are written at completion are slightly out of order. A file that is more out of order
   than that must be sorted first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, Literal

from hotprefix.lab.trace.problems import BadTrace, Report
from hotprefix.lab.trace.trace_request import TraceRequest

Unit = Literal["s", "ms", "us", "ns"]
PER_SECOND: Final[dict[str, int]] = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}
WINDOW: Final = 1024
UNIX_SECONDS: Final = range(10**9, 5 * 10**9)  # 2001 to 2128
_UNIX: Final = {
    unit: range(UNIX_SECONDS.start * per, UNIX_SECONDS.stop * per) for unit, per in PER_SECOND.items()
}


class Clock:
    """Seconds from a file's numbers. unit: declared by the caller; None: the format's own (`usual`), and
    numbers that do not look like it are refused."""

    def __init__(self, unit: Unit | None, usual: Unit) -> None:
        self._guard = unit is None
        self._unit = unit or usual
        self._origin: float | None = None
        self._largest = 0.0

    def seconds(self, stamp: float, field: str) -> float:
        """Seconds since the first stamp. Raises ValueError if the stamp is negative or its unit unclear."""
        if stamp < 0:
            raise ValueError(f"{field}: {stamp} is negative")
        if self._guard:
            self._check(stamp, field)
        self._largest = max(self._largest, stamp)
        if self._origin is None:
            self._origin = stamp
        return (stamp - self._origin) / PER_SECOND[self._unit]

    def _check(self, stamp: float, field: str) -> None:
        """Raises ValueError unless the stamp can be of the file's unit, and all stamps so far can be of one
        unit.

        A number in the range of Unix seconds is taken for Unix seconds, unless the stamps before it have led
        up to it: a relative clock in ms passes 10^9 after twelve days, but not in one leap from below half of
        that.
        """
        own = _UNIX[self._unit]
        absolute = self._origin is not None and int(self._origin) in own
        if self._unit != "s" and stamp != int(stamp):
            raise self._unclear(field, stamp, "has a fraction")
        if absolute and int(stamp) not in own:
            raise self._unclear(field, stamp, f"is no Unix time in {self._unit}, as the first is")
        if absolute or stamp <= 2 * self._largest <= 4 * stamp:
            return
        for unit, span in _UNIX.items():
            if int(stamp) in span and (unit != self._unit or self._origin is not None):
                raise self._unclear(field, stamp, f"would be Unix time in {unit}")

    def _unclear(self, field: str, stamp: float, why: str) -> ValueError:
        return ValueError(
            f"{field}: {stamp} {why}, but this file counts {self._unit}: say which unit it is (--time-unit)"
        )


def in_order(requests: Iterator[TraceRequest], report: Report) -> Iterator[TraceRequest]:
    """Requests by arrival; equal arrivals keep their order. `report` counts the requests that were moved.
    Raises BadTrace if a request comes more than WINDOW requests too late."""
    waiting: list[tuple[float, int, TraceRequest]] = []
    newest = last = float("-inf")
    for number, request in enumerate(requests):
        arrival = _arrival(request)
        report.reordered += arrival < newest
        newest = max(newest, arrival)
        if arrival < last:
            raise BadTrace(
                f"request {request.id}: arrives {newest - arrival:.6g} s before one that stands more than "
                f"{WINDOW} requests earlier; sort the file by time",
                param="trace",
            )
        heapq.heappush(waiting, (arrival, number, request))
        if len(waiting) > WINDOW:
            last, _, first = heapq.heappop(waiting)
            yield first
    while waiting:
        yield heapq.heappop(waiting)[2]


def from_zero(requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    """The requests with arrivals counted from the first one."""
    origin: float | None = None
    for request in requests:
        arrival = _arrival(request)
        origin = arrival if origin is None else origin
        yield replace(request, arrival_s=arrival - origin) if origin else request


def _arrival(request: TraceRequest) -> float:
    assert request.arrival_s is not None, "only traces of arrivals are sorted"
    return request.arrival_s
