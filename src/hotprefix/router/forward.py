"""One request through the router. Owns: `Forward`: reading it, choosing a worker, trying another one, and the
one ending of it all.

Rules:
1. A ticket is closed on every path: answered, refused, failed, cut, left by its client, or ended by a fault
   of ours.
2. Before the first byte a request goes elsewhere on failed connections, 5xx and 429, `retries` times at most,
   never on another 4xx. A worker that took the request and then said nothing for too long may still work on
   it, so that is no reason to run it twice; a worker that stopped answering everything is. After the first
   byte, see migration.py.
3. If nobody else can take it, the client gets the last answer that a worker gave, as it is.
4. A client that leaves frees its worker at once: the connection to it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from hotprefix.fleet.records import Stage
from hotprefix.router.attempt import Sent, attempt
from hotprefix.router.calls import Call, Why
from hotprefix.router.config import RouterConfig
from hotprefix.router.exchange import Broken, Exchange, Query, WorkerFailed
from hotprefix.router.isolation import salted
from hotprefix.router.migration import Cut, Migration
from hotprefix.router.passage import Passage, Way
from hotprefix.router.pools import Pools
from hotprefix.router.prompt import Matcher
from hotprefix.router.splice import Splice
from hotprefix.server.config import ServerConfig
from hotprefix.server.errors import ApiError, response_of
from hotprefix.server.guard import ARRIVED, TENANT, Gate, payer
from hotprefix.server.intake import Intake

if TYPE_CHECKING:
    from hotprefix.router.route_spans import RouteSpans

log = logging.getLogger(__name__)
ENDS_WITH_DONE = frozenset({"/v1/chat/completions", "/v1/completions"})


class Forward:
    """See the module's rules. told: called with the status of each refusal. spans: makes spans of requests;
    None = there are none."""

    def __init__(
        self, config: RouterConfig, server: ServerConfig, pools: Pools, matcher: Matcher, gate: Gate,
        told: Callable[[int], None], clock: Callable[[], float] = time.monotonic,
        spans: RouteSpans | None = None,
    ) -> None:  # fmt: skip
        self._spans = spans
        self._config, self._server, self._pools, self._matcher = config, server, pools, matcher
        self._gate, self._told, self._clock = gate, told, clock
        self._intake = Intake(server)
        self._migration = Migration(config)
        self.clients_left = 0
        self.cut: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        begun = entered = False

        async def watched(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            self._gate.enter()
            entered = True
            await self._whole(scope, receive, watched)
        except ClientDisconnect:
            self.clients_left += 1
        except ApiError as error:
            if begun:
                raise
            self._told(error.status)
            await response_of(error)(scope, receive, send)
        finally:
            if entered:
                self._gate.leave()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._intake.reading(Request(scope, receive)) as body:
            call = Call()
            try:
                with call.watching(receive):
                    await self._answered(scope, send, call, bytes(body))
            except asyncio.CancelledError:
                if not call.caught(Why.CLIENT_LEFT):
                    raise
                self.clients_left += 1
            except Cut as cut:
                self.cut[cut.kind] = self.cut.get(cut.kind, 0) + 1

    async def _answered(self, scope: Scope, send: Send, call: Call, body: bytes) -> None:
        headers = Headers(scope=scope)
        owner = scope.get(TENANT)
        if owner is not None:
            body = salted(body, owner)
        path = scope["path"]
        prompt = await self._matcher.read(path, body, headers, None)
        pool = self._pools.of(prompt.model)
        client = scope.get("client") or ("",)
        ticket = pool.desk.ticket(prompt, payer(self._server, headers, client[0]))
        complete = path in ENDS_WITH_DONE
        query = Query(scope["method"], path, query_of(scope), body, complete)
        internal = self._config.internal_key if complete and self._config.migrations else None
        span = None if self._spans is None else self._spans.begin(headers, scope[ARRIVED])
        stage, status = Stage.FAILED, None
        try:
            sent = Sent(pool, ticket, query, scope, call, internal, self._clock, span)
            status = await self._tried(sent, send)
            stage = Stage.ENDED if status < 400 else Stage.FAILED
        except asyncio.CancelledError:
            stage = Stage.CANCELLED
            raise
        finally:
            pool.desk.close(ticket, stage)
            if span is not None:
                span.ended(ticket, pool.model, stage, status)

    async def _tried(self, sent: Sent, send: Send) -> int:
        """Try workers until one answers. Returns the status of its answer. Raises ApiError, Cut."""
        pool, ticket = sent.pool, sent.ticket
        await pool.desk.place(ticket)
        for left in range(self._config.retries, -1, -1):
            try:
                status = await self._once(sent, send, again=left > 0)
                if status is not None:
                    return status
            except WorkerFailed as failure:
                await self._after(sent, failure, again=left > 0)
        raise AssertionError("the last attempt answers or raises")

    async def _once(self, sent: Sent, send: Send, *, again: bool) -> int | None:
        """One attempt. Returns the status of the answer that was passed on; None: another worker has been
        chosen instead. Raises WorkerFailed, Cut."""
        seen = partial(sent.pool.desk.first_token, sent.ticket)
        async with attempt(sent, sent.query) as exchange:
            if exchange.retried and again and self._elsewhere(sent):
                return None
            way = _way(sent, exchange)
            await exchange.begin(send)
            try:
                await exchange.relay(send, way, seen)
                return exchange.status
            except Broken as error:
                broken = error
        await self._migration.complete(sent, send, way, broken)
        return 200

    def _elsewhere(self, sent: Sent) -> bool:
        """Whether another worker takes the request, without a wait: there is an answer to give already."""
        desk, ticket = sent.pool.desk, sent.ticket
        assert ticket.decision is not None
        name = ticket.decision.worker
        desk.close(ticket, Stage.FAILED)
        ticket.avoid.add(name)
        with contextlib.suppress(ApiError):
            if desk.place_now(ticket) is not None:
                desk.tally.retries += 1
                return True
        return False

    async def _after(self, sent: Sent, failure: WorkerFailed, *, again: bool) -> None:
        """Another worker after a failure without an answer, if need be after a wait. If there is but one
        worker, and it closed a connection that had rested, it is tried again. Raises ApiError."""
        desk, ticket = sent.pool.desk, sent.ticket
        assert ticket.decision is not None
        name = ticket.decision.worker
        desk.close(ticket, Stage.FAILED)
        if failure.accepted or not again:
            status = 504 if failure.kind == "timeout" else 502
            message = f"worker {name} failed before its answer began: {failure}"
            raise ApiError(status, message, code="worker_failed")
        alone = sent.pool.workers.keys() <= ticket.avoid | {name}
        if not (alone and failure.kind == "disconnect" and name not in ticket.avoid):
            ticket.avoid.add(name)
        desk.tally.retries += 1
        await desk.place(ticket)


def _way(sent: Sent, exchange: Exchange) -> Way:
    """The way of this answer's bytes."""
    ok, query = exchange.status == 200, sent.query
    if ok and exchange.events and sent.internal is not None and query.body is not None:
        return Splice(query.path, bytes(query.body))
    return Passage(events=exchange.events, must_end=ok and query.done_at_end)


def query_of(scope: Scope) -> str:
    """The query as it came. Raises ApiError 400 if it holds anything but visible ASCII."""
    query: bytes = scope.get("query_string", b"")
    if not all(0x21 <= byte <= 0x7E for byte in query):
        raise ApiError(400, "the query holds characters that a URL cannot: encode them", code="invalid_http")
    return query.decode("ascii")
