"""The largest load that meets an objective: the bisection, what it offers, and the file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hotprefix.commands.calibrate import calibrate
from hotprefix.errors import ConfigError, InputError
from hotprefix.lab.capacity import MOST_RATES, Capacity, Tried, largest_rate
from hotprefix.lab.experiment.find_capacity import Offered, find_capacity
from hotprefix.lab.experiment.load import Changes, load
from hotprefix.lab.sim.arrivals import Loop
from tests.support.replays import BLOCK, agents, request

FILE = """
name = "tiny"
question = "How much?"
baseline = "a"
seeds = 2
cost = "llama-3.1-8b.1xh100.fp8"
[trace]
generate = "agents"
[trace.params]
sessions = 6
steps = { median = 3, sigma = 0.3 }
[capacity]
size = 6
unit = "sessions"
[slo]
ttft_s = 1.0
[[arms]]
name = "a"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(FILE)
    return tmp_path / "tiny.toml"


@pytest.mark.parametrize("capacity", [0.013, 0.9, 1.0, 3.7, 900.0])
@pytest.mark.parametrize("within", [0.3, 0.01])
def test_the_bisection_closes_in_on_the_rate(capacity: float, within: float) -> None:
    asked: list[float] = []

    def attain(rate: float) -> Tried:
        asked.append(rate)
        return Tried(requests_per_s=rate, good_share=1.0 if rate <= capacity else 0.5)

    low, high, tried = largest_rate(attain, 1.0, share=0.95, within=within)
    assert low <= capacity < high <= low * (1 + within)
    assert sorted(asked) == [one.requests_per_s for one in tried]
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize(("share", "text"), [(1.0, "every rate meets"), (0.0, "no rate meets")])
def test_an_objective_that_the_load_does_not_decide_about_is_refused(share: float, text: str) -> None:
    asked: list[float] = []

    def attain(rate: float) -> Tried:
        asked.append(rate)
        return Tried(requests_per_s=rate, good_share=share)

    with pytest.raises(ConfigError, match=f"{text} the objective"):
        largest_rate(attain, 1.0, share=0.95, within=0.05)
    assert len(asked) == MOST_RATES


def test_what_is_offered_is_the_same_traffic_denser() -> None:
    single = Offered([request(f"r{i}", [i]) for i in range(400)], BLOCK, Loop.OPEN, 400)
    slow, fast = ([r.arrival_s for r in single.at(rate, 7)] for rate in (1.0, 4.0))
    assert np.allclose(np.array(slow), 4 * np.array(fast))
    assert slow[-1] == pytest.approx(400, rel=0.15)
    sessions = Offered(agents(60, 4), BLOCK, Loop.CLOSED, 60)
    found = list(sessions.at(2.0, 7))
    starts = [r.arrival_s for r in found if r.parent is None]
    assert len(starts) == 60
    assert starts == sorted(starts)
    assert starts[-1] == pytest.approx(60 * 4 / 2.0, rel=0.3), "two requests a second, four in a session"
    assert [r.arrival_s for r in found if r.parent is not None] == [None] * 180


def test_a_capacity_is_saved_with_its_conditions(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = path.parent / "out" / "capacity.json"
    calibrate(out=out, capacity=str(path), share=0.9, within=0.3, json=True)
    text = capsys.readouterr().out
    found = Capacity.model_validate_json(out.read_text())
    assert json.loads(text) == json.loads(out.read_text())
    assert found.requests_per_s < found.too_much <= 1.3 * found.requests_per_s
    by_rate = {one.requests_per_s: one.good_share for one in found.tried}
    assert by_rate[found.requests_per_s] >= 0.9 > by_rate[found.too_much]
    told = found.conditions
    assert (told.objectives, told.share, told.seeds, told.loop) == ({"ttft_s": 1.0}, 0.9, 2, "closed")
    assert told.hardware
    assert told.l1_tokens == int(told.kernel["total_pages"]) * int(told.kernel["page_size"])


def test_a_slower_machine_serves_less(path: Path) -> None:
    rates = [
        find_capacity(load(str(path), Changes(sets=(f"cost={cost}", "seeds=1"))), share=0.9, within=0.3)
        for cost in ("llama-3.1-8b.1xh100.fp8", "llama-3.3-70b.2xh100.fp8")
    ]
    assert rates[0].too_much > rates[0].requests_per_s > rates[1].too_much


def test_what_cannot_be_found_is_refused_with_the_fix(path: Path) -> None:
    out = path.parent / "c.json"
    for sets, more, text in (
        (("slo.ttft_s=",), {}, r"no objective is given.*--set slo.ttft_s=2"),
        (("cluster.instances=3",), {}, r"cluster.instances=3: capacity is that of one instance"),
        ((), {"share": 1.5}, r"--share 1.5: give a number above 0, at most 1"),
        ((), {"within": 0.0}, r"--within 0.0: give a number from 0.001 to 1"),
    ):
        with pytest.raises(InputError, match=text):
            calibrate(out=out, capacity=str(path), set_=list(sets), **{"share": 0.9, "within": 0.3, **more})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="--set belongs to --capacity"):
        calibrate(out=out, set_=["slo.ttft_s=2"])
    with pytest.raises(InputError, match="cannot write the capacity"):
        calibrate(out=Path("/proc/none/c.json"), capacity=str(path))
    assert not out.exists()
