"""What an experiment file may say, what the command line changes, and what is refused with which words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hotprefix.cost.presets import load_cost
from hotprefix.errors import ConfigError, InputError
from hotprefix.kernel.config import Refresh
from hotprefix.lab.experiment.load import Changes, load, shipped
from hotprefix.lab.experiment.run_plan import plan
from hotprefix.lab.experiment.variants import arms, kernel, settings
from hotprefix.lab.hypothesis import THRASH, Kind, Tolerance
from hotprefix.lab.metric_names import METRICS
from hotprefix.lab.sim.arrivals import Loop
from tests.support.traces import mooncake, write_lines

FILE = """
name = "small"
question = "Does it matter?"
baseline = "off"
cost = "llama-3.1-8b.1xh100.fp8"
[trace]
source = "sample:agents"
[load]
concurrency = 4
[capacity]
size = 4096
[kernel]
page_size = 32
order = "lpm"
[slo]
ttft_s = 2.0
[[conditions]]
name = "tight"
set = { "capacity.size" = 1024 }
[[conditions]]
name = "wide"
[[arms]]
name = "off"
set = { "kernel.refresh" = "off" }
[[arms]]
name = "window"
[[hypotheses]]
id = "h1"
claim = "It does."
why = "One in ten is worth a switch."
kind = "mechanism"
arm = "window"
condition = "tight"
needs = "thrash"
improves = [{ metric = "lost_tokens", amount = 0.1 }]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(FILE)
    return tmp_path / "small.toml"


def edited(path: Path, old: str, new: str) -> str:
    text = path.read_text()
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new))
    return str(path)


def test_a_file_gives_the_settings_of_every_pair(path: Path) -> None:
    experiment = load(str(path))
    found = {
        (c.name, a.name): kernel(chosen := settings(experiment, c, a), total_pages=9, page_size=16).refresh
        or chosen
        for c in experiment.conditions
        for a in arms(experiment)
    }
    assert found == {
        ("tight", "off"): Refresh.OFF,
        ("tight", "window"): Refresh.WINDOW,
        ("wide", "off"): Refresh.OFF,
        ("wide", "window"): Refresh.WINDOW,
    }
    tight, wide = experiment.conditions
    off = arms(experiment)[0]
    assert settings(experiment, tight, off).capacity.size == 1024
    assert settings(experiment, wide, off).capacity.size == 4096
    config = kernel(settings(experiment, tight, off), total_pages=9, page_size=16)
    assert (config.page_size, config.total_pages, config.order) == (32, 9, "lpm")
    (hypothesis,) = [one.build(experiment.baseline) for one in experiment.hypotheses]
    assert hypothesis.kind is Kind.MECHANISM
    assert hypothesis.baseline == "off"
    assert hypothesis.needs == THRASH
    assert hypothesis.improves == (Tolerance("lost_tokens", 0.1, "relative"),)
    assert (hypothesis.claim, hypothesis.why) == ("It does.", "One in ten is worth a switch.")
    assert experiment.slo.build().ttft_s == 2.0


def test_an_arm_is_applied_after_its_condition(path: Path) -> None:
    path.write_text(FILE.replace('{ "kernel.refresh" = "off" }', '{ "capacity.size" = 77 }'))
    experiment = load(str(path))
    found = {
        (c.name, a.name): settings(experiment, c, a).capacity.size
        for c in experiment.conditions
        for a in arms(experiment)
    }
    assert found == {
        ("tight", "off"): 77, ("tight", "window"): 1024, ("wide", "off"): 77, ("wide", "window"): 4096,
    }  # fmt: skip


def test_factors_make_every_combination_an_arm(path: Path) -> None:
    text = path.read_text()
    start, end = text.index("[[arms]]"), text.index("[[hypotheses]]")
    factors = '[factors]\n"kernel.refresh" = ["off", "window"]\n"kernel.max_running" = [4, 8]\n'
    path.write_text(text[:start].replace('"off"', '"off+4"') + factors)
    assert "hypotheses" in text[end:]
    experiment = load(str(path))
    assert [(a.name, a.set) for a in arms(experiment)] == [
        ("off+4", {"kernel.refresh": "off", "kernel.max_running": 4}),
        ("off+8", {"kernel.refresh": "off", "kernel.max_running": 8}),
        ("window+4", {"kernel.refresh": "window", "kernel.max_running": 4}),
        ("window+8", {"kernel.refresh": "window", "kernel.max_running": 8}),
    ]


def test_the_command_line_changes_what_is_held_fixed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("")
    changes = Changes(
        trace="t.jsonl", limit=7, seeds=2, sets=("load.speed=2.5", "kernel.order=dfs", "slo.ttft_s=1")
    )
    experiment = load(str(path), changes)
    assert experiment.seeds == 2
    assert experiment.settings.trace.source == "t.jsonl"
    assert experiment.settings.trace.limit == 7
    assert experiment.settings.load.speed == 2.5
    assert experiment.settings.kernel == {"page_size": 32, "order": "dfs"}
    assert experiment.slo.ttft_s == 1


def test_the_command_line_leaves_out_what_a_file_sets(path: Path) -> None:
    experiment = load(str(path), Changes(sets=("load.concurrency=", "kernel.order= ")))
    assert experiment.settings.load.concurrency is None
    assert experiment.settings.kernel == {"page_size": 32}
    with pytest.raises(InputError, match=r"--set 'load.concurency=': .* does not set load.concurency"):
        load(str(path), Changes(sets=("load.concurency=",)))
    with pytest.raises(InputError, match=r"kernel.refresh: arm 'off' sets kernel.refresh"):
        load(str(path), Changes(sets=("kernel.refresh=",)))


def test_paths_in_a_file_are_relative_to_it(path: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("")
    experiment = load(edited(path, '"sample:agents"', '"mine.jsonl"'))
    assert experiment.settings.trace.source == str(tmp_path / "mine.jsonl")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('order = "lpm"', 'ordre = "lpm"', r"kernel.ordre: no such key; did you mean order\?"),
        ('order = "lpm"', "total_pages = 8", r"kernel.total_pages: no such key; capacity gives it"),
        ('order = "lpm"', 'order = "best"', r"kernel.order='best': give 'fcfs', 'lpm', 'spf', 'dfs' or"),
        ("page_size = 32", "page_size = 0", r"page_size=0: give a whole number >= 1"),
        ("concurrency = 4", "concurency = 4", r"load.concurency: no such key; did you mean concurrency\?"),
        ("concurrency = 4", "concurrency = 0", r"load.concurrency=0: give greater than or equal to 1"),
        ("concurrency = 4", "speed = nan", r"load.speed=nan: give "),
        ("size = 4096", 'size = 4096\nunit = "gb"', r"capacity.unit='gb': give 'pages', 'tokens' or"),
        ('baseline = "off"', 'baseline = "of"', r"baseline='of': no such arm; did you mean off\?"),
        ('baseline = "off"', 'baseline = "off"\nseeds = 0', r"seeds=0: give greater than or equal to 1"),
        ('baseline = "off"', 'baseline = "off"\nseed = 1', r"seed: no such key; did you mean seeds\?"),
        ('arm = "window"', 'arm = "widow"', r"hypothesis 'h1': arm='widow': there is none; did you mean"),
        ('condition = "tight"', 'condition = "x"', r"hypothesis 'h1': condition='x': there is none"),
        ('"lost_tokens"', '"lost_tokans"', r"hypothesis 'h1': metric='lost_tokans'.*lost_tokens"),
        ('needs = "thrash"', 'needs = "trash"', r"hypotheses.0.needs.*trash.*give 'thrash' or 'no_thrash'"),
        ('kind = "mechanism"', 'kind = "magic"', r"hypotheses.0.kind='magic': give 'mechanism', 'service'"),
        ("amount = 0.1", "amount = -1", r"hypothesis 'h1': tolerance of lost_tokens=-1.0: give"),
        ('"kernel.refresh" = "off"', '"kernel.refesh" = "off"', r"arm 'off': kernel.refesh: no such"),
        ('"capacity.size" = 1024', '"capacity.sise" = 1024', r"condition 'tight', arm 'off': capacity.sise"),
        ('"capacity.size" = 1024', '"cost.size" = 1024', r"cost.size: cost is a value, not a section"),
        ('name = "wide"', 'name = "tight"', r"conditions: 'tight' stands there twice"),
        ('question = "Does it matter?"', "", r"question: missing"),
        ('source = "sample:agents"', "limit = 3", r"trace.*give one of source .* and generate"),
        ('name = "small"', "name = small", r"not TOML: .*line 2"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_file_field_value_and_fix(
    path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load(edited(path, old, new))
    assert caught.value.message.startswith(f"{path}: ")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            Changes(sets=("kernel.refresh=off",)),
            r"kernel.refresh: arm 'off' sets kernel.refresh; change it in",
        ),
        (Changes(sets=("capacity.size=1",)), r"capacity.size: condition 'tight' sets capacity.size"),
        (Changes(sets=("kernel.order",)), r"--set 'kernel.order': give key=value"),
        (Changes(sets=("kernel.oder=lpm",)), r"kernel.oder: no such key; did you mean order\?"),
        (Changes(seeds=0), r"seeds=0: give greater than or equal to 1"),
        (Changes(limit=0), r"trace.limit=0: give greater than or equal to 1"),
    ],
)
def test_changes_that_make_no_sense_are_refused(path: Path, changes: Changes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(str(path), changes)


def test_unknown_experiments_name_the_shipped_ones() -> None:
    with pytest.raises(InputError, match=r"experiment 'refresh-of-on': .*did you mean refresh-off-on\?"):
        load("refresh-of-on")
    with pytest.raises(InputError, match=r"none.toml: cannot read the experiment: No such file"):
        load("none.toml")


@pytest.mark.parametrize("name", ["x" * 5000, "x\0y"])
def test_names_that_no_file_can_have_are_bad_input(path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"give a \.toml file or a shipped one"):
        load(name)
    with pytest.raises(InputError, match="neither a file nor a preset"):
        load_cost(name)
    assert load(str(path), Changes(sets=(f"cost={name}",))).settings.cost == name


def test_a_shipped_experiment_loads_and_is_judged_by_rules_that_say_why() -> None:
    found: dict[str, Any] = {name: load(name) for name in shipped()}
    assert set(found) == {
        "eviction-x-capacity", "publication-x-flight", "refresh-by-queue-depth", "refresh-off-on",
        "thrash-and-no-thrash", "cacheroute-shape", "equal-tps", "how-many-instances", "how-much-l1",
        "routing-agents", "routing-burst", "routing-failures", "routing-hetero", "routing-load",
        "routing-skew", "routing-stale", "routing-terms",
    }  # fmt: skip
    for name, experiment in found.items():
        assert experiment.name == name
        assert experiment.hypotheses
        assert all(one.why for one in experiment.hypotheses), name


def test_a_trace_of_arrivals_needs_no_sessions_alive(tmp_path: Path) -> None:
    trace = str(write_lines(tmp_path / "t.jsonl", [mooncake(timestamp=1000 * i) for i in range(3)]))
    told: list[str] = []
    planned = plan(load("refresh-off-on", Changes(trace=trace), told.append))
    assert {task.loop for task in planned.tasks} == {Loop.OPEN}
    assert told == [
        f"load.concurrency=24 is left out: {trace} records no sessions, so its requests arrive as recorded "
        "(load.speed makes them come faster)"
    ]
    said = ("load.concurrency=9",)
    with pytest.raises(ConfigError, match=r"load.concurrency=9: in open loop .*--set load.concurrency="):
        plan(load("refresh-off-on", Changes(trace=trace, sets=said), told.append))
    with pytest.raises(ConfigError, match=r"condition 's12' sets load.concurrency.* a trace with sessions"):
        plan(load("refresh-by-queue-depth", Changes(trace=trace)))
    assert len(told) == 1
    load("refresh-off-on", Changes(trace="sample:agents"), told.append)
    assert len(told) == 1, "it has sessions"


def test_bursts_are_replayed_as_they_arrive_also_where_the_trace_has_sessions() -> None:
    planned = plan(load("publication-x-flight", Changes(trace="sample:agents", limit=20)))
    assert {task.loop for task in planned.tasks} == {Loop.OPEN}
    assert {task.settings.load.speed for task in planned.tasks} == {1.0, 1e-5}


def test_the_documented_file_and_metrics_are_the_real_ones(path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()
    found = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert found is not None
    path.write_text(found[1])
    assert load(str(path)).name == "mine"
    own = [name for name in METRICS if "." not in name and not name.startswith(("l1_l2", "l2_", "l3_"))]
    told = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    for metric in (METRICS[name] for name in own):
        unit, better, _, meaning = told[metric.name].replace("\\|", "|").split(" | ", 3)
        assert (unit, better, meaning) == (metric.unit, metric.better, metric.meaning), metric.name
