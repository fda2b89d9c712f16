"""One worker's KV events, from its sockets to the fleet. Owns: `KVFeed`.

Rules:
1. Nothing that a worker sends ends the feed, and nothing makes it take more memory than its bounds say. What
   is wrong is counted by kind and said once (`problems`).
2. Batches that are missing are asked for as soon as the fleet says so. If all from the first are missing, a
   snapshot is taken, where there is one. If neither comes, the fleet is told, and drops what it knew.
3. What is lost without a trace is looked for: at the beginning, after each new connection, and after a time
   without events, the worker is asked whether there is more. If it does not know its own last batch any more,
   it has begun again.
4. After an answer that failed, the worker is left alone for a while.

    subscription ──► live messages ──►┐
    worker's replay ─► asked for ────►├─► way (kv_sinks.py) ─► fleet ─► what to ask for next
    worker's snapshot ───────────────►┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from hotprefix.fleet.records import ReplayWanted
from hotprefix.router.foreign_keys import ForeignKeys
from hotprefix.router.kv_messages import BadMessage, Message, read_live, read_replayed
from hotprefix.router.kv_sinks import Foreign, Own, Sink, Way
from hotprefix.router.kv_snapshot import Snapshot, whole_snapshot
from hotprefix.router.kv_sockets import Line, Subscription, ask
from hotprefix.router.problems import Problems

log = logging.getLogger(__name__)

RETRY_S = (0.2, 5.0)
IDLE_S = 10.0
REST_S = 5.0
PORTION = 1 << 18  # token ids and hashes
MOST_ANSWERS = 1 << 20
SNAPSHOT_S = 20.0


@dataclass(slots=True)
class FeedCounters:
    """Batches that came live; replays and snapshots that were asked for, and those that failed; lives that
    were seen to begin by rule 3; connections."""

    batches: int = 0
    replays: int = 0
    replays_failed: int = 0
    snapshots: int = 0
    snapshots_failed: int = 0
    restarts: int = 0
    connections: int = 0


class _NoAnswer(Exception):
    """A replay did not come, or not to its end."""


class _At(NamedTuple):
    """The last batch that is known of. ts: None = not told."""

    number: int
    ts: float | None


class KVFeed:
    """See the module's rules.

    endpoint, replay: addresses of the worker's sockets. A `*` in `endpoint` is bound.
    snapshot: gets a page of the worker's snapshot. It is for our own engines.
    foreign: makes our keys of another engine's blocks; None = the worker is one of our engines.
    rank: only batches of this data-parallel rank count; None = all.
    up: whether the connection stands.
    """

    def __init__(
        self, worker: str, endpoint: str, replay: str | None, snapshot: Snapshot | None, page_size: int,
        sink: Sink, *, foreign: ForeignKeys | None = None, rank: int | None = None, idle_s: float = IDLE_S,
    ) -> None:  # fmt: skip
        self.worker, self._endpoint, self._replay_at = worker, endpoint, replay
        self._snapshot_page, self._sink, self._rank, self._idle_s = snapshot, sink, rank, idle_s
        self._way: Way = Own(worker, page_size, sink) if foreign is None else Foreign(worker, foreign, sink)
        self.problems = Problems(log, f"KV events of {worker} at {endpoint}")
        self.counters = FeedCounters()
        self.up = False
        self._last: _At | None = None
        self._anchor: _At | None = None  # the last one of the connection before
        self._wanted: ReplayWanted | None = None
        self._look = False
        self._bell = asyncio.Event()
        self._rests_until = 0.0

    async def run(self) -> None:
        """Feed until cancelled."""
        wait = RETRY_S[0]
        while True:
            before = self.counters.connections
            try:
                subscription = Subscription(self._endpoint)
                try:
                    await self._follow(subscription)
                finally:
                    self.up = False
                    subscription.close()
            except (zmq.ZMQError, OSError) as error:
                self.problems.tell("address", error, "it is tried again")
            wait = RETRY_S[0] if self.counters.connections > before else min(2 * wait, RETRY_S[1])
            await asyncio.sleep(wait)

    async def _follow(self, subscription: Subscription) -> None:
        """Follow one connection until it is lost. (A task group would lose a cancellation that comes together
        with the loss.)"""
        parts = (self._listen(subscription), self._watch(subscription), self._ask())
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        async for frames in subscription.waiting():
            self._take(frames)
        for task in done:
            task.result()

    # -- what comes by itself ---------------------------------------------------------------------

    async def _listen(self, subscription: Subscription) -> None:
        while True:
            self._take(await subscription.receive())

    async def _watch(self, subscription: Subscription) -> None:
        """Until the connection is lost."""
        async for line in subscription.line():
            if line is Line.UP:
                self.up, self._look, self._anchor = True, True, self._anchor or self._last
                self.counters.connections += 1
                self._bell.set()
            elif line is Line.UNREACHABLE:
                hint = "no connection (if the engine connects, as vLLM does without a *, give tcp://*:PORT)"
                self.problems.tell(line.value, hint, "it is tried again and again")
            else:
                self.up = False
                if line is Line.NO_PUBLISHER:
                    told = "what answers there is no PUB socket"
                    self.problems.tell(line.value, told, "it is tried again and again")
                if not subscription.binds:
                    return

    def _take(self, frames: list[bytes]) -> None:
        """A live message."""
        try:
            message = read_live(frames)
            if self._other_rank(message):
                return
            self._way.check(message)
            self.counters.batches += 1
            self._last = _At(message.number, message.batch.ts)
            self._next(self._way.live(message))
        except BadMessage as error:
            self._refused(error)
        except Exception as error:
            self._failed(error)

    def _other_rank(self, message: Message) -> bool:
        rank = message.batch.rank
        return self._rank is not None and rank is not None and rank != self._rank

    def _next(self, wanted: ReplayWanted | None) -> None:
        """The fleet wants something, or nothing new."""
        if wanted is not None:
            self._wanted = wanted
            self._bell.set()

    def _refused(self, error: BadMessage) -> None:
        self.problems.tell(error.kind, error.detail, "such messages are left out")

    def _failed(self, error: Exception) -> None:
        """Something here is wrong, not there. The feed goes on, since others depend on it."""
        if self.problems.counts["fault"] == 0:
            log.error("KV events of %s: a fault of the router", self.worker, exc_info=error)
        self.problems.tell("fault", f"{type(error).__name__}: {error}", "the message is left out")

    # -- what is asked for ------------------------------------------------------------------------

    async def _ask(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._idle_s):
                    await self._bell.wait()
            except TimeoutError:
                self._look = self.up
            self._bell.clear()
            try:
                if self._wanted is not None:
                    wanted, self._wanted = self._wanted, None
                    await self._get(wanted)
                elif self._look:
                    self._look = False
                    await self._look_for_more()
            except _NoAnswer:
                pass  # it was told; the next look tries again
            except Exception as error:
                self._failed(error)
            if self._wanted is not None or self._look:
                self._bell.set()

    async def _get(self, wanted: ReplayWanted) -> None:
        """Answer the fleet's question. It always gets one, as it holds batches back until then."""
        first, snapshot = wanted.first, self._snapshot_page is not None
        try:
            if snapshot and (first == 0 or self._replay_at is None):
                number = await self._take_snapshot()
                if number is not None:
                    first, snapshot = number + 1, False
            if not await self._replay(first, wanted, whole=snapshot) and snapshot:
                await self._take_snapshot()
        except _NoAnswer:
            if snapshot:
                await self._take_snapshot()
        finally:  # if it has got what it wanted, this means nothing to it
            self._next(self._way.failed(wanted))

    async def _look_for_more(self) -> None:
        """Find out what was lost without a trace (rule 3)."""
        last = self._anchor or self._last
        if last is None or last.number < 0:
            await self._from_the_start()
        elif self._replay_at is not None:
            first = await self._first_from(last.number)
            if first is not None and _same_life(first, last):
                await self._replay(last.number + 1, None)
            else:
                self.counters.restarts += 1
                self._last = None
                self._way.restarted()
                await self._from_the_start()
        self._anchor = None

    async def _from_the_start(self) -> None:
        if self._snapshot_page is None or await self._take_snapshot() is None:
            await self._replay(0, None)

    async def _first_from(self, number: int) -> Message | None:
        """The first batch that the worker still has from a number on."""
        async with aclosing(self._answers(number)) as answers:
            async for message in answers:
                return message
        return None

    async def _replay(self, first: int, wanted: ReplayWanted | None, *, whole: bool = False) -> bool:
        """Have batches sent again, and pass them on in portions: the first as the answer to `wanted`, if
        there is a question, the others as if they came live. whole: pass nothing on if the first is missing.
        Returns whether something was passed on, or nothing was missing. Raises _NoAnswer."""
        if self._replay_at is None:
            return False
        self.counters.replays += 1
        portion: list[Message] = []
        weight = 0
        async with aclosing(self._answers(first)) as answers:
            async for message in answers:
                if whole and not portion and message.number != first:
                    return False
                whole = False
                portion.append(message)
                weight += message.weight
                if weight > PORTION:
                    wanted = self._hand_in(portion, wanted)
                    portion, weight = [], 0
                    await asyncio.sleep(0)
        if whole and wanted is not None:
            return False
        self._next(self._hand_in(portion, wanted))
        return True

    def _hand_in(self, portion: list[Message], wanted: ReplayWanted | None) -> ReplayWanted | None:
        """Pass messages on. Returns what is wanted then."""
        for message in portion:
            if self._last is None or message.number > self._last.number:
                self._last = _At(message.number, message.batch.ts)
        if wanted is not None:
            return self._way.replayed(wanted, portion)
        for message in portion:
            wanted = self._way.live(message) or wanted
        return wanted

    async def _answers(self, first: int) -> AsyncGenerator[Message]:
        """The worker's batches from a number on. Those that cannot be read are left out. Raises _NoAnswer."""
        clock, count = asyncio.get_running_loop().time, 0
        if self._replay_at is None or clock() < self._rests_until:
            raise _NoAnswer
        try:
            async with aclosing(ask(self._replay_at, first)) as frames:
                async for each in frames:
                    count += 1
                    if count > MOST_ANSWERS:
                        raise TimeoutError(f"no end after {MOST_ANSWERS} batches")
                    try:
                        message = read_replayed(each)
                        if message is None:
                            return
                        if message.number >= first and not self._other_rank(message):
                            self._way.check(message)
                            yield message
                    except BadMessage as error:
                        self._refused(error)
        except (TimeoutError, zmq.ZMQError, OSError) as error:
            self.counters.replays_failed += 1
            self._rests_until = clock() + REST_S
            told = f"no answer from {self._replay_at}: {error!r}"
            self.problems.tell("replay", told, "what is known of the worker is dropped if it has gaps")
            raise _NoAnswer from None

    # -- snapshots --------------------------------------------------------------------------------

    async def _take_snapshot(self) -> int | None:
        """Pass a whole snapshot on. Returns the number of the last batch that it covers; None if there is
        none to be had."""
        assert self._snapshot_page is not None
        self.counters.snapshots += 1
        try:
            async with asyncio.timeout(SNAPSHOT_S):
                batch = await whole_snapshot(self._snapshot_page)
        except Exception as error:  # whatever the caller's HTTP raises
            self.counters.snapshots_failed += 1
            self.problems.tell("snapshot", repr(error), "events build up what is known")
            return None
        self._next(self._sink.snapshot(self.worker, batch))
        if self._last is None or self._last.number < batch.number:
            self._last = _At(batch.number, None)
        return batch.number


def _same_life(first: Message, last: _At) -> bool:
    """Whether the first batch from the last known number on is of the same life as that one. If the worker
    has forgotten that very batch, those that followed it are all that tells."""
    return first.number > last.number or last.ts is None or first.batch.ts == last.ts
