"""What a subscriber that comes late is given, and where it is told that events come from."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from hotprefix.engine.messages import EngineLoad, KVSnapshot, KVSource
from hotprefix.errors import EngineDead
from hotprefix.records.kvevents import KVPublisher
from hotprefix.records.kvwire import PageEvent, Removed, Stored
from hotprefix.records.recorder import Recorder, RecordOptions
from hotprefix.server import kv_routes
from hotprefix.server.config import ServerConfig
from hotprefix.server.internal import INTERNAL_HEADER
from tests.support.engine import fake_loop
from tests.support.observed import program, run
from tests.support.server import LOAD, FakeEngine, client

INTERNAL = ServerConfig(internal_digest=next(iter(ServerConfig.digests(["between us"]))))
ROUTER = {INTERNAL_HEADER: "between us"}


class Kept:
    """A publisher that keeps the batches."""

    endpoint, replay_endpoint, topic = "tcp://127.0.0.1:1", None, "kv"
    published = dropped = 0

    def __init__(self) -> None:
        self.batches: list[list[PageEvent]] = []

    @property
    def last(self) -> int:
        return len(self.batches) - 1

    def publish(self, ts: float, events: list[PageEvent]) -> None:
        self.batches.append(events)


def applied(pages: set[int], batches: list[list[PageEvent]]) -> set[int]:
    pages = set(pages)
    for event in (event for batch in batches for event in batch):
        if isinstance(event, Stored):
            pages |= set(event.hashes)  # type: ignore[arg-type]
        elif isinstance(event, Removed):
            pages -= set(event.hashes)  # type: ignore[arg-type]
        else:
            pages = set()
    return pages


class Asking(Recorder):
    """A recorder that is asked for a snapshot now and then, before a step's events are handed over, too."""

    def __init__(self, kept: Kept, seed: int) -> None:
        super().__init__(RecordOptions(b"a key of the tests' own, 32 bytes", make_publisher=lambda: kept))  # type: ignore[arg-type,return-value]
        self.random, self.snapshots = random.Random(seed), [(-1, b"")]

    def changed(self, now: float) -> None:
        for what in self.random.sample([self.ask, lambda: Recorder.changed(self, now)], 2):
            what()

    def ask(self) -> None:
        found = self.kv_snapshot()
        assert found is not None
        self.snapshots.append(found)


@pytest.mark.parametrize("seed", range(12))
def test_a_snapshot_is_what_the_batches_up_to_its_number_have_told(seed: int) -> None:
    kept = Kept()
    recorder = Asking(kept, seed)
    run(program(seed, 60), recorder)
    recorder.ask()
    final = applied(set(), kept.batches)
    assert len({number for number, _ in recorder.snapshots}) > 5
    for number, told in recorder.snapshots:
        pages = list(array("Q", told))
        assert len(pages) == len(set(pages))
        assert set(pages) == applied(set(), kept.batches[: number + 1])
        assert applied(set(pages), kept.batches[number + 1 :]) == final


def test_the_last_batch_s_number_counts_those_that_were_dropped() -> None:
    publisher = KVPublisher("tcp://127.0.0.1:*", queue=0)
    try:
        assert publisher.last == -1
        for number in range(3):
            publisher.publish(0.0, [Removed((number,))])
            assert publisher.last == number
        assert publisher.dropped == 3
    finally:
        publisher.close()


def test_the_loop_tells_it_with_its_life_s_number_and_nothing_without_events() -> None:
    kept = Kept()
    loop, _, _ = fake_loop(observer=Recorder(RecordOptions(b"k" * 32, make_publisher=lambda: kept)))  # type: ignore[arg-type,return-value]
    found, load = loop.kv_snapshot(), loop.load()
    assert found is not None
    assert found.incarnation == load.incarnation > 0
    assert load.kv == KVSource("tcp://127.0.0.1:1", None, "kv")
    for observer in (None, Recorder(RecordOptions(b"k" * 32))):
        bare, _, _ = fake_loop(observer=observer)
        assert (bare.kv_snapshot(), bare.load().kv) == (None, None)
        assert bare.load().incarnation > found.incarnation


# -- the routes ---------------------------------------------------------------------------------------


class Cached(FakeEngine):
    """Holds pages from `first` on, and another batch at each snapshot."""

    def __init__(self, count: int = 10) -> None:
        super().__init__()
        self.count, self.taken = count, 0
        self.kv: KVSource | None = KVSource("tcp://0.0.0.0:5557", "tcp://0.0.0.0:5558", "kv")

    async def load(self) -> EngineLoad:
        return LOAD._replace(kv=self.kv)

    async def kv_snapshot(self) -> KVSnapshot | None:
        if self.kv is None:
            return None
        self.taken += 1
        first = self.taken * 100
        return KVSnapshot(7, self.taken, array("Q", range(first, first + self.count)).tobytes())


async def page(http: Any, cursor: int, **more: int) -> dict[str, Any]:
    answer = await http.get("/kv_snapshot", params={"cursor": cursor, **more}, headers=ROUTER)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_pages_of_one_snapshot_follow_each_other() -> None:
    engine, found, cursor = Cached(), [], 0
    async with client(engine, INTERNAL) as http:
        while True:
            told = await page(http, cursor, limit=4)
            found += told["pages"]
            assert (told["incarnation"], told["number"], told["medium"]) == (7, 1, "GPU")
            if told["cursor"] is None:
                break
            assert told["cursor"] > cursor
            cursor = told["cursor"]
        assert found == list(range(100, 110))
        assert engine.taken == 1
        assert (await page(http, 0, limit=10))["cursor"] is None
        assert (await page(http, 0))["pages"] == list(range(300, 310))


async def test_largest_hashes_pass() -> None:
    class Large(Cached):
        async def kv_snapshot(self) -> KVSnapshot:
            return KVSnapshot(7, -1, array("Q", [2**63 - 1, 2**64 - 1]).tobytes())

    async with client(Large(), INTERNAL) as http:
        told = await page(http, 0)
    assert (told["pages"], told["number"], told["cursor"]) == ([2**63 - 1, 2**64 - 1], -1, None)


async def test_an_empty_cache_is_one_page_without_pages() -> None:
    async with client(Cached(count=0), INTERNAL) as http:
        told = await page(http, 0)
    assert (told["pages"], told["cursor"]) == ([], None)


async def test_a_page_of_a_snapshot_that_is_not_kept_is_gone() -> None:
    engine = Cached()
    async with client(engine, INTERNAL) as http:
        first = (await page(http, 0, limit=4))["cursor"]
        for _ in range(kv_routes.KEPT - 1):
            await page(http, 0)
        assert (await page(http, first))["number"] == 1
        await page(http, 0)
        for gone in (first, 99 << 32, 5):
            answer = await http.get("/kv_snapshot", params={"cursor": gone}, headers=ROUTER)
            assert (answer.status_code, answer.json()["error"]["code"]) == (410, "snapshot_gone")


@pytest.mark.parametrize("query", ["cursor=x", "cursor=-1", "cursor=", "limit=0", "limit=65537", "limit=1e3",
                                   "limit=²", f"cursor={2**63}", "cursor=" + "9" * 5000])  # fmt: skip
async def test_a_wrong_number_is_named(query: str) -> None:
    async with client(Cached(), INTERNAL) as http:
        answer = await http.get(f"/kv_snapshot?{query}", headers=ROUTER)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


async def test_it_is_closed_without_an_internal_key_and_needs_it_otherwise() -> None:
    keys = ServerConfig.digests(["secret"])
    api = {"authorization": "Bearer secret"}
    for config, headers, status in (
        (ServerConfig(), {}, 404),
        (ServerConfig(), ROUTER, 404),
        (ServerConfig(key_digests=keys), api, 404),
        (INTERNAL, {}, 401),
        (INTERNAL, {INTERNAL_HEADER: "between"}, 401),
        (ServerConfig(key_digests=keys, internal_digest=INTERNAL.internal_digest), api, 401),
        (ServerConfig(key_digests=keys, internal_digest=INTERNAL.internal_digest), ROUTER, 200),
        (INTERNAL, ROUTER, 200),
    ):
        engine = Cached()
        async with client(engine, config) as http:
            answer = await http.get("/kv_snapshot", headers=headers)
            assert answer.status_code == status, (config, headers)
            told = (await http.get("/load", headers=headers or api)).json()
        assert engine.taken == (status == 200)
        if "kv_events" in told:
            assert told["kv_events"]["snapshot"] == (config.internal_digest is not None)


async def test_without_events_there_are_no_sources_and_no_snapshot() -> None:
    engine = Cached()
    engine.kv = None
    async with client(engine, INTERNAL) as http:
        assert (await http.get("/kv_event_sources")).json() == []
        answer = await http.get("/kv_snapshot", headers=ROUTER)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_kv_events")


async def test_sources_have_vllm_s_form() -> None:
    async with client(Cached()) as http:
        assert (await http.get("/kv_event_sources")).json() == [
            {
                "data_parallel_rank": 0, "endpoint": "tcp://0.0.0.0:5557",
                "replay_endpoint": "tcp://0.0.0.0:5558", "topic": "kv",
            }
        ]  # fmt: skip


async def test_an_engine_that_is_gone_is_not_one_without_events() -> None:
    class Gone(Cached):
        async def load(self) -> EngineLoad:
            raise EngineDead("gone")

    async with client(Gone()) as http:
        assert (await http.get("/kv_event_sources")).status_code == 503
