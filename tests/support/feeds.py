"""What tests of KV feeds share: a fleet behind the feed's seam, and publishers that do as they are told."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from hotprefix.fleet.config import FleetConfig, RoutingPolicy
from hotprefix.fleet.fleet import Fleet
from hotprefix.fleet.records import Batch, ReplayWanted, Shelf
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.cache.keys import chain, root_key
from hotprefix.kernel.request import Namespace
from hotprefix.records import kvwire
from hotprefix.records.kvevents import END, block_hash
from hotprefix.records.kvwire import Form, PageEvent, to_wire
from hotprefix.router.kv_feed import KVFeed
from hotprefix.server.guard import salt as salt_text
from tests.support.fleet import profile

MODEL = "fp"
encode = msgspec.msgpack.encode


class Desk:
    """The feed's sink: a fleet with a clock of its own that ticks with each call."""

    def __init__(self, page_size: int = 4, held: int = 64, workers: Sequence[str] = ("w",)) -> None:
        self.fleet = Fleet(FleetConfig(page_size=page_size, held=held, policy=RoutingPolicy.LEAST_LOAD))
        self._ticks = itertools.count(1)
        for worker in workers:
            self.fleet.join(worker, profile(page_size=page_size), self.now())

    def now(self) -> float:
        return float(next(self._ticks))

    def events(self, worker: str, batch: Batch) -> ReplayWanted | None:
        return self.fleet.events(worker, batch, self.now())

    def replayed(self, wanted: ReplayWanted, batches: tuple[Batch, ...]) -> ReplayWanted | None:
        return self.fleet.replayed(wanted, batches, self.now())

    def replay_failed(self, wanted: ReplayWanted) -> ReplayWanted | None:
        return self.fleet.replay_failed(wanted, self.now())

    def snapshot(self, worker: str, batch: Batch) -> ReplayWanted | None:
        return self.fleet.snapshot(worker, batch, self.now())

    def pages(self, worker: str = "w") -> set[tuple[Shelf, int]]:
        """What the fleet's index says the worker has."""
        mask = self.fleet._members.all[worker].mask
        index = self.fleet._index
        return {
            (shelf, key)
            for key in list(index._holders)
            for shelf, held in zip(Shelf, index.holders(key), strict=True)
            if held & mask
        }

    def keys(self, worker: str = "w") -> set[int]:
        """Of those in L1."""
        return {key for shelf, key in self.pages(worker) if shelf is Shelf.L1}


def page_keys(
    ids: Sequence[int], page_size: int = 4, salt: str | None = None, adapter: str | None = None
) -> list[int]:
    """Our keys of a prompt, as an engine of ours computes them. salt: the request's cache_salt."""
    namespace = Namespace(MODEL, adapter, None, None if salt is None else salt_text(None, salt))
    return list(map(block_hash, chain(root_key(namespace, page_size), tk.encode(ids), page_size)))


class Publisher:
    """A PUB (that sees its subscribers come) and a ROUTER under the test's control. log: batches as payloads,
    by number. deaf: it does not answer questions. asked: the numbers that were asked for."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:*", form: Form = Form.MAPS) -> None:
        self._form = form
        self.log: dict[int, bytes] = {}
        self.asked: list[int] = []
        self.deaf = False
        context = zmq.asyncio.Context.instance()
        self._pub, self._router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self.endpoint, self.replay = self._bound(self._pub, endpoint), self._bound(self._router)
        self.subscribers = 0
        self._tasks = [asyncio.ensure_future(self._answers()), asyncio.ensure_future(self._counts())]

    def _bound(self, socket: Any, endpoint: str = "tcp://127.0.0.1:*") -> str:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint)
        return str(socket.getsockopt(zmq.LAST_ENDPOINT).decode())

    async def _counts(self) -> None:
        with suppress(zmq.ZMQError):  # a test may close the socket
            while True:
                self.subscribers += 1 if (await self._pub.recv())[0] else -1

    async def _answers(self) -> None:
        while True:
            who, empty, first = await self._router.recv_multipart()
            number = int.from_bytes(first, "big")
            self.asked.append(number)
            if self.deaf:
                continue
            for each, payload in sorted(self.log.items()):
                if each >= number:
                    frames = [b"kv", each.to_bytes(8, "big"), payload]
                    await self._router.send_multipart([who, empty, *frames])
            await self._router.send_multipart([who, empty, b"", END, b""])

    def add(self, ts: float, *events: PageEvent, rank: int | None = 0) -> int:
        """A batch that nobody hears of unless it is asked for."""
        number = len(self.log)
        self.log[number] = encode(to_wire(kvwire.Batch(ts, events, rank), self._form))
        return number

    async def publish(self, ts: float, *events: PageEvent, rank: int | None = 0) -> int:
        """A batch to whoever has subscribed, or will in a moment."""
        await until(lambda: self.subscribers)
        number = self.add(ts, *events, rank=rank)
        await self.send(b"kv", number.to_bytes(8, "big"), self.log[number])
        return number

    async def send(self, *frames: bytes) -> None:
        await self._pub.send_multipart(frames)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pub.close(linger=0)
        self._router.close(linger=0)


async def until(what: Callable[[], Any], seconds: float = 20.0) -> None:
    """Wait for it."""
    async with asyncio.timeout(seconds):
        while not what():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(feed: KVFeed) -> AsyncIterator[KVFeed]:
    """The feed while it runs; it ends when it is cancelled and not before."""
    task = asyncio.ensure_future(feed.run())
    try:
        yield feed
        assert not task.done(), task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
