"""KV events: stored minus removed is what is resident, in the published wire form, with replay."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from hotprefix.engine.config import EngineConfig
from hotprefix.errors import ConfigError
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.cache.keys import chain, root_key
from hotprefix.kernel.request import Namespace
from hotprefix.records.kvevents import KVPublisher, PageEvents, block_hash, private_digest
from hotprefix.records.kvwire import Batch, Cleared, PageEvent, Removed, Stored, to_wire
from hotprefix.records.open_recorder import open_recorder
from tests.support.observed import WatchedDriver, program, run

KEY = b"0123456789abcdef"


class Subscriber:
    """A router: what is resident, from events alone. Strict: nothing is stored twice, nor removed that is
    not there; a page comes after its parent and leaves before it."""

    def __init__(self) -> None:
        self.resident: dict[int, int | None] = {}
        self.children: dict[int | None, int] = {}

    def take(self, events: list[PageEvent]) -> None:
        for event in events:
            if isinstance(event, Cleared):
                assert not self.resident
            elif isinstance(event, Stored):
                self._stored(event)
            else:
                for name in event.hashes:
                    assert not self.children.get(name), "a parent left before its child"
                    self.children[self.resident.pop(name)] -= 1

    def _stored(self, event: Stored) -> None:
        parent = event.parent
        assert parent is None or parent in self.resident
        for name in event.hashes:
            assert name not in self.resident
            self.resident[name] = parent
            self.children[parent] = self.children.get(parent, 0) + 1
            parent = name


def resident(d: WatchedDriver) -> set[int]:
    """What can be found in the tree, by another way: every node's whole key."""
    tree, page = d.kernel._s.l1.tree, d.config.page_size
    found = set()
    for node in tree.walk_nodes():
        if not (node.planned or node.retired):
            keys = chain(root_key(node.namespace, page), node.path_key(), page)
            found.update(map(block_hash, keys))
    return found


class Watch:
    """An observer that checks after every step and flush."""

    wants_events = False

    def __init__(self, with_tokens: bool = False) -> None:
        self.pages: PageEvents | None = None
        self.with_tokens = with_tokens
        self.router = Subscriber()
        self.driver: Any = None
        self.checked = 0
        self.events: list[PageEvent] = []

    def opened(self, kernel: Any, info: Any, fingerprint: str, now: float) -> None:
        self.kernel, self.page = kernel, info.page_size
        self.pages = PageEvents(info.page_size, KEY, with_tokens=self.with_tokens)
        self.pages.cleared()
        kernel.watch_pages(self.pages)

    def changed(self, now: float) -> None:
        assert self.pages is not None
        events = self.pages.take()
        self.events += events
        self.router.take(events)
        tree = self.kernel._s.l1.tree
        hidden = sum(len(node.pages) for node in tree.walk_nodes() if node.planned or node.retired)
        assert self.pages.stored - self.pages.removed == tree.total_pages - hidden
        assert len(self.router.resident) == tree.total_pages - hidden
        self.checked += 1

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


@pytest.mark.parametrize("seed", range(60))
def test_stored_minus_removed_is_resident_on_every_path(seed: int) -> None:
    """Random submissions, aborts, failed steps, retractions, evictions and flushes."""
    watch = Watch()
    d = run(program(seed, 80), watch)  # type: ignore[arg-type]
    assert watch.checked
    assert set(watch.router.resident) == resident(d)
    d.flush()
    d.kernel._s.sessions.expire(1e9)
    assert watch.router.resident == {}
    assert watch.pages is not None
    assert watch.pages._keys == {}, "what is gone is forgotten"


def test_case_121_a_page_computed_twice_is_told_once() -> None:
    from hotprefix.kernel.config import Flight, Publication

    watch = Watch()
    d = WatchedDriver(watch, page_size=4, flight=Flight.NONE, publication=Publication.FINISH)  # type: ignore[arg-type]
    for name in ("a", "b"):
        d.submit(name, list(range(20)), 4)
    d.run()
    assert d.kernel.counters.duplicate_pages > 0
    stored = [name for event in watch.events if isinstance(event, Stored) for name in event.hashes]
    assert len(stored) == len(set(stored)) == 5
    assert not any(isinstance(event, Removed) for event in watch.events)
    d.flush()
    removed = [name for event in watch.events if isinstance(event, Removed) for name in event.hashes]
    assert sorted(removed) == sorted(stored)


def test_hashes_name_the_whole_prefix_and_its_namespace() -> None:
    watch = Watch(with_tokens=True)
    d = WatchedDriver(watch, page_size=4)  # type: ignore[arg-type]
    prompt = [random.Random(1).randrange(97) for _ in range(17)]
    d.submit("a", prompt, 1)
    d.submit("b", prompt, 1, salt="tenant")
    d.run()
    stored = [event for event in watch.events if isinstance(event, Stored)]
    for salt in (None, "tenant"):
        keys = chain(root_key(Namespace(salt=salt), 4), tk.encode(prompt), 4)
        mine = [e for e in stored if e.hashes[0] == block_hash(keys[0])]
        assert [h for e in mine for h in e.hashes] == list(map(block_hash, keys))
        assert [t for e in mine for t in e.tokens] == prompt[:16]
    assert all(0 <= name < 2**63 for event in stored for name in event.hashes)


def test_token_ids_stay_here_unless_asked_for() -> None:
    watch = Watch()
    d = WatchedDriver(watch, page_size=4)  # type: ignore[arg-type]
    d.submit("a", list(range(17)), 1)
    d.run()
    assert [event.tokens for event in watch.events if isinstance(event, Stored)] == [()]


def test_tenants_pages_carry_a_digest_and_no_salt() -> None:
    """On every page, so that one which is read without those before it is not counted for everybody."""
    watch = Watch(with_tokens=True)
    d = WatchedDriver(watch, page_size=4)  # type: ignore[arg-type]
    for salt in (None, "tenant", "other"):
        d.submit(f"r-{salt}", list(range(17)), 1, salt=salt)
        d.run()
        d.submit(f"q-{salt}", [*range(17), 1, 2, 3, 4, 5, 6, 7], 1, salt=salt)
        d.run()
    told: dict[str | None, set[object]] = {}
    for event in watch.events:
        if isinstance(event, Stored):
            assert len(event.extra) == len(event.hashes)
            salt = next(s for s in (None, "tenant", "other") if event.hashes[0] in hashes_of(s))
            told.setdefault(salt, set()).update(event.extra)
    assert told[None] == {None}
    assert len(told["tenant"]) == len(told["other"]) == 1
    assert told["tenant"] != told["other"]
    wire = msgspec.msgpack.encode(to_wire(Batch(0.0, tuple(watch.events))))
    assert b"tenant" not in wire
    assert b"other" not in wire


def hashes_of(salt: str | None) -> set[int]:
    prompt = [*range(17), 1, 2, 3, 4, 5, 6, 7]
    return set(map(block_hash, chain(root_key(Namespace(salt=salt), 4), tk.encode(prompt), 4)))


def test_a_digest_needs_the_key() -> None:
    tenant = Namespace(salt="tenant")
    assert private_digest(KEY, tenant) == private_digest(KEY, Namespace(salt="tenant"))
    assert private_digest(KEY, tenant) != private_digest(b"another key 0123", tenant)
    assert private_digest(KEY, Namespace(salt="")) is not None
    assert private_digest(KEY, Namespace(adapter="a", adapter_version="2")) is not None
    assert private_digest(KEY, Namespace(model="m", adapter="a")) is None


def test_token_ids_are_never_negative() -> None:
    """A key may hold other content's digest in place of ids; readers take unsigned numbers only."""
    watch = Watch(with_tokens=True)
    d = WatchedDriver(watch, page_size=4)  # type: ignore[arg-type]
    d.submit("a", list(range(9)), 1, cache_key=tk.encode([-1, -(2**31), 3, 4, *range(4, 9)]))
    d.run()
    assert [e.tokens for e in watch.events if isinstance(e, Stored)] == [(2**32 - 1, 2**31, 3, 4, 4, 5, 6, 7)]


# -- the sockets --------------------------------------------------------------------------------------


@pytest.fixture
def publisher(request: pytest.FixtureRequest) -> Iterator[KVPublisher]:
    made = KVPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", **getattr(request, "param", {}))
    yield made
    made.close()


END_OF_REPLAY = [b"", b"", b"\xff" * 8, b""]  # as recorded: tests/unit/test_kv_events_wire.py


class Client:
    """Sockets of a subscriber."""

    def __init__(self, publisher: KVPublisher, topic: str = "") -> None:
        self.topic = topic.encode()
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.connect(publisher.endpoint)
        self.sub.setsockopt(zmq.SUBSCRIBE, self.topic)
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.connect(publisher.replay_endpoint)
        for socket in (self.sub, self.dealer):
            socket.setsockopt(zmq.RCVTIMEO, 60_000)

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        self.dealer.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            frames = self.dealer.recv_multipart()
            if frames == END_OF_REPLAY:
                return found
            empty, topic, sequence, payload = frames
            assert (empty, topic) == (b"", self.topic)
            found.append((int.from_bytes(sequence, "big"), payload))

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def client(publisher: KVPublisher) -> Iterator[Client]:
    made = Client(publisher)
    yield made
    made.close()


def connected(publisher: KVPublisher, client: Client) -> None:
    """Publish until the subscription has arrived, as any late joiner would find out."""
    client.sub.setsockopt(zmq.RCVTIMEO, 50)
    for _ in range(1000):
        publisher.publish(0.0, [])
        try:
            client.sub.recv_multipart()
        except zmq.Again:
            continue
        break
    client.sub.setsockopt(zmq.RCVTIMEO, 60_000)


@pytest.mark.parametrize("publisher", [{"topic": "kv"}], indirect=True)
def test_a_topic_stands_first_in_every_message(publisher: KVPublisher) -> None:
    client = Client(publisher, "kv")
    connected(publisher, client)
    publisher.publish(12.5, [Removed((7,))])
    topic, number, payload = client.sub.recv_multipart()
    while not events_of(payload):
        topic, number, payload = client.sub.recv_multipart()
    assert topic == b"kv"
    assert client.replay(int.from_bytes(number, "big")) == [(int.from_bytes(number, "big"), payload)]
    client.close()


def events_of(payload: bytes) -> list[Any]:
    return msgspec.msgpack.decode(payload)[1]  # type: ignore[no-any-return]


def test_numbers_rise_by_one_and_what_was_missed_is_sent_again(
    publisher: KVPublisher, client: Client
) -> None:
    for number in range(5):
        publisher.publish(float(number), [Removed((number,))])
    everything = client.replay(0)
    assert [number for number, _ in everything] == [0, 1, 2, 3, 4]
    assert [events_of(payload)[0]["block_hashes"] for _, payload in everything] == [[n] for n in range(5)]
    assert client.replay(3) == everything[3:]
    assert client.replay(5) == []
    connected(publisher, client)
    publisher.publish(9.0, [Removed((9,))])
    numbers = []
    while True:
        _, sequence, payload = client.sub.recv_multipart()
        numbers.append(int.from_bytes(sequence, "big"))
        events = events_of(payload)
        if events and events[0]["block_hashes"] == [9]:  # how many of the first five came depends on the join
            break
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    client.dealer.send_multipart((b"", b"short"))  # no answer, no harm
    assert client.replay(numbers[-1]) == [(numbers[-1], payload)]


@pytest.mark.parametrize("publisher", [{"buffer": 3}], indirect=True)
def test_the_replay_buffer_is_bounded(publisher: KVPublisher, client: Client) -> None:
    for number in range(10):
        publisher.publish(float(number), [])
    assert [number for number, _ in client.replay(0)] == [7, 8, 9]


@pytest.mark.parametrize("publisher", [{"queue": 0}], indirect=True)
def test_a_batch_too_many_is_dropped_and_leaves_a_gap(publisher: KVPublisher, client: Client) -> None:
    publisher.publish(1.0, [])
    publisher.publish(2.0, [])
    assert publisher.dropped == 2
    publisher._limit = 10
    publisher.publish(3.0, [])
    assert [number for number, _ in client.replay(0)] == [2]


def test_addresses_that_cannot_be_had_are_refused(publisher: KVPublisher) -> None:
    for address in (publisher.endpoint, "nonsense", "tcp://256.1.1.1:1"):
        with pytest.raises(ConfigError, match="cannot bind"):
            KVPublisher(address)


def test_addresses_are_checked_before_a_model_is_loaded(publisher: KVPublisher) -> None:
    taken = publisher.endpoint
    for config in (
        EngineConfig(kv_events="nonsense"),
        EngineConfig(kv_events=taken),
        EngineConfig(kv_events="tcp://127.0.0.1:*", kv_events_replay=taken),
    ):
        with pytest.raises(ConfigError, match="cannot bind"):
            open_recorder(config)
    publisher.close()
    open_recorder(EngineConfig(kv_events=taken))
    KVPublisher(taken).close()  # it was let go of


def test_closing_sends_what_is_queued() -> None:
    publisher = KVPublisher("tcp://127.0.0.1:*")
    for number in range(100):
        publisher.publish(float(number), [])
    publisher.close()
    assert publisher.published == 100
    assert not publisher._thread.is_alive()
