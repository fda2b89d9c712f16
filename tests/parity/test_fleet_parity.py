"""One fleet core, two drivers: what the simulator's driver decides, a loop over a script decides as well.

A replay is run with staleness, lost events, a death and a return. Everything that its driver told the core is
written down as a script of plain values; a loop without clock, kernels or tables plays the script to a new
core. Every answer must be equal, byte for byte.
"""

from __future__ import annotations

import pickle
from random import Random
from typing import Any

import pytest

from hotprefix.fleet.config import FleetConfig, Homes, RoutingPolicy
from hotprefix.fleet.fleet import Fleet
from hotprefix.fleet.records import Decision, ReplayWanted
from hotprefix.lab.sim import fleet_driver
from hotprefix.lab.sim.arrivals import Loop
from hotprefix.lab.sim.replay import Death, Routing
from tests.support.replays import BLOCK, agents, replay

TOLD = ("join", "leave", "report", "events", "replayed", "route", "progress", "loads", "wake_at")
Script = list[tuple[str, bytes, bytes]]
SEED = 3


def scribe(script: Script) -> type[Fleet]:
    """A core that writes down what it is told and what it answers, as bytes."""

    def noted(name: str) -> Any:
        def call(self: Fleet, *args: Any) -> Any:
            before = pickle.dumps(args)
            answer = getattr(Fleet, name)(self, *args)
            script.append((name, before, pickle.dumps(answer)))
            return answer

        return call

    return type("Scribe", (Fleet,), {name: noted(name) for name in TOLD})


def play(script: Script, config: FleetConfig) -> list[tuple[Any, Any]]:
    """The answers of a new core, each beside the one that was written down."""
    fleet = Fleet(config, Random(f"draw {SEED}").randrange)
    found = []
    for name, args, answer in script:
        found.append((getattr(fleet, name)(*pickle.loads(args)), pickle.loads(answer)))
    return found


def recorded(arm: RoutingPolicy, monkeypatch: pytest.MonkeyPatch) -> tuple[Script, FleetConfig]:
    script: Script = []
    monkeypatch.setattr(fleet_driver, "Fleet", scribe(script))
    config = FleetConfig(page_size=BLOCK, policy=arm, homes=Homes.TURNS)
    replay(
        agents(14, 5, think=0.1), SEED, instances=4, total_pages=80, loop=Loop.CLOSED, concurrency=9,
        routing=Routing(config, report_every_s=0.1, staleness_s=0.07, lost_events=0.2),
        deaths=(Death(0, 0.15, 1.0), Death(2, 0.4)),
    )  # fmt: skip
    return script, config


@pytest.mark.parametrize("arm", list(RoutingPolicy))
def test_a_script_gives_the_decisions_that_the_simulator_got(
    arm: RoutingPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, config = recorded(arm, monkeypatch)
    assert {name for name, _, _ in script} >= {"join", "leave", "report", "events", "route", "progress"}
    both = play(script, config)
    assert all(here == there and repr(here) == repr(there) for here, there in both)
    decisions = [here for here, _ in both if isinstance(here, Decision)]
    assert len(decisions) >= 70
    assert len({d.worker for d in decisions}) > 1
    assert any(isinstance(here, ReplayWanted) for here, _ in both)


def test_the_comparison_sees_a_report_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    script, config = recorded(RoutingPolicy.PREDICTED, monkeypatch)
    without = [call for call in script if call[0] != "report"]
    both = play(without, config)
    assert not all(here == there for here, there in both)
