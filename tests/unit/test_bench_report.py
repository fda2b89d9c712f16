"""The report is one self-contained, well-formed file that shows what the summary holds."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console

from hotprefix.bench.arms import arms, baseline
from hotprefix.bench.bench_summary import Figure, Setup, Summary, summarise
from hotprefix.bench.figure_cells import Cell, change, factor, spread
from hotprefix.bench.page import render
from hotprefix.bench.request_costs import Record
from hotprefix.bench.terminal_tables import print_workload
from hotprefix.bench.workloads import QUICK, Name, build
from hotprefix.report.figure_text import seconds, whole
from hotprefix.report.svg import Bar, bar_panel, extent
from tests.support.material import SyntheticMaterial

VOID = {"meta", "br", "rect", "line", "circle"}


def summary(model: str = "tiny", load: float | None = None) -> Summary:
    results = []
    for w in build(tuple(Name), SyntheticMaterial(), QUICK):
        runs = {
            arm: [
                [
                    Record(s, 16 * at, len(s.prompt) - 16 * at, (1,), 0.1 + at, 0.2 + at + turn / 9, 2.0)
                    for s in w.submissions
                ]
                for turn in range(2)
            ]
            for at, arm in enumerate(arms(w.name, quick=True))
        }
        results.append(summarise(w, runs, baseline(w.name), 16, 64))
    setup = Setup(
        hotprefix="0", started="2026-01-01T00:00:00+00:00", model=model, dtype="float32", device="cpu",
        versions={"python": "3.11"}, machine="m", cpus=2, load_before=load, page_size=16,
        max_batched_tokens=2048, runs=2, quick=True, wall_s=1.0,
    )  # fmt: skip
    return Summary(setup=setup, workloads=tuple(results))


class Checker(HTMLParser):
    """Collects tags and checks that they nest."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.stack.pop() == tag


@pytest.fixture(scope="module")
def page() -> str:
    return render(summary())


def test_report_nests_and_needs_nothing_from_outside(page: str) -> None:
    checker = Checker()
    checker.feed(page)
    assert checker.stack == []
    tags = {tag for tag, _ in checker.seen}
    assert not tags & {"script", "link", "img", "iframe", "object"}
    for _, attrs in checker.seen:
        assert "src" not in attrs
        assert str(attrs.get("href", "#")).startswith("#")
    assert not re.search(r"https?://|url\(|@import", page)


def test_report_shows_every_workload_arm_and_group(page: str) -> None:
    for workload in summary().workloads:
        assert f'id="{workload.workload}"' in page
        for group in workload.groups:
            assert group.group in page
            assert all(arm.arm in page for arm in group.arms)
    assert page.count("<svg") == sum(
        2 * (len(w.groups) if len(w.groups[0].arms) > 3 else len(w.groups[0].arms))
        for w in summary().workloads
    )


def test_report_escapes_what_it_is_given() -> None:
    page = render(summary(model="<script>x</script>"))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_report_warns_of_a_busy_machine() -> None:
    assert "load 1.5 on 2 CPUs" in render(summary(load=1.5))
    assert "was busy" not in render(summary(load=0.5))
    assert "was busy" not in render(summary(load=None))


def test_bars_are_proportional_start_at_zero_and_fit() -> None:
    bars = [Bar("a", 2.0, "2"), Bar("b", 1.0, "1", sd=0.5, points=(0.5, 1.5)), Bar("c", 0.0, "0")]
    svg = bar_panel("n", bars, top=extent(bars), reference=2.0)
    wide, half, none = (float(w) for w in re.findall(r'<rect [^>]*width="([\d.]+)"', svg))
    assert wide == pytest.approx(2 * half)
    assert none == 1.0
    assert max(float(x) for x in re.findall(r'(?:x2|cx)="([\d.]+)"', svg)) <= 360
    assert f'x1="{wide:.1f}" x2="{wide:.1f}"' in svg


def test_a_change_within_the_spread_makes_no_claim() -> None:
    base = Figure(runs=(1.0, 1.2), mean=1.1, sd=0.1, change=0.0)
    near = Figure(runs=(1.0, 1.0), mean=1.0, sd=0.05, change=-0.09)
    far = Figure(runs=(0.5, 0.5), mean=0.5, sd=0.0, change=-0.55)
    slow = Figure(runs=(2.0, 2.0), mean=2.0, sd=0.0, change=0.82)
    single = Figure(runs=(0.5,), mean=0.5, sd=None, change=-0.55)
    assert change(near, base) == Cell("−9 %")
    assert change(far, base) == Cell("−55 %", "good")
    assert change(slow, base) == Cell("+82 %", "bad")
    assert change(single, base) == Cell("−55 %")
    assert change(base, base) == Cell("–")


def test_wording_of_figures() -> None:
    assert [seconds(s) for s in (0.0004, 0.412, 0.9996, 12.3456)] == ["0 ms", "412 ms", "1.00 s", "12.35 s"]
    assert spread(Figure(runs=(1.0,), mean=1.0, sd=None, change=None)) == "1.00 s"
    assert spread(Figure(runs=(1.0, 2.0), mean=1.5, sd=0.707, change=None)) == "1.50 ± 0.71 s"
    assert spread(Figure(runs=(0.1, 0.2), mean=0.15, sd=0.0707, change=None)) == "150 ± 71 ms"
    assert [whole(v) for v in (None, 528.0, 1234.5)] == ["–", "528", "1,234.5"]
    assert factor(None) == "–"


def test_terminal_tables_fit_80_columns_and_hold_every_arm() -> None:
    for result in summary().workloads:
        text = StringIO()
        print_workload(Console(file=text, width=80), result)
        lines = text.getvalue().splitlines()
        assert "…" not in text.getvalue()
        for arm in result.groups[0].arms:
            rows = [line for line in lines if line.strip().startswith(arm.arm)]
            assert len(rows) == 2 * len(result.groups)
