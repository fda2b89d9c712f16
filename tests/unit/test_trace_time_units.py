"""The unit of timestamps is checked in every line: a number that can only be of another unit is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotprefix.lab.trace.open_trace import open_trace
from hotprefix.lab.trace.problems import BadTrace
from tests.support.traces import mooncake, row, session, write_lines

S = 1_764_000_000
DAY_MS = 86_400_000


def arrivals(tmp_path: Path, *stamps: float, **options: object) -> list[float | None]:
    path = write_lines(tmp_path / "m.jsonl", [mooncake(timestamp=stamp) for stamp in stamps])
    return [request.arrival_s for request in open_trace(path, **options)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stamps", "line", "says"),
    [
        ([S, S + 1], 1, "would be Unix time in s"),
        ([S * 10**6, S * 10**6 + 1], 1, "would be Unix time in us"),
        ([S * 10**9, S * 10**9 + 1], 1, "would be Unix time in ns"),
        ([0, S], 2, "would be Unix time in s"),
        ([0, 500, S * 10**3], 3, "would be Unix time in ms"),
        ([0, S * 10**6], 2, "would be Unix time in us"),
        ([0, 10, S * 10**9], 3, "would be Unix time in ns"),
        ([S * 10**3, S], 2, "is no Unix time in ms, as the first is"),
        ([S * 10**3, 500], 2, "is no Unix time in ms, as the first is"),
        ([S * 10**3, S * 10**6], 2, "is no Unix time in ms, as the first is"),
        ([0, 5, 5.5], 3, "has a fraction"),
    ],
)
def test_a_stamp_of_another_unit_is_refused(
    tmp_path: Path, stamps: list[float], line: int, says: str
) -> None:
    with pytest.raises(BadTrace, match=rf"line {line}: timestamp: .* {says}.*--time-unit"):
        arrivals(tmp_path, *stamps)


def test_relative_times_may_grow_past_what_would_be_unix_time(tmp_path: Path) -> None:
    """A month in ms passes 10^9 after twelve days, step by step. It may do so a little out of order."""
    days = [0, 3, 6, 11, 12, 11.9, 14, 20, 30]
    found = arrivals(tmp_path, *(int(day * DAY_MS) for day in days))
    assert found == [86400.0 * day for day in sorted(days)]


def test_absolute_times_count_from_the_first(tmp_path: Path) -> None:
    assert arrivals(tmp_path, S * 1000, S * 1000 + 1) == [0.0, 0.001]


def test_a_unit_that_the_caller_declares_is_taken(tmp_path: Path) -> None:
    assert arrivals(tmp_path, S * 10**6, S * 10**6 + 10**6, time_unit="us") == [0.0, 1.0]
    assert arrivals(tmp_path, 0, S, time_unit="ms") == [0.0, S / 1000]


def test_times_inside_a_session_are_no_dates(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", [session([row(float(S))])])
    with pytest.raises(BadTrace, match=r"rows.0.t: 1764000000.0 looks like Unix time"):
        list(open_trace(path))
