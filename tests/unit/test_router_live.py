"""/ and /live.json of the router without a browser: what they hold, and when they are made."""

from __future__ import annotations

import re

import pytest

from hotprefix.router import live_page
from tests.support.routing import FakeWorker, fleet, report, says

SECRET = "a secret that is long enough for pages of its own. " * 8


async def test_the_page_runs_no_script_but_its_own() -> None:
    async with fleet(FakeWorker("w0", says("a"))) as before:
        page = await before.http.get("/")
        assert (await before.http.post("/", content=b"")).status_code == 405
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'sha256-")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|@import|eval\(| style=", page.text)
    assert "<!-- cards -->" not in page.text
    assert "/* script */" not in page.text


async def test_the_data_name_hot_prefixes_and_give_away_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "FRESH_S", 0.0)
    names = []
    for _ in range(2):
        async with fleet(FakeWorker("w0", says("a"), load=report())) as before:
            for _ in range(2):
                await before.ask(SECRET, user="a session's name")
            answer = await before.http.get("/live.json")
            (pool,) = answer.json()["pools"]
            ((key, *_),) = before.pool.desk.fleet.hottest()
        assert answer.headers["cache-control"] == "no-store"
        assert (answer.json()["ok"], answer.json()["state"]) == (True, None)
        (hot,) = pool["hottest"]
        assert (hot["start"], hot["stop"], hot["requests"]) == (0, len(SECRET) // 64 * 16, 2)
        assert hot["holders"] == {"w0": "presumed"}
        for word in ("secret", "session's", str(key), f"{key:x}"):
            assert word not in answer.text
        names.append(hot["name"])
    assert names[0] != names[1], "a digest that is the same in every process can be compared with a guess"


async def test_it_is_made_once_for_all_that_look(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(FakeWorker("w0", says("a"))) as before:

        async def routed() -> int:
            (pool,) = (await before.http.get("/live.json")).json()["pools"]
            assert len(pool["recent"]) <= live_page.RECENT
            return int(pool["counters"]["routed"])

        monkeypatch.setattr(live_page, "FRESH_S", 1e9)
        assert await routed() == 0
        for _ in range(live_page.RECENT + 1):
            await before.ask()
        assert await routed() == 0
        monkeypatch.setattr(live_page, "FRESH_S", 0.0)
        assert await routed() == live_page.RECENT + 1
        before.router.gate.draining = True
        assert (await before.http.get("/live.json")).json()["state"].startswith("draining")
        before.router.gate.draining = False
