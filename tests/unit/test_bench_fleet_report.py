"""The fleet bench's figures: what runs come to, what is not measured, and the page that shows it."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hotprefix import cli
from hotprefix.bench.fleet_cells import COUNT_HEADS, TIME_HEADS, count_cells, ratio, time_cells
from hotprefix.bench.fleet_drive import FleetRecord, Played
from hotprefix.bench.fleet_page import render
from hotprefix.bench.fleet_summary import FleetRun, FleetSummary, p95, summarise
from hotprefix.bench.fleet_tables import print_workload
from hotprefix.bench.fleet_workloads import QUICK, FleetName, build
from hotprefix.errors import InputError
from tests.support.material import SyntheticMaterial
from tests.unit.test_bench_report import Checker
from tests.unit.test_bench_report import summary as bench_summary


def state(retries: int, **more: int) -> dict[str, Any]:
    pool = {"retries": retries, "copied_tokens": {"queue": 2 * retries}, **more}
    return {"pools": [pool], "workers": [{"name": n, "requests": 3 * retries} for n in ("a", "b")]}


def run(name: FleetName, slow: float = 1.0, lost: int = 0, **more: int) -> FleetRun:
    """Every request but the lost ones computed all but 16 tokens of its prompt."""
    workload = build(name, SyntheticMaterial(), QUICK, "0", "salt")
    records = [
        FleetRecord(s.id, len(s.prompt), 16, slow * (1 + at), slow * (2 + at))
        for at, s in enumerate(workload.submissions)
    ]
    records[:lost] = [FleetRecord(str(at), lost="gone") for at in range(lost)]
    return FleetRun(workload, Played(tuple(records), 9.0), state(1), state(3, **more))


def test_counts_are_of_each_run() -> None:
    runs = [run(FleetName.BURST), run(FleetName.BURST, lost=1)]
    (arm,) = summarise({"x": runs}, 16).arms
    assert arm.requests == 8
    assert arm.prompt_tokens == (8 * 532, 7 * 532)
    assert arm.reused_tokens == (8 * 16, 7 * 16)
    assert arm.computed_tokens == (8 * 516, 7 * 516)
    # Two groups of four; a follower shares 33 whole pages of 16 and computes the last 4 tokens.
    assert arm.required_tokens == (2 * (532 + 3 * 4),) * 2
    assert arm.duplication == (8 * 516 / 1088, None)
    assert (arm.lost, arm.retries, arm.copied_tokens) == ((0, 1), (2, 2), (4, 4))
    assert arm.by_worker == ((6, 6), (6, 6))


def test_what_was_not_measured_is_null() -> None:
    (arm,) = summarise({"x": [run(FleetName.KILLED)]}, 16).arms
    assert arm.duplication == (None,)
    assert arm.migrations is None
    everything = run(FleetName.KILLED, lost=8)
    (arm,) = summarise({"x": [everything]}, 16).arms
    assert arm.mean_ttft_s.model_dump() == {"runs": (None,), "mean": None, "ratios": (None,), "ratio": None}


def test_migrations_are_told_if_the_router_counts_them() -> None:
    def counted(went_on: int) -> list[dict[str, object]]:
        return [
            {"reason": "cut", "outcome": "resumed", "count": went_on},
            {"reason": "cut", "outcome": "no_worker", "count": 3},
        ]

    one = run(FleetName.KILLED, migrations=counted(5))
    before = {**one.before, "pools": [{**one.before["pools"][0], "migrations": counted(1)}]}
    (arm,) = summarise({"x": [FleetRun(one.workload, one.played, before, one.after)]}, 16).arms
    assert arm.migrations == (4,)


def test_times_are_compared_run_by_run() -> None:
    base = [run(FleetName.BURST), run(FleetName.BURST, 10.0), run(FleetName.BURST, 4.0)]
    ours = [run(FleetName.BURST, 0.5), run(FleetName.BURST, 9.0), run(FleetName.BURST, 1.0)]
    first, second = summarise({"base": base, "ours": ours}, 16).arms
    assert second.mean_ttft_s.ratios == pytest.approx((0.5, 0.9, 0.25))
    assert second.p95_ttft_s.runs == pytest.approx((4.0, 72.0, 8.0))
    assert (ratio(first.mean_ttft_s).text, ratio(second.mean_ttft_s).text) == ("–", "0.50 [0.25..0.90]")
    assert ratio(second.mean_ttft_s).tone == "good"
    mixed = summarise({"base": base, "ours": [ours[0], base[1], run(FleetName.BURST, 5.0)]}, 16).arms[1]
    assert ratio(mixed.mean_ttft_s).tone == ""


def test_the_nearest_rank() -> None:
    assert [p95(range(1, n + 1)) for n in (1, 19, 20, 21)] == [1, 19, 19, 20]


def test_shapes_are_equal_for_all_arms_and_texts_are_not() -> None:
    for name in FleetName:
        one, other = (build(name, SyntheticMaterial(), QUICK, "3", salt) for salt in ("a", "b"))
        assert [line.start_s for line in one.lines] == [line.start_s for line in other.lines]
        assert [len(s.prompt) for s in one.submissions] == [len(s.prompt) for s in other.submissions]
        assert not {s.prompt for s in one.submissions} & {s.prompt for s in other.submissions}
        assert one != build(name, SyntheticMaterial(), QUICK, "4", "a") or name is FleetName.KILLED


def test_page_and_terminal_show_every_arm() -> None:
    result = summarise({"round_robin": [run(FleetName.BURST, 2.0)], "predicted": [run(FleetName.BURST)]}, 16)
    killed = summarise(
        {"round_robin": [run(FleetName.KILLED, 2.0, 8)], "predicted": [run(FleetName.KILLED)]}, 16
    )
    page = render(FleetSummary(setup=bench_summary().setup, workers=2, workloads=(result, killed)))
    checker = Checker()
    checker.feed(page)
    assert checker.stack == []
    assert all(head in page for head in (*COUNT_HEADS, *TIME_HEADS, "4.50 s", "0.50"))
    shown = Console(file=StringIO(), width=80)
    print_workload(shown, result)
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert all(word in text for word in ("round_robin", "predicted", "3.79", "0.50"))
    assert len(count_cells(result.arms[0])) == len(COUNT_HEADS)
    assert len(time_cells(result.arms[0])) == len(TIME_HEADS)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("fleet --workers 0", "--workers 0: give a whole number >= 1"),
        ("fleet --runs 0", "--runs 0: give a whole number >= 1"),
        ("fleet --paced nothing", "nothing"),
        ("burst --paced llama-3.1-8b.1xh100.fp8", "are for `bench fleet`"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(typed: str, says: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    error = CliRunner().invoke(cli.app, ["bench", *typed.split(), "--out", str(out)]).exception
    assert isinstance(error, InputError)
    assert says in str(error)
