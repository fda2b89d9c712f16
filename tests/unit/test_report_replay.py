"""The replay report: what must be on the page, and the same numbers beside it."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import polars as pl
import pytest
from rich.console import Console

from hotprefix.lab.experiment.result import ExperimentResult, Problem
from hotprefix.lab.metric_names import METRICS
from hotprefix.report.replay.charts import intervals, lines, stacked
from hotprefix.report.replay.lookup import Figure, Lookup
from hotprefix.report.replay.page import render
from hotprefix.report.replay.replay_summary import summary
from hotprefix.report.replay.words import change, large, signed, title, value
from hotprefix.report.replay.write_files import write
from tests.support.results import HYPOTHESES, demo


@pytest.fixture(scope="module")
def result() -> ExperimentResult:
    return demo()


@pytest.fixture(scope="module")
def written(result: ExperimentResult, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output folder, and what the terminal showed."""
    out, screen = tmp_path_factory.mktemp("replay") / "new", io.StringIO()
    write(result, out, Console(file=screen, width=100))
    return out, screen.getvalue()


@pytest.fixture(scope="module")
def page(written: tuple[Path, str]) -> str:
    return (written[0] / "report.html").read_text(encoding="utf-8")


class _Text(HTMLParser):
    """Visible text, ids, and whether every tag is closed."""

    void = frozenset({"meta", "br", "link", "path", "use", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [v for k, v in attrs if k == "id" and v]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [v for k, v in attrs if k == "id" and v]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.void:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


def read(page: str) -> _Text:
    found = _Text()
    found.feed(page)
    assert found.open == []
    return found


def test_the_answer_comes_first_with_each_claim_its_interval_and_verdict(page: str) -> None:
    text = " ".join(" ".join(read(page).words).split())
    assert (
        "Of 5 claims registered before the replay: 2 supported; 1 refuted; 1 inconclusive; 1 no effect"
        in text
    )
    assert text.index("Of 5 claims") < text.index(HYPOTHESES[0].claim) < text.index("What was compared")
    for one in HYPOTHESES:
        assert one.claim in text
    assert "Reused: rises, but cold TTFT p50: worse than tolerated." in text
    assert re.search(
        r"net L1 hit loss must fall by 5 % or more: 29\.7 % → 12\.5 %, −58 % \[−\d+, −\d+\] holds", text
    )
    assert "Less than 5 % would not pay for a switch." in text


def test_what_was_fixed_what_it_rests_on_and_how_to_repeat_it_are_there(page: str) -> None:
    text = " ".join(" ".join(read(page).words).split())
    for must in (
        "kernel.page_size", "L1 holds a third of the sessions alive.", "off (baseline)", "hot requests",
        "cold requests", "measured by hotprefix calibrate", "overall: median 4.2 %, p95 18.1 %",
        "bias +1.2 %", "generator agents(sessions=40)", "60.00 % of blocks", "closed loop",
        "They do not stand for a real GPU",
        "hotprefix replay refresh-off-on --seeds 3 --out DIR", "3f7a" * 16, "0.0.1", "method “linear”",
        "Bonferroni", "L2 L1 bandwidth", "2.1 GB/s",
        "calm, greedy, seed 2 (failed: MemoryError: out of <memory>)", "greedy & its <settings>",
        "Share of the clairvoyant bound", "Oldest waiting request, s",
    ):  # fmt: skip
        assert must in text, must


def test_the_page_needs_nothing_else(page: str) -> None:
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)
    assert "@import" not in page
    assert "<script" not in page
    assert "url(http" not in page
    assert 'name="viewport"' in page
    assert len(page) < 1_500_000


def test_charts_are_text_and_follow_the_pages_colours(page: str) -> None:
    svgs = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(svgs) > 15
    for svg in svgs:
        assert "<text" in svg
        assert not re.search(r"(fill|stroke): #(?!000000|ffffff)[0-9a-f]{6}", svg)
        assert "var(--" in svg
        named = set(re.findall(r'\bid="([^"]+)"', svg))
        assert set(re.findall(r'(?:url\(|href=")#([^")]+)', svg)) <= named
    ids = read(page).ids
    assert len(ids) == len(set(ids))


def test_the_same_result_gives_the_same_bytes(result: ExperimentResult, page: str) -> None:
    assert render(result) == page


def test_summary_json_is_the_contract(result: ExperimentResult, written: tuple[Path, str]) -> None:
    out, screen = written
    found = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert found == json.loads(json.dumps(summary(result), allow_nan=False))
    arm = found["conditions"]["thrash"]["arms"]["window"]
    assert arm["metrics"].keys() == METRICS.keys()
    loss = arm["changes"]["net_l1_hit_loss_share"]
    assert loss["interval"][0] < loss["difference"] < loss["interval"][1] < 0
    verdicts = {one["id"]: one["verdict"] for one in found["hypotheses"]}
    assert verdicts == {
        "loss": "supported", "service": "supported", "cold": "refuted", "calm": "as_expected",
        "tail": "inconclusive",
    }  # fmt: skip
    check = found["hypotheses"][0]["findings"][0]
    assert (check["metric"], check["state"], len(check["interval"])) == ("net_l1_hit_loss_share", "holds", 2)
    assert found["spec_hash"] == result.spec_hash
    assert found["problems"][0]["seed"] == 2
    assert "supported" in screen
    assert "net_l1_hit_loss_share: falls" in screen
    assert "out of <memory>" in screen


def test_csv_and_parquet_hold_the_same_numbers(result: ExperimentResult, written: tuple[Path, str]) -> None:
    out = written[0]
    names = {p.name for p in out.iterdir()}
    tables = ("metrics", "comparisons", "verdicts", "buckets", "windows")
    assert names == {"summary.json", "report.html"} | {f"{t}.{e}" for t in tables for e in ("csv", "parquet")}
    for table in tables:
        kept = pl.read_parquet(out / f"{table}.parquet")
        with (out / f"{table}.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == kept.height > 0
        assert list(rows[0]) == kept.columns
    kept = pl.read_parquet(out / "comparisons.parquet").filter(
        condition="thrash", arm="window", metric="reuse_share"
    )
    shown = summary(result)["conditions"]["thrash"]["arms"]["window"]["changes"]["reuse_share"]
    assert kept.select("difference", "low", "high").row(0) == (shown["difference"], *shown["interval"])


def test_a_result_without_runs_still_says_so(result: ExperimentResult) -> None:
    failed = tuple(Problem("thrash", "off", s, "failed", "boom") for s in result.seeds)
    empty = dataclasses.replace(
        result, metrics=result.metrics.clear(), comparisons={}, verdicts=(), buckets=result.buckets.clear(),
        windows=result.windows.clear(), bounds=(), problems=failed,
    )  # fmt: skip
    text = " ".join(" ".join(read(render(empty)).words).split())
    assert "No claims were registered" in text
    assert text.count("No run of this condition has a result.") == 2
    assert "3 of the runs have no result" in text
    json.dumps(summary(empty), allow_nan=False)


def test_what_lies_beyond_the_end_is_never_a_dash(result: ExperimentResult) -> None:
    at = (pl.col("arm") == "off") & (pl.col("seed") == 1) & (pl.col("metric") == "ttft_p99_s")
    changed = result.metrics.with_columns(value=pl.when(at).then(None).otherwise(pl.col("value")))
    figure = Lookup(dataclasses.replace(result, metrics=changed)).figure("thrash", "off", "ttft_p99_s")
    assert (figure.value, figure.beyond) == (None, True)
    assert value(figure.metric, figure.value, beyond=figure.beyond) == "> end"


@pytest.mark.parametrize(
    ("metric", "amount", "text"),
    [
        ("ttft_p95_s", 0.0421, "42 ms"), ("ttft_p95_s", 3.14159, "3.14 s"), ("reuse_share", 0.4215, "42.1 %"),
        ("net_l1_hit_loss_share", -0.063, "−6.3 %"), ("computed_tokens", 12_345_678.0, "12.3 M"),
        ("computed_tokens", 999.0, "999"), ("computed_tokens", 10_000.0, "10 k"),
        ("l2_l1_bytes", 3.2e9, "3.2 GB"), ("l2_l1_bytes", 512.0, "512 B"),
        ("l2_l1_bandwidth", 2.147e9, "2.1 GB/s"),
        ("duplication_factor", 1.4567, "1.46"), ("stalls", 0.0, "0"), ("stalls", None, "–"),
        ("goodput_rps", 0.1034, "0.103"), ("scheduler_share", 0.000123, "0.012 %"),
        ("scheduler_share", 0.0, "0.0 %"),
    ],
)  # fmt: skip
def test_values_are_written_in_their_unit(metric: str, amount: float | None, text: str) -> None:
    assert value(metric, amount) == text


def test_changes_carry_their_interval() -> None:
    assert change(Figure("stalls", 1.0, relative=-0.123, interval=(-0.2, -0.0456))) == "−12 % [−20, −4.6]"
    assert change(Figure("stalls", 1.0, relative=0.05)) == "+5.0 %"
    assert change(Figure("stalls", 1.0, relative=0.0)) == ""
    assert change(Figure("stalls", 1.0)) == ""
    assert signed(12.8) == "+1,280"
    assert large(2.5e12) == "2.5 T"
    assert title("cold.ttft_p95_s") == "cold TTFT p95"


def test_a_clear_change_is_coloured_by_which_way_is_better(result: ExperimentResult) -> None:
    lookup = Lookup(result)
    assert lookup.figure("thrash", "window", "net_l1_hit_loss_share").tone == "good"
    assert lookup.figure("thrash", "greedy", "cold.ttft_p50_s").tone == "bad"
    assert lookup.figure("thrash", "window", "ttft_p99_s").tone == ""
    assert lookup.figure("thrash", "window", "refresh_touches").tone == ""
    assert lookup.figure("thrash", "off", "reuse_share").tone == ""
    pair = result.comparisons["thrash", "window"]
    fewer = dataclasses.replace(pair["net_l1_hit_loss_share"], finished=(1.0, 0.9))
    told = {("thrash", "window"): {**pair, fewer.metric: fewer}}
    lookup = Lookup(dataclasses.replace(result, comparisons=told))
    assert lookup.figure("thrash", "window", "net_l1_hit_loss_share").tone == ""


def test_charts_take_extreme_and_missing_values() -> None:
    assert "far" in intervals("c", [("far", 40.0, -3.0, 90.0, "bad")], [(0.0,)])
    assert "none" in stacked("c", [("none", [0.0, 0.0])], [("x", 0), ("y", 9)])
    drawn = lines("c", {"a": ([1.0, 2.0, 4.0], [0.0, None, 3.0])}, "share", colors={"a": 11}, log_x=True)
    assert "nan" not in drawn
