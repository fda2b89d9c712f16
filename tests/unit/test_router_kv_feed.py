"""Feeds over real sockets: gaps, late starts, restarts, snapshots, and peers that send anything."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from hotprefix.fleet.records import Batch, ReplayWanted, Shelf
from hotprefix.records import kvwire
from hotprefix.records.kvevents import KVPublisher, PageEvents, block_hash
from hotprefix.records.kvwire import Cleared, Form, PageEvent, Removed, Stored
from hotprefix.router import kv_feed, kv_sinks, kv_sockets
from hotprefix.router.foreign_keys import ForeignKeys
from hotprefix.router.kv_feed import KVFeed
from hotprefix.router.kv_messages import BadMessage, read_live, read_replayed
from hotprefix.router.kv_sinks import Foreign
from hotprefix.router.kv_sockets import Line, towards
from tests.support.drive import Driver
from tests.support.feeds import MODEL, Desk, Publisher, page_keys, running, until
from tests.support.foreign_engine import Blocks

KEYS = page_keys(range(80))
encode = msgspec.msgpack.encode


def page(at: int, to: int | None = None) -> Stored:
    """Pages of one prompt, as an engine of ours tells them."""
    to = at + 1 if to is None else to
    return Stored(tuple(KEYS[at:to]), KEYS[at - 1] if at else None, (), 4)


def gone(*pages: int) -> Removed:
    return Removed(tuple(KEYS[at] for at in pages))


def own(desk: Desk, at: Publisher | KVPublisher, **more: Any) -> KVFeed:
    replay = more.pop("replay", at.replay if isinstance(at, Publisher) else at.replay_endpoint)
    return KVFeed("w", at.endpoint, replay, more.pop("snapshot", None), 4, desk, **more)


async def bound_again(endpoint: str) -> Publisher:
    """A publisher at an address that another socket has just left; libzmq lets go of it a little later."""
    for _ in range(1000):
        try:
            return Publisher(endpoint)
        except zmq.ZMQError:
            await asyncio.sleep(0.01)
    raise AssertionError(f"{endpoint} stays in use")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "RETRY_S", (0.02, 0.1))
    monkeypatch.setattr(kv_feed, "REST_S", 0.0)
    monkeypatch.setattr(kv_sockets, "FIRST_RETRY_MS", 20)
    monkeypatch.setattr(kv_sockets, "HANDSHAKE_MS", 200)
    monkeypatch.setattr(kv_sockets, "ANSWER_S", 0.5)


# -- our own publisher ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", list(Form))
async def test_our_own_publisher_before_and_after_the_feed_began(form: Form) -> None:
    publisher = KVPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", form=form, topic="kv")
    desk = Desk()
    try:
        publisher.publish(1.0, [Cleared(), page(0, 6)])
        publisher.publish(2.0, [gone(5)])
        await until(lambda: publisher.published == 2)
        async with running(own(desk, publisher)) as feed:
            await until(lambda: desk.keys() == set(KEYS[:5]))
            publisher.publish(3.0, [page(5, 8)])
            await until(lambda: desk.keys() == set(KEYS[:8]))
            publisher.publish(4.0, [Cleared(), page(0)])
            await until(lambda: desk.keys() == {KEYS[0]})
            assert feed.up
            assert not feed.problems.counts
            assert feed.counters.batches == 2
    finally:
        publisher.close()
    assert not feed.up


async def test_our_own_publisher_that_begins_again_on_the_same_address() -> None:
    publisher = KVPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    desk, first = Desk(), publisher
    async with running(own(desk, publisher)) as feed:
        for ts in range(1, 6):
            publisher.publish(ts, [page(ts)])
        await until(lambda: len(desk.keys()) == 5)
        publisher.close()
        publisher = KVPublisher(first.endpoint, first.replay_endpoint)
        try:
            publisher.publish(10.0, [Cleared(), page(9)])
            await until(lambda: desk.keys() == {KEYS[9]})
            assert desk.fleet.counters.restarts == 1
            assert feed.counters.connections == 2
        finally:
            publisher.close()


@pytest.mark.parametrize("foreign", [False, True])
async def test_a_real_kernel_s_pages_over_the_wire(foreign: bool) -> None:
    """Random work with evictions. As another engine its token ids give the very keys that it tells itself."""
    publisher = KVPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    d, pages = Driver(page_size=4, total_pages=40), PageEvents(4, b"a key of this test", with_tokens=True)
    pages.cleared()
    d.kernel.watch_pages(pages)
    desk, draw = Desk(), random.Random(3)
    keys = ForeignKeys("", 4) if foreign else None
    feed = KVFeed("w", publisher.endpoint, publisher.replay_endpoint, None, 4, desk, foreign=keys)
    try:
        async with running(feed):
            for step in range(40):
                ids = [*range(draw.randrange(20)), *(draw.randrange(97) for _ in range(9))]
                d.submit(f"r{step}", ids, 3, salt=None if foreign else draw.choice([None, "x"]))
                d.run()
                publisher.publish(float(step), pages.take())
            assert pages.removed
            resident = set(map(block_hash, pages._keys.values()))
            await until(lambda: desk.keys() == resident)
            assert not feed.problems.counts
    finally:
        publisher.close()


# -- gaps -------------------------------------------------------------------------------------------------


async def test_a_gap_is_replayed_and_what_came_meanwhile_is_applied_after_it() -> None:
    publisher, desk = Publisher(), Desk()
    async with running(own(desk, publisher)) as feed:
        await until(lambda: feed.up)
        await publisher.publish(1.0, page(0, 4))
        await until(lambda: desk.keys() == set(KEYS[:4]))
        publisher.add(2.0, gone(3))
        await publisher.publish(3.0, page(3, 6))
        await publisher.publish(4.0, gone(5))
        await until(lambda: desk.keys() == set(KEYS[:5]))
        assert 1 in publisher.asked
        assert desk.fleet.counters.dropped == 0
    await publisher.close()


async def test_a_first_number_above_0_is_a_gap_and_without_replay_live_events_build_it_up() -> None:
    publisher, desk = Publisher(), Desk()
    publisher.add(1.0, page(0, 4))
    async with running(own(desk, publisher, replay=None)) as feed:
        await until(lambda: feed.up)
        await publisher.publish(2.0, page(4, 6))
        await until(lambda: desk.keys() == set(KEYS[4:6]))
        assert desk.fleet.counters.dropped == 1
    await publisher.close()


async def test_a_late_replay_brings_no_removed_page_back() -> None:
    """The replay is held up until the fleet has given up and gone on."""
    publisher, desk = Publisher(), Desk(held=2)
    publisher.deaf = True
    async with running(own(desk, publisher)) as feed:
        await until(lambda: feed.up and publisher.asked)
        publisher.add(1.0, page(0, 4))
        await publisher.publish(2.0, page(4))
        for ts in (3.0, 4.0, 5.0):
            await publisher.publish(ts, gone(0))
        await until(lambda: desk.keys() == {KEYS[4]})
        publisher.deaf = False
        asked = len(publisher.asked)
        await publisher.publish(6.0, page(5))
        await until(lambda: desk.keys() == {KEYS[4], KEYS[5]})
        feed._look = True
        feed._bell.set()
        await until(lambda: len(publisher.asked) > asked)
        await asyncio.sleep(0.05)
        assert desk.keys() == {KEYS[4], KEYS[5]}
    await publisher.close()


async def test_a_replay_that_does_not_answer_is_told_and_the_entries_are_dropped() -> None:
    publisher, desk = Publisher(), Desk()
    async with running(own(desk, publisher)) as feed:
        await until(lambda: feed.up)
        await publisher.publish(1.0, page(0, 4))
        await until(lambda: len(desk.keys()) == 4)
        publisher.deaf = True
        publisher.add(2.0, gone(3))
        await publisher.publish(3.0, page(6))
        await until(lambda: desk.keys() == {KEYS[6]})
        assert feed.problems.counts["replay"] >= 1
        assert feed.counters.replays_failed >= 1
    await publisher.close()


async def test_what_was_lost_without_a_trace_is_found_when_nothing_comes() -> None:
    """The last batches of a burst are lost, and then the engine is idle."""
    publisher, desk = Publisher(), Desk()
    async with running(own(desk, publisher, idle_s=0.05)) as feed:
        await until(lambda: feed.up)
        await publisher.publish(1.0, page(0, 4))
        await until(lambda: len(desk.keys()) == 4)
        publisher.add(2.0, gone(3))
        await until(lambda: len(desk.keys()) == 3)
        assert feed.counters.restarts == 0
    await publisher.close()


async def test_a_long_replay_is_passed_on_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "PORTION", 3)
    publisher, desk = Publisher(), Desk()
    largest = 0
    answer = desk.replayed

    def replayed(wanted: ReplayWanted, batches: tuple[Batch, ...]) -> ReplayWanted | None:
        nonlocal largest
        largest = max(largest, len(batches))
        return answer(wanted, batches)

    monkeypatch.setattr(desk, "replayed", replayed)
    async with running(own(desk, publisher)) as feed:
        await until(lambda: feed.up and publisher.asked)
        for at in range(19):
            publisher.add(at, page(at))
        await publisher.publish(20.0, page(19))
        await until(lambda: desk.keys() == set(KEYS))
        assert desk.fleet.counters.dropped == 0
        assert 0 < largest <= 4
    await publisher.close()


async def test_an_answer_without_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "MOST_ANSWERS", 5)
    publisher, desk = Publisher(), Desk()
    for at in range(10):
        publisher.add(at, page(at))
    async with running(own(desk, publisher)) as feed:
        await until(lambda: feed.problems.counts["replay"])
        assert "no end after 5 batches" in str(feed.problems.last)
    await publisher.close()


# -- lives ------------------------------------------------------------------------------------------------


async def test_numbers_that_start_again_are_a_new_life() -> None:
    publisher, desk = Publisher(), Desk()
    async with running(own(desk, publisher)) as feed:
        await until(lambda: feed.up)
        for ts in range(1, 4):
            await publisher.publish(ts, page(ts))
        await until(lambda: len(desk.keys()) == 3)
        publisher.log.clear()
        await publisher.publish(9.0, page(9))
        await until(lambda: desk.keys() == {KEYS[9]})
        assert desk.fleet.counters.restarts == 1
    await publisher.close()


async def test_a_new_life_whose_first_batches_were_missed_is_found_out_at_the_new_connection() -> None:
    """Its first number to arrive goes on from the old life's last, so that nothing looks wrong."""
    publisher, desk = Publisher(), Desk()
    blocks, foreign = Blocks(4), ForeignKeys(MODEL, 4)
    ids = list(range(80))
    feed = KVFeed("w", publisher.endpoint, publisher.replay, None, 4, desk, foreign=foreign)
    endpoint = publisher.endpoint
    async with running(feed):
        await until(lambda: feed.up)
        await publisher.publish(1.0, blocks.stored(ids[:20]))
        await publisher.publish(2.0, blocks.stored(ids[:24], first=5))
        await until(lambda: len(desk.keys()) == 6)
        await publisher.close()
        await until(lambda: not feed.up)
        again = await bound_again(endpoint)
        feed._replay_at = again.replay
        other = Blocks(4, seed=1)
        again.add(0.5, other.stored([7, *ids[:7]]))  # and its clock is behind
        again.add(0.6, other.stored([8, *ids[:7]]))
        again.add(0.7, other.stored([9, *ids[:7]]))
        await until(lambda: feed.counters.restarts == 1)
        wanted = {key for n in (7, 8, 9) for key in page_keys([n, *ids[:7]])}
        await until(lambda: desk.keys() == wanted)
        assert desk.fleet.counters.restarts >= 1
        await again.close()


async def test_the_same_life_after_a_lost_connection_goes_on() -> None:
    publisher, desk = Publisher(), Desk()
    async with running(own(desk, publisher)) as feed:
        await until(lambda: feed.up)
        await publisher.publish(1.0, page(0, 4))
        await until(lambda: len(desk.keys()) == 4)
        publisher._pub.unbind(publisher.endpoint)
        publisher._pub.close(linger=0)
        await until(lambda: not feed.up)
        publisher.add(2.0, gone(3))
        again = await bound_again(publisher.endpoint)
        publisher._pub, again._pub = again._pub, publisher._pub
        await until(lambda: feed.up and len(desk.keys()) == 3)
        assert feed.counters.restarts == 0
        assert desk.fleet.counters.dropped == desk.fleet.counters.restarts == 0
    await again.close()
    await publisher.close()


# -- snapshots --------------------------------------------------------------------------------------------


class Snapshots:
    """Pages of snapshots as an engine answers them. moves: how many pages change between two questions."""

    def __init__(self, number: int, keys: list[int], size: int = 3, life: int | None = 1) -> None:
        self.number, self.keys, self.size, self.life = number, keys, size, life
        self.moves, self.asked = 0, 0

    async def __call__(self, cursor: int, limit: int) -> Mapping[str, Any]:
        self.asked += 1
        if self.moves:
            self.moves, self.number = self.moves - 1, self.number + 1
        end = cursor + min(self.size, limit)
        return {
            "incarnation": self.life, "number": self.number, "pages": self.keys[cursor:end], "medium": "GPU",
            "cursor": end if end < len(self.keys) else None,
        }  # fmt: skip


async def test_a_late_feed_takes_a_snapshot_and_goes_on_from_its_number() -> None:
    publisher, desk = Publisher(), Desk()
    for at in range(10):
        publisher.add(at, page(at))
    snapshots = Snapshots(9, KEYS[:10])
    async with running(own(desk, publisher, snapshot=snapshots)) as feed:
        await until(lambda: desk.keys() == set(KEYS[:10]))
        assert publisher.asked == []
        await publisher.publish(10.0, gone(0))
        await until(lambda: desk.keys() == set(KEYS[1:10]))
        assert publisher.asked == [], "nothing was missing"
        assert (snapshots.asked, feed.counters.snapshots) == (4, 1)
    await publisher.close()


async def test_a_snapshot_that_changes_while_it_is_read_is_read_again() -> None:
    publisher, desk = Publisher(), Desk()
    snapshots = Snapshots(3, KEYS[:10])
    snapshots.moves = 2
    async with running(own(desk, publisher, snapshot=snapshots)):
        await until(lambda: desk.keys() == set(KEYS[:10]))
        assert snapshots.asked == 2 + 4
    await publisher.close()


async def test_a_snapshot_that_is_gone_while_it_is_read_is_read_again() -> None:
    publisher, desk, fails = Publisher(), Desk(), [4]
    whole = Snapshots(3, KEYS[:10])

    async def forgetful(cursor: int, limit: int) -> Mapping[str, Any]:
        if cursor and fails:
            fails.pop()
            raise ConnectionError("410 gone")
        return await whole(cursor, limit)

    async with running(own(desk, publisher, snapshot=forgetful)) as feed:
        await until(lambda: desk.keys() == set(KEYS[:10]))
        assert (feed.counters.snapshots, feed.counters.snapshots_failed) == (1, 0)
    await publisher.close()


async def test_a_snapshot_fills_a_gap_that_the_replay_does_not_reach() -> None:
    """The engine keeps few batches. What it has now covers all that is missing."""
    publisher, desk = Publisher(), Desk()
    snapshots = Snapshots(-1, [])
    async with running(own(desk, publisher, snapshot=snapshots)) as feed:
        await until(lambda: feed.up)
        await publisher.publish(1.0, page(0, 4))
        await until(lambda: len(desk.keys()) == 4)
        for _ in range(5):
            publisher.add(2.0, page(4))
        snapshots.number, snapshots.keys = 6, KEYS[2:9]
        for number in (1, 2, 3):
            publisher.log[number] = b"\xc1"  # they are lost for good
        await publisher.publish(3.0, page(8))
        await until(lambda: desk.keys() == set(KEYS[2:9]))
        await publisher.publish(4.0, gone(2))
        await until(lambda: desk.keys() == set(KEYS[3:9]))
    await publisher.close()


@pytest.mark.parametrize(
    "change",
    [
        {"pages": ["x"]}, {"pages": [-1]}, {"pages": None}, {"number": "1"}, {"cursor": 0}, {"medium": None},
        {"incarnation": "new"}, {},
    ],
    ids=str,
)  # fmt: skip
async def test_a_snapshot_of_another_form_is_refused_and_the_replay_is_asked(change: dict[str, Any]) -> None:
    publisher, desk = Publisher(), Desk()
    publisher.add(1.0, page(0, 4))

    async def wrong(cursor: int, limit: int) -> Mapping[str, Any]:
        if not change:
            raise ConnectionError("no route")
        told = {"incarnation": 1, "number": 0, "pages": [1], "medium": "GPU", "cursor": None}
        return {**told, **change}

    async with running(own(desk, publisher, snapshot=wrong)) as feed:
        if "medium" in change:
            await until(lambda: {key for _, key in desk.pages()} == {1})
        else:
            await until(lambda: desk.keys() == set(KEYS[:4]))
            assert feed.problems.counts["snapshot"] == 1
    await publisher.close()


# -- bad peers ----------------------------------------------------------------------------------------------


def payload(*events: Any, ts: Any = 1.0, rank: Any = 0) -> bytes:
    return encode([ts, list(events), rank])


def told(**change: Any) -> dict[str, Any]:
    fields = {
        "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [1] * 8,
        "block_size": 4, "medium": "GPU", "extra_keys": [None, None],
    }  # fmt: skip
    return {**fields, **change}


BAD = {
    "no msgpack": b"\xc1",
    "cut": payload(told())[:-9],
    "empty": b"",
    "text": encode("hello"),
    "map": encode({"ts": 1}),
    "nested": b"\x91" * 100_000 + b"\xc0",
    "time": payload(ts="now"),
    "time too large": payload(ts=float("inf")),
    "no list of events": encode([1.0, 5, 0]),
    "unknown type": payload({"type": "BlockMoved"}),
    "hash text": payload(told(block_hashes=["a", "b"])),
    "hash list": payload(told(block_hashes=[[1], [2]])),
    "hash long": payload(told(block_hashes=[b"x" * 65, b"y"])),
    "hashes no list": payload(told(block_hashes=7)),
    "parent": payload(told(parent_block_hash="x")),
    "tokens text": payload(told(token_ids=["a"] * 8)),
    "tokens negative": payload(told(token_ids=[-1] * 8)),
    "tokens large": payload(told(token_ids=[1 << 33] * 8)),
    "tokens floats": payload(told(token_ids=[1.5] * 8)),
    "tokens nested": payload(told(token_ids=[[1]] * 8)),
    "tokens too few": payload(told(token_ids=[1] * 7)),
    "tokens without hashes": payload(told(block_hashes=[])),
    "size": payload(told(block_size="4")),
    "size negative": payload(told(block_size=-4)),
    "size huge": payload(told(block_size=1 << 40)),
    "extra": payload(told(extra_keys=[None])),
    "extra no list": payload(told(extra_keys=5)),
    "adapter": payload(told(lora_name=5)),
    "adapter number": payload(told(lora_id="x")),
    "medium": payload(told(medium=5)),
    "group": payload(told(group_idx="a")),
    "group large": payload(told(group_idx=1000)),
    "removed": payload({"type": "BlockRemoved", "block_hashes": [1.5]}),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_a_bad_batch_is_refused_with_a_reason(data: bytes) -> None:
    with pytest.raises(BadMessage) as refused:
        read_live([b"kv", bytes(8), data])
    assert refused.value.kind in ("msgpack", "batch", "event")
    assert str(refused.value.detail)


def test_bad_frames_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    good = payload(told())
    for frames in ([], [b"kv"], [b"kv", bytes(8)], [b"kv", bytes(8), good, b""], [b"kv", b"1", good]):
        with pytest.raises(BadMessage):
            read_live(frames)
    for frames in ([b"", bytes(8)], [b"x", b"kv", bytes(8), good], [b"", b"kv", b"7", good]):
        with pytest.raises(BadMessage):
            read_replayed(frames)
    assert read_live([b"kv", bytes(8), good]) == read_replayed([b"", bytes(8), good])
    monkeypatch.setattr("hotprefix.router.kv_messages.MESSAGE_BYTES", 10)
    with pytest.raises(BadMessage, match="size"):
        read_live([b"kv", bytes(8), good])


async def test_no_message_ends_a_feed_and_each_kind_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    publisher, desk = Publisher(), Desk()
    caplog.set_level(logging.WARNING)
    async with running(own(desk, publisher)) as feed:
        await until(lambda: feed.up)
        await publisher.publish(1.0, page(0))
        for _ in range(3):
            for data in BAD.values():
                await publisher.send(b"kv", (1).to_bytes(8, "big"), data)
            await publisher.send(b"")
            await publisher.send(*[b"x"] * 9)
            await publisher.send(b"kv", b"short", b"\x90")
        await until(lambda: desk.keys() == {KEYS[0]})
        await publisher.publish(2.0, page(1))
        await until(lambda: desk.keys() == set(KEYS[:2]))
        assert sum(feed.problems.counts.values()) == 3 * (len(BAD) + 3)
        assert set(feed.problems.counts) == {"msgpack", "batch", "event", "frames", "number"}
    said = [record.getMessage() for record in caplog.records if "KV events of w" in record.getMessage()]
    assert len(said) == len(feed.problems.counts)
    assert all("(said once)" in line and "left out" in line for line in said)
    assert max(map(len, said)) < 600
    await publisher.close()


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (Stored((1,), None, (), 16), "page size"),
        (Stored((1 << 63,), None, (), 4), "hashes"),
        (Removed((b"x" * 32,)), "hashes"),
    ],
)
async def test_events_that_no_engine_of_ours_tells(event: PageEvent, kind: str) -> None:
    publisher, desk = Publisher(), Desk()
    publisher.add(1.0, event)
    async with running(own(desk, publisher)) as feed:
        await until(lambda: feed.problems.counts[kind] >= 1)
        await publisher.publish(2.0, event)
        await until(lambda: feed.problems.counts[kind] >= 2)
        assert desk.pages() == set()
    await publisher.close()


async def test_a_fleet_that_raises_does_not_end_the_feed() -> None:
    publisher, desk = Publisher(), Desk(workers=("another",))
    async with running(own(desk, publisher)) as feed:
        await until(lambda: feed.up)
        await publisher.publish(1.0, page(0))
        await until(lambda: feed.problems.counts["fault"])
        assert "is not a member" in str(feed.problems.last)
        desk.fleet.join("w", desk.fleet._members["another"].profile, desk.now())
        await publisher.publish(2.0, page(1))
        await until(lambda: desk.keys() == set(KEYS[:2]))
    await publisher.close()


@pytest.mark.parametrize("kind", ["nothing", "http", "router", "silent", "nonsense", "unknown host"])
async def test_an_address_that_is_no_publisher_is_told_and_tried_again(kind: str) -> None:
    """And when a publisher is there at last, it is heard."""
    desk, servers = Desk(), []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if kind == "http":
            await reader.read(10)
            writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
            writer.close()
        else:
            await reader.read()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address, expected = f"tcp://127.0.0.1:{port}", "no publisher"
    other: Any = None
    if kind in ("http", "silent"):
        servers.append(await asyncio.start_server(answer, "127.0.0.1", port))
    elif kind == "router":
        other = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        other.bind(address)
    elif kind == "nothing":
        expected = "unreachable"
    else:
        address = "tcp://nonsense" if kind == "nonsense" else "tcp://no-such-host.invalid:5557"
        expected = "address" if kind == "nonsense" else "unreachable"
    feed = KVFeed("w", address, None, None, 4, desk)
    async with running(feed):
        await until(lambda: feed.problems.counts[expected] >= 2)
        assert not feed.up
        for server in servers:
            server.close()
        if other is not None:
            other.close(linger=0)
        if kind in ("nothing", "http", "router"):
            publisher = await bound_again(address)
            await until(lambda: feed.up)
            await publisher.publish(1.0, page(0))
            await until(lambda: desk.keys() == {KEYS[0]})
            await publisher.close()


async def test_a_replay_address_that_is_no_publisher() -> None:
    publisher, desk = Publisher(), Desk()
    publisher.add(1.0, page(0))
    async with running(own(desk, publisher, replay=publisher.endpoint)) as feed:
        await until(lambda: feed.problems.counts["replay"])
        await publisher.publish(2.0, page(1))
        await until(lambda: desk.keys() == {KEYS[1]})
    await publisher.close()


async def test_a_huge_message_is_not_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sockets, "MESSAGE_BYTES", 100_000)
    publisher, desk = Publisher(), Desk()
    async with running(own(desk, publisher)) as feed:
        await until(lambda: feed.up)
        await publisher.publish(1.0, page(0))
        await until(lambda: desk.keys() == {KEYS[0]})
        await publisher.send(b"kv", (1).to_bytes(8, "big"), bytes(1_000_000))
        await until(lambda: feed.counters.connections >= 2)
        await publisher.publish(2.0, page(1))
        await until(lambda: desk.keys() == set(KEYS[:2]))
    await publisher.close()


async def test_a_feed_that_is_cancelled_leaves_no_socket_and_no_task() -> None:
    publisher, desk = Publisher(), Desk()
    context = zmq.asyncio.Context.instance()
    before, tasks = len(context._sockets), len(asyncio.all_tasks())
    for _ in range(3):
        async with running(own(desk, publisher, idle_s=0.01)) as feed:
            await until(lambda: feed.up)
            publisher.deaf = True
            await publisher.publish(1.0, page(0))
            await asyncio.sleep(0.03)
    assert len(context._sockets) == before
    assert len(asyncio.all_tasks()) == tasks
    await publisher.close()


@pytest.mark.parametrize("turns", range(8))
async def test_a_feed_that_is_cancelled_while_it_loses_its_connection_ends(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment between the loss and the next connection."""

    class Fake:
        binds = False

        def __init__(self, endpoint: str) -> None:
            self.lost = asyncio.Event()
            made.append(self)

        def close(self) -> None:
            pass

        async def receive(self) -> Any:
            await asyncio.Event().wait()

        async def waiting(self) -> Any:
            for nothing in ():
                yield nothing

        async def line(self) -> Any:
            await self.lost.wait()
            yield Line.DOWN

    made: list[Fake] = []
    monkeypatch.setattr(kv_feed, "Subscription", Fake)
    task = asyncio.ensure_future(KVFeed("w", "tcp://x:1", None, None, 4, Desk()).run())
    await until(lambda: made)
    await asyncio.sleep(0.01)
    made[0].lost.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=5.0)
    if not done:
        task.cancel()
    assert done
    assert task.cancelled()


# -- other engines ------------------------------------------------------------------------------------------


def vllm(desk: Desk, publisher: Publisher, **more: Any) -> KVFeed:
    foreign = more.pop("foreign", None) or ForeignKeys(MODEL, 4)
    return KVFeed("w", publisher.endpoint, publisher.replay, None, 4, desk, foreign=foreign, **more)


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("as_bytes", [False, True])
async def test_another_engine_s_blocks_are_our_pages(form: Form, as_bytes: bool) -> None:
    publisher, desk, blocks = Publisher(form=form), Desk(), Blocks(8, as_bytes=as_bytes)
    ids = list(range(50))
    publisher.add(1.0, blocks.stored(ids[:16]))
    async with running(vllm(desk, publisher)) as feed:
        await until(lambda: desk.keys() == set(page_keys(ids[:16])))
        publisher.add(2.0, blocks.stored(ids[:24], first=2))
        await publisher.publish(3.0, blocks.stored(ids[:32], first=3))
        await until(lambda: desk.keys() == set(page_keys(ids[:32])))
        await publisher.publish(4.0, blocks.removed(blocks.names(ids[:32])[3:]))
        await until(lambda: desk.keys() == set(page_keys(ids[:24])))
        assert not feed.problems.counts
    await publisher.close()


async def test_blocks_behind_a_gap_are_known_since_they_wait_for_it() -> None:
    """The batch that shows the gap names a parent that only the missing batch tells of."""
    publisher, desk, blocks = Publisher(), Desk(), Blocks(4)
    ids, foreign = list(range(50)), ForeignKeys(MODEL, 4)
    async with running(vllm(desk, publisher, foreign=foreign)) as feed:
        await until(lambda: feed.up and publisher.asked)
        publisher.add(1.0, blocks.stored(ids[:4]))
        await publisher.publish(2.0, blocks.stored(ids[:8], first=1))
        await until(lambda: desk.keys() == set(page_keys(ids[:8])))
        assert foreign.counters.unknown_parent == 0
    await publisher.close()


async def test_where_a_replay_fails_what_blocks_hold_is_still_known() -> None:
    publisher, desk, blocks = Publisher(), Desk(), Blocks(4)
    ids = list(range(50))
    async with running(vllm(desk, publisher)) as feed:
        await until(lambda: feed.up)
        await publisher.publish(1.0, blocks.stored(ids[:8]))
        await until(lambda: len(desk.keys()) == 2)
        publisher.deaf = True
        publisher.add(2.0, blocks.removed(blocks.names(ids[:8])[1:]))
        await publisher.publish(3.0, blocks.stored(ids[:12], first=2))
        await until(lambda: desk.keys() == {page_keys(ids[:12])[2]})
        assert desk.fleet.counters.dropped == 1
        await publisher.publish(4.0, blocks.stored(ids[:12]))
        await until(lambda: desk.keys() == set(page_keys(ids[:12])))
    await publisher.close()


async def test_a_rank_is_a_worker_of_its_own() -> None:
    publisher, desk = Publisher(), Desk()
    foreign = ForeignKeys(MODEL, 4)
    ids = list(range(50))
    async with running(vllm(desk, publisher, foreign=foreign, rank=1)) as feed:
        await until(lambda: feed.up and publisher.asked)
        await publisher.publish(1.0, Blocks(4).stored(ids[:8]), rank=0)
        publisher.log.clear()
        await publisher.publish(1.0, Blocks(4, seed=2).stored(ids[8:16]), rank=1)
        await until(lambda: desk.keys() == set(page_keys(ids[8:16])))
        assert feed.counters.batches == 1
    await publisher.close()


async def test_an_engine_that_connects_is_heard_at_an_address_with_a_star() -> None:
    """vLLM's publisher connects to any address without a star."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    desk, ids = Desk(), list(range(50))
    feed = KVFeed("w", f"tcp://*:{port}", None, None, 4, desk, foreign=ForeignKeys(MODEL, 4))
    async with running(feed):
        for life in range(2):
            pub = zmq.asyncio.Context.instance().socket(zmq.XPUB)
            pub.connect(f"tcp://127.0.0.1:{port}")
            assert (await pub.recv())[0], "it is subscribed to"
            await until(lambda: feed.up)
            batch = kvwire.Batch(1.0 + life, (Blocks(4).stored(ids[life : 8 + life]),))
            await pub.send_multipart([b"", bytes(8), encode(kvwire.to_wire(batch))])
            await until(lambda: desk.keys() == set(page_keys(ids[life : 8 + life])))  # noqa: B023
            pub.close(linger=0)
            await until(lambda: not feed.up)


def test_held_back_batches_are_bounded_by_their_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sinks, "HELD_WEIGHT", 100)
    desk = Desk()
    way = Foreign("w", ForeignKeys(MODEL, 4), desk)
    blocks, ids = Blocks(4), list(range(50))
    wanted, number = None, 1
    while desk.keys() == set() and number < 9:
        data = encode(kvwire.to_wire(kvwire.Batch(float(number), (blocks.stored(ids[:40]),))))
        wanted = way.live(read_live([b"", number.to_bytes(8, "big"), data])) or wanted
        number += 1
    assert wanted is not None
    assert wanted.first == 0
    assert number == 4, "each weighs 50"
    assert desk.keys() == set(page_keys(ids[:40]))
    assert way.replayed(wanted, []) is None, "that question is over"


def test_a_fleet_that_has_lost_the_thread_gets_all_that_is_there() -> None:
    """A report of a new life begins the worker's numbers again in the fleet, and not here."""
    desk = Desk()
    way = Foreign("w", ForeignKeys(MODEL, 4), desk)
    ids, blocks = list(range(50)), Blocks(4)

    def live(number: int, *events: PageEvent) -> None:
        data = encode(kvwire.to_wire(kvwire.Batch(float(number), events)))
        assert way.live(read_live([b"", number.to_bytes(8, "big"), data])) is None

    live(0, blocks.stored(ids[:8]))
    live(1, blocks.copied(blocks.names(ids[:8])[:1], "CPU"))
    desk.fleet._begin_again(desk.fleet._members["w"], desk.now())
    desk.fleet._members["w"].order.restart()
    live(2, blocks.stored(ids[:12], first=2))
    assert desk.keys() == set(page_keys(ids[:12]))
    assert (Shelf.L2, page_keys(ids[:4])[0]) in desk.pages()


def test_addresses_that_workers_tell_of_themselves() -> None:
    for told in ("tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557"):
        assert towards(told, "10.0.0.7") == "tcp://10.0.0.7:5557"
    assert towards("tcp://*:5557", "fe80::1") == "tcp://[fe80::1]:5557"
    assert towards("tcp://10.0.0.9:5557", "10.0.0.7") == "tcp://10.0.0.9:5557"
    assert towards("ipc:///tmp/x", "10.0.0.7") == "ipc:///tmp/x"
