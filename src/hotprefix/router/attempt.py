"""Asking the worker that was chosen. Owns: `Sent`, what is the same for every attempt of a request, and
`attempt`.

Rules: only own engines get the internal key, and only for routes whose answers they can take up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from starlette.types import Scope

from hotprefix.router.calls import Call
from hotprefix.router.exchange import Exchange, Query, WorkerFailed
from hotprefix.router.headers import to_worker
from hotprefix.router.pools import Pool
from hotprefix.router.ticket import Ticket
from hotprefix.server.guard import REQUEST_ID

if TYPE_CHECKING:
    from hotprefix.router.route_spans import RouteSpan


class Sent(NamedTuple):
    """query: as the client sent it. internal: the internal key; None = the answer is taken up nowhere. span:
    the request's; None = no spans are made."""

    pool: Pool
    ticket: Ticket
    query: Query
    scope: Scope
    call: Call
    internal: str | None
    clock: Callable[[], float]
    span: RouteSpan | None = None


@asynccontextmanager
async def attempt(sent: Sent, query: Query) -> AsyncIterator[Exchange]:
    """The exchange with the ticket's worker, up to the first byte of its answer. Raises WorkerFailed."""
    ticket = sent.ticket
    assert ticket.decision is not None
    worker = sent.pool.workers.get(ticket.decision.worker)
    if worker is None:
        raise WorkerFailed("left", "it has left the fleet")
    internal = sent.internal if worker.resumes else None
    headers = to_worker(sent.scope["headers"], worker.spec.client_key, sent.scope[REQUEST_ID], internal)
    if sent.span is not None:
        sent.span.goes(ticket, headers)
    sent.pool.desk.sent(ticket)
    async with Exchange(worker, sent.call, sent.clock) as exchange:
        await exchange.send(query, headers)
        yield exchange
