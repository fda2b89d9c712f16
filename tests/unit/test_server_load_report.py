"""GET /load: what a router reads of a server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from hotprefix.cost.presets import load_cost
from hotprefix.engine.messages import EngineLoad, KVSource
from hotprefix.errors import EngineDead
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import KernelConfig
from hotprefix.kernel.kernel import Kernel
from hotprefix.kernel.plan import StepOutcome
from hotprefix.kernel.request import Request
from hotprefix.server import load_report
from hotprefix.server.config import ServerConfig
from hotprefix.server.internal import INTERNAL_HEADER
from hotprefix.server.load_report import LoadReport, Pages
from tests.support.server import INFO, LOAD, FakeEngine, client

PRESET = "llama-3.1-8b.1xh100.fp8"
KEY = ServerConfig.digests(["secret"])
INTERNAL = next(iter(ServerConfig.digests(["between us"])))
ROUTER = {INTERNAL_HEADER: "between us"}


class Loaded(FakeEngine):
    """Counts who asks. hang: never answers. dead: the engine is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.hang = self.dead = False
        self.kv: KVSource | None = None

    async def load(self) -> EngineLoad:
        self.asked += 1
        if self.dead:
            raise EngineDead("gone")
        if self.hang:
            await asyncio.Event().wait()
        return LOAD._replace(kv=self.kv)


async def report(http: Any) -> LoadReport:
    answer = await http.get("/load")
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    return LoadReport.model_validate_json(answer.content)


async def test_the_figures_are_the_engine_s() -> None:
    engine = Loaded()
    async with client(engine) as http:
        found = await report(http)
    assert (found.incarnation, found.waiting, found.prefill_tokens, found.decodes) == (7, 2, 500, 3)
    assert found.pages == Pages(free=40, evictable=30, owned=10, protected=20)
    assert found.age_s is not None
    assert found.age_s >= 0
    assert (found.kv_events, found.resume) == (None, False)


async def test_the_profile_has_what_the_engine_told_and_null_for_the_rest() -> None:
    engine = Loaded()
    async with client(engine, ServerConfig(served_names=("mine",))) as http:
        bare = (await report(http)).worker
        cost = load_cost(PRESET)
        details = {"fingerprint": "f00", "dtype": "bfloat16", "total_pages": 256, "max_batched_tokens": 512,
                   "max_running": 8, "kv_token_bytes": 99, "capacity": 2.5}  # fmt: skip
        engine.info = replace(INFO, details=details, cost=cost.model_dump(mode="json"))
        whole = (await report(http)).worker
    assert bare is not None
    assert (bare.model, bare.page_size, bare.max_model_len) == ("mine", INFO.page_size, INFO.max_model_len)
    assert [bare.dtype, bare.total_pages, bare.kv_token_bytes, bare.cost, bare.capacity] == [None] * 5
    assert whole is not None
    assert {name: getattr(whole, name) for name in details} == details
    assert whole.cost == cost
    assert whole.role == "both"


async def test_a_busy_engine_s_figures_have_their_age_and_a_dead_one_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_report, "FRESH_S", 0.0)
    monkeypatch.setattr(load_report, "WAIT_S", 0.05)
    engine = Loaded()
    async with client(engine) as http:
        await report(http)
        engine.hang = True
        held = await report(http)
    assert (held.incarnation, held.decodes) == (7, 3)
    assert held.age_s is not None
    assert held.age_s >= 0.04
    engine = Loaded()
    async with client(engine) as http:
        assert (await report(http)).decodes == 3
        engine.dead = True
        gone = await report(http)
    assert gone.worker is not None
    assert gone.model_copy(update={"worker": None}) == LoadReport()


async def test_before_the_model_is_there_nothing_is_known() -> None:
    class Loading(Loaded):
        @property
        def info(self) -> Any:
            raise EngineDead("loading")

        @info.setter
        def info(self, value: Any) -> None: ...

    engine = Loading()
    engine.dead = True
    async with client(engine) as http:
        assert await report(http) == LoadReport()


async def test_many_who_ask_ask_the_engine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_report, "FRESH_S", 1e9)
    engine = Loaded()
    async with client(engine) as http:
        found = await asyncio.gather(*(report(http) for _ in range(20)))
    assert engine.asked == 1
    assert {one.decodes for one in found} == {3}


async def test_a_router_s_key_opens_it_in_place_of_an_api_key_and_opens_nothing_else() -> None:
    config = ServerConfig(key_digests=KEY, internal_digest=INTERNAL)
    async with client(Loaded(), config) as http:
        assert (await http.get("/load")).status_code == 401
        assert (await http.get("/load", headers={INTERNAL_HEADER: "another"})).status_code == 401
        assert (await http.get("/load", headers=ROUTER)).json()["resume"]
        assert (await http.get("/load", headers={"authorization": "Bearer secret"})).status_code == 200
        for path in ("/metrics", "/v1/models", "/server_info"):
            assert (await http.get(path, headers=ROUTER)).status_code == 401
    async with client(Loaded(), ServerConfig(key_digests=KEY)) as http:
        assert (await http.get("/load", headers=ROUTER)).status_code == 401


# -- what is outstanding ------------------------------------------------------------------------------


def asked(kernel: Kernel, name: str, first: int, length: int = 40, outputs: int = 4) -> None:
    kernel.submit(Request(name, tk.encode(range(first, first + length)), outputs), 0.0)


def stepped(kernel: Kernel) -> None:
    plan = kernel.plan(0.0)
    sampled = {chunk.request: 1 for chunk in plan.chunks if chunk.samples}
    kernel.commit(plan, StepOutcome(sampled=sampled), 0.0)


def test_outstanding_is_what_waits_and_what_is_left_of_what_runs() -> None:
    kernel = Kernel(KernelConfig(total_pages=64, page_size=4, max_running=2, max_batched_tokens=32))
    assert kernel.outstanding() == (0, 0)
    for name, first in (("a", 100), ("b", 200), ("c", 300)):
        asked(kernel, name, first)
    assert kernel.outstanding() == (120, 0)
    stepped(kernel)
    assert kernel.outstanding() == (88, 0)
    stepped(kernel)  # a's last 8, and 24 of b
    assert kernel.outstanding() == (56, 1)
    while kernel.has_work:
        before = kernel.outstanding()
        stepped(kernel)
        assert kernel.outstanding()[0] <= before[0]
    assert kernel.outstanding() == (0, 0)


def test_what_the_cache_held_on_arrival_is_not_outstanding() -> None:
    kernel = Kernel(KernelConfig(total_pages=64, page_size=4, max_running=1, max_batched_tokens=64))
    asked(kernel, "a", 100)
    while kernel.has_work:
        stepped(kernel)
    asked(kernel, "b", 100, length=40)
    asked(kernel, "c", 100, length=44)
    assert kernel.outstanding() == (4 + 4, 0)
