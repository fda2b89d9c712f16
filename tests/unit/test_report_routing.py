"""The routing section of the replay report: its figures against a recount from the runs' own tables."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import polars as pl
import pytest
from rich.console import Console

from hotprefix.lab.experiment.load import Changes, load
from hotprefix.lab.experiment.one_run import run
from hotprefix.lab.experiment.result import ExperimentResult, FleetRun
from hotprefix.lab.experiment.run_plan import plan
from hotprefix.report.replay import charts, fleet_tables, routing
from hotprefix.report.replay.lookup import Lookup
from hotprefix.report.replay.page import render
from hotprefix.report.replay.replay_summary import summary
from hotprefix.report.replay.routing import routing_section
from hotprefix.report.replay.words import amount_of, value
from tests.support.experiments import in_this_process

Runs = dict[tuple[str, str], list[Path]]  # (condition, arm) -> the folders of its runs, by seed
FILE = """
name = "two"
question = "Which instance?"
baseline = "round_robin"
seeds = 2
cost = "llama-3.1-8b.1xh100.fp8"
window_s = 2
[trace]
generate = "skew"
[trace.params]
requests = 60
rate = 20.0
keys = 4
prefix = 1024
question = 64
output = 64
[cluster]
failures = [{ worker = 1, at_s = 1.5, back_s = 2.0 }]
[capacity]
size = 8192
[factors]
"cluster.policy" = ["round_robin", "predicted"]
[[conditions]]
name = "fleet"
set = { "cluster.instances" = 2 }
[[conditions]]
name = "alone"
set = { "cluster.failures" = [] }
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[ExperimentResult, Runs]:
    folder = tmp_path_factory.mktemp("two")
    (folder / "two.toml").write_text(FILE)
    experiment = load(str(folder / "two.toml"), Changes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotprefix.lab.experiment.one_run.sweep", in_this_process)
        found = run(experiment, folder / "out", Console(quiet=True, stderr=True), jobs=1)
    tasks = plan(experiment).runs
    return found, {place: [folder / "out" / "runs" / t.key for t in some] for place, some in tasks.items()}


def rows(folder: Path, table: str) -> list[dict[str, Any]]:
    return pl.read_parquet(folder / f"{table}.parquet").to_dicts()


def section(result: ExperimentResult) -> dict[str, Any]:
    return routing_section(result, Lookup(result), "fleet")


def column(table: dict[str, Any], head: str, arm: str) -> str:
    """The first row of an arm: that of all requests, where there are groups."""
    at = table["heads"].index(head)
    return next(row["cells"][at].text for row in table["rows"] if row["cells"][0].text == arm)


def test_where_hits_went_is_what_the_decisions_say(done: tuple[ExperimentResult, Runs]) -> None:
    result, runs = done
    table = section(result)["tables"][1]
    assert table["heads"] == ["arm", "available", "captured", "delivered"]
    for arm in ("round_robin", "predicted"):
        shares = defaultdict(list)
        for folder in runs["fleet", arm]:
            last = {row["id"]: row for row in rows(folder, "routes")}  # of a request, the last decision
            came = {r["id"]: r["cached_l1"] + (r["cached_l2"] or 0) for r in rows(folder, "requests")}
            assert last.keys() == came.keys()
            assert all(row["delivered_tokens"] in (None, came[name]) for name, row in last.items())
            tokens = sum(row["prompt_tokens"] for row in last.values())
            tiers = ("l1", "l2", "l3", "flight", "peer")
            captured = sum(row[f"found_{tier}"] for row in last.values() for tier in tiers)
            shares["available"].append(sum(row["available_tokens"] for row in last.values()) / tokens)
            shares["captured"].append(captured / tokens)
            shares["delivered"].append(sum(came.values()) / tokens)
        assert len({round(mean(some), 3) for some in shares.values()}) == 3
        for head, some in shares.items():
            assert column(table, head, arm) == value("reuse_share", mean(some)), (arm, head)


def test_copied_tokens_are_summed_by_the_reason_of_the_decision(done: tuple[ExperimentResult, Runs]) -> None:
    result, runs = done
    table, reasons = section(result)["tables"][0], set()
    for arm in ("round_robin", "predicted"):
        copied: dict[str, float] = defaultdict(float)
        for folder in runs["fleet", arm]:
            for row in rows(folder, "routes"):
                if row["copying"] is not None:
                    copied[row["copying"]] += row["copied_tokens"] / 2
        assert copied
        reasons |= set(copied)
        for reason, tokens in copied.items():
            head = f"copied: {reason.replace('_', ' ')}"
            assert column(table, head, arm) == amount_of("tokens", tokens)
        assert summary(result)["conditions"]["fleet"]["arms"][arm]["copied_by_reason"] == copied
    assert len([head for head in table["heads"] if head.startswith("copied")]) == len(reasons) > 1
    assert column(table, "copied: by rule", "predicted") == "0"


def test_the_other_figures_equal_a_recount_of_the_requests(done: tuple[ExperimentResult, Runs]) -> None:
    result, runs = done
    table = section(result)["tables"][0]
    for arm in ("round_robin", "predicted"):
        figures = defaultdict(list)
        for folder in runs["fleet", arm]:
            requests, busy = rows(folder, "requests"), defaultdict(float)
            figures["TTFT mean"].append(mean(r["first_token_s"] - r["arrival_s"] for r in requests))
            figures["failed over"].append(sum(r["failovers"] > 0 for r in requests))
            figures["prediction bias"].append(mean(
                r["predicted_first_s"] - (r["first_token_s"] - r["arrival_s"])
                for r in requests if not r["failovers"]
            ))  # fmt: skip
            took = defaultdict(list)
            for r in requests:
                took[r["instance"]].append(r["first_token_s"] - r["arrival_s"])
            worst = max(float(np.percentile(some, 95)) for some in took.values())
            figures["worst instance TTFT p95"].append(worst)
            for window in rows(folder, "windows"):
                busy[window["instance"]] += window["prefill_s"] + window["decode_s"]
            figures["load imbalance"].append(max(busy.values()) / mean(busy.values()))
        assert mean(figures["failed over"]) > 0
        names = {"TTFT mean": "ttft_mean_s", "failed over": "failed_over", "load imbalance": "load_imbalance",
                 "prediction bias": "prediction_bias_s",
                 "worst instance TTFT p95": "worst_instance_ttft_p95_s"}  # fmt: skip
        for head, some in figures.items():
            assert column(table, head, arm) == value(names[head], mean(some)), (arm, head)


def test_charts_show_the_first_seed(
    done: tuple[ExperimentResult, Runs], monkeypatch: pytest.MonkeyPatch
) -> None:
    result, runs = done
    drawn: list[int] = []
    for name in ("predictions", "loads"):
        real = getattr(fleet_tables, name)
        monkeypatch.setattr(routing, name, lambda run, real=real: drawn.append(run.seed) or real(run))
    titles = [panel["title"] for panel in section(result)["panels"]]
    assert drawn == [1, 1, 1]
    load_titles = [f"Load by instance (1 = as much as it should have): {arm.name}" for arm in result.arms]
    assert titles == ["From the choice to the first token, predicted and actual: predicted", *load_titles]
    folder, first = runs["fleet", "predicted"][0], result.fleets["fleet", "predicted"][0]
    pairs = [(r["first_s"], r["actual_first_s"]) for r in rows(folder, "routes")]
    assert fleet_tables.predictions(first) == [pair for pair in pairs if pair[1] is not None]
    lines, many = fleet_tables.loads(first)
    assert not many
    for n in range(2):
        mine = [r for r in rows(folder, "loads") if r["instance"] == n]
        assert lines[f"instance {n}"] == ([r["start_s"] for r in mine], [r["load"] for r in mine])


def test_the_claims_stay_first_and_one_instance_has_no_section(done: tuple[ExperimentResult, Runs]) -> None:
    result, _ = done
    assert routing_section(result, Lookup(result), "alone") == {}
    assert {place[0] for place in result.fleets} == {"fleet"}
    page = render(result)
    assert page.count("<h3>Routing</h3>") == page.count("<h3>Where hits went</h3>") == 1
    assert page.index("No claims were registered") < page.index("<h3>Routing</h3>")
    assert re.findall(r'aria-label="(?:predictions|load) (\w+)', page) == ["fleet"] * 3
    assert render(result) == page
    alone = summary(result)["conditions"]["alone"]["arms"]["predicted"]
    assert alone["copied_by_reason"] == {}
    json.dumps(summary(result), allow_nan=False)


def test_many_instances_are_a_band_and_many_decisions_a_sample(
    done: tuple[ExperimentResult, Runs],
) -> None:
    spread = pl.DataFrame({
        "instance": list(range(21)) * 2, "start_s": [0.0] * 21 + [30.0] * 21,
        "load": [n / 10 for n in range(21)] + [1.0] * 21,
    })  # fmt: skip
    both = pl.DataFrame({"first_s": [float(n) for n in range(1201)], "actual_first_s": [1.0] * 1200 + [None]})
    both = both.with_columns(copying=pl.lit("by_rule"), copied_tokens=10)
    some = FleetRun(1, both.lazy(), spread.lazy())
    lines, many = fleet_tables.loads(some)
    assert many
    for name, first in (("p5", 0.1), ("median", 1.0), ("highest", 2.0)):
        assert lines[name] == ([0.0, 30.0], [pytest.approx(first), 1.0])
    points = fleet_tables.predictions(some)
    assert points == [(float(n), 1.0) for n in range(1, 1200, 3)]
    assert len(points) <= fleet_tables.POINTS
    shown = section(dataclasses.replace(done[0], fleets={("fleet", "predicted"): (some,)}))
    assert column(shown["tables"][0], "copied: by rule", "predicted") == "12 k"
    assert [row["cells"][0].text for row in shown["tables"][0]["rows"]] == ["predicted"]
    dots, band = (panel["svg"] for panel in shown["panels"])
    assert dots.count("<use") == pytest.approx(len(points), abs=30)  # the others are ticks
    assert "FillBetween" in band
    assert all(name in band for name in lines)


def test_a_mark_is_drawn_at_its_value_and_the_axis_reaches_it() -> None:
    low = {"a": ([0.0, 1.0], [0.1, 0.2])}
    near, far = (charts.lines("c", low, "ratio", colors={"a": 0}, mark=mark) for mark in (0.1, 60.0))
    assert near != far
    assert ">60<" in far
    assert ">60<" not in near
