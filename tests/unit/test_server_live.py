"""/ and /live.json without a browser: what they hold, whom they ask and when."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import re
from typing import Any

import pytest

from hotprefix.engine.client import Health
from hotprefix.errors import EngineDead
from hotprefix.kernel.plan import Queue
from hotprefix.kernel.state.estimates import Predictions
from hotprefix.server import live_page
from tests.support.server import STATS, FakeEngine, client
from tests.unit.test_metrics_insight import numbered


class Counted(FakeEngine):
    """Counts who asks it for its numbers. hang: never answers."""

    asked = 0
    hang = False
    dead = False

    async def stats(self) -> Any:
        self.asked += 1
        if self.dead:
            raise EngineDead("gone")
        if self.hang:
            await asyncio.Event().wait()
        return dataclasses.replace(STATS, insight=numbered()[0])


async def test_the_page_may_load_nothing_from_anywhere() -> None:
    async with client(FakeEngine()) as http:
        answer = await http.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    rules = dict(rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == "'none'"
    for kind in ("script", "style"):
        (body,) = re.findall(f"<{kind}>(.*?)</{kind}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|@import|eval\(", answer.text)
    assert " style=" not in answer.text


async def test_the_data_are_the_snapshot_s() -> None:
    engine = Counted()
    async with client(engine) as http:
        data = (await http.get("/live.json")).json()
    insight = numbered()[0]
    assert data["sources"] == {"L1": 600, "L2": 30, "L3": 10, "computed": 360}
    assert [tier["name"] for tier in data["tiers"]] == ["L1 device", "L2 host"]
    assert data["tiers"][0]["evictable"] == STATS.evictable_pages
    assert data["tiers"][1]["protected"] == insight.l2.protected  # type: ignore[union-attr]
    assert data["loss"]["lost while waiting"] == insight.kernel.lost_waiting_tokens
    assert data["rates"][0] == {
        "window_s": 30, "cached": insight.throughput[0].cached_tps,
        "uncached": insight.throughput[0].uncached_tps,
    }  # fmt: skip
    assert data["hottest"] == [{"name": "aa", "parent": -1, "start": 0, "stop": 16, "requests": 2}]
    assert data["l3"]["read"] == "open"
    assert "secret" not in str(data)


async def test_many_who_look_ask_the_engine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "FRESH_S", 1e9)
    engine = Counted()
    async with client(engine) as http:
        answers = await asyncio.gather(*(http.get("/live.json") for _ in range(20)))
        answers += [await http.get("/live.json") for _ in range(3)]
    assert engine.asked == 1
    assert all(answer.json()["running"] == STATS.running for answer in answers)


async def test_a_busy_engine_gives_old_numbers_with_their_age_and_a_dead_one_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_page, "FRESH_S", 0.0)
    monkeypatch.setattr(live_page, "WAIT_S", 0.05)
    engine = Counted()
    engine.hang = True
    async with client(engine) as http:
        first = (await http.get("/live.json")).json()
        assert (first["age_s"], "tiers" in first) == (None, False)
    engine = Counted()
    async with client(engine) as http:
        assert (await http.get("/live.json")).json()["age_s"] == 0
        engine.hang = True
        held = (await http.get("/live.json")).json()
        assert held["running"] == STATS.running
        assert held["age_s"] >= 0
    engine = Counted()
    engine.dead, engine.ok = True, Health(False, "restarting: it died")
    async with client(engine) as http:
        gone = await http.get("/live.json")
    assert gone.status_code == 200
    assert (gone.json()["ok"], gone.json()["state"]) == (False, "restarting: it died")
    assert "tiers" not in gone.json()


async def test_the_page_is_told_why_the_head_waits_and_how_requests_fared() -> None:
    insight = numbered()[0]
    async with client(Counted()) as http:
        data = (await http.get("/live.json")).json()
    head = insight.queue.head
    assert head is not None
    assert data["queue"]["oldest_s"] == insight.queue.oldest
    assert data["queue"]["head"]["why"] == "it does not fit into L1"
    assert {
        k: data["queue"]["head"][k] for k in ("need", "shared", "owed", "free", "evictable", "protected")
    } == {k: getattr(head, k) for k in ("need", "shared", "owed", "free", "evictable", "protected")}
    assert data["time"] == {"refresh_s": insight.refresh_s, "prefill_busy_s": insight.prefill_busy_s}
    assert insight.fared is not None
    assert data["goodput"] == {
        heat: dataclasses.asdict(found) for heat, found in insight.fared.groups.items()
    }
    assert insight.predictions is not None
    assert data["predictions"]["restore"]["predicted_s"] == insight.predictions.restore.predicted_s
    assert live_page._goodput(None) is None
    assert live_page._queue(Queue(None, None)) == {"oldest_s": None, "head": None}
    assert live_page._predictions(Predictions()) == {}, "what was not measured is left out"
