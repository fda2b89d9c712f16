"""Answers that go on elsewhere. Owns: `Migration`: booking the rest of a broken answer, asking another worker
for it, and telling the client if there is none.

Rules:
1. A continuation is a booking of its own, whose prompt is the prompt and the outputs so far. It may wait for
   a worker, but not behind requests whose answers have not begun.
2. It goes to own engines that take answers up, and not to the one that has just failed it. Those that failed
   an earlier part may be well again.
3. An answer is taken up `migrations` times at most, so that a request that kills its worker does not kill one
   after another for as long as its answer grows. For each time `retries` further workers are tried after the
   first, as for a request whose answer has not begun; a worker that says that the continuation is wrong (4xx
   but those in `MAY_TRY`) ends it.
4. The client learns of it only if it fails: by an error event at the end of its stream.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial

from starlette.types import Send

from hotprefix.fleet.records import RouteRequest, Stage
from hotprefix.router.attempt import Sent, attempt
from hotprefix.router.config import RouterConfig
from hotprefix.router.exchange import Broken, Query, WorkerFailed
from hotprefix.router.passage import Continuation, Way
from hotprefix.server.errors import ApiError

MAY_TRY = frozenset({401, 404, 409, 429})
"""The internal key is another there, or none; the prompt has other ids there; there is no room."""


class Cut(Exception):
    """The answer broke off, and the client has been told. kind: as `Broken`'s."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _NotTaken(Exception):
    """No worker goes on with it. outcome: why, in a word."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class Migration:
    """See the module's rules."""

    def __init__(self, config: RouterConfig) -> None:
        self._times, self._retries = config.migrations, config.retries

    async def complete(self, sent: Sent, send: Send, way: Way, broken: Broken) -> None:
        """Complete an answer that broke off. Raises Cut."""
        asked, times, tally = sent.ticket.request, 0, sent.pool.desk.tally
        why = str(broken)
        while (wanted := way.continuation()) is not None:
            times += 1
            try:
                if times > self._times:
                    raise _NotTaken("too_often", f"it was taken up {self._times} times (--migrations)")
                self._leave(sent, asked, wanted)
                await self._elsewhere(sent, send, way, wanted, broken.kind)
                return
            except Broken as again:
                broken, why = again, str(again)
            except _NotTaken as end:
                tally.migrations[broken.kind, end.outcome] += 1
                why += f", and no other could go on with it: {end}"
                break
        last = way.broken(why)
        if last is not None:
            with contextlib.suppress(OSError):
                await send({"type": "http.response.body", "body": last, "more_body": False})
        raise Cut(broken.kind, why)

    def _leave(self, sent: Sent, asked: RouteRequest, wanted: Continuation) -> None:
        """End the stay with the worker that failed, and make the ticket one for the rest of the answer.
        asked: the request as it came."""
        pool, ticket = sent.pool, sent.ticket
        assert ticket.decision is not None
        failed = ticket.decision.worker
        pool.desk.close(ticket, Stage.FAILED)
        ticket.begun = True
        ticket.avoid = {failed} | {worker.name for worker in pool.workers.values() if not worker.resumes}
        prompt, outputs = asked.prompt + wanted.outputs, max(1, asked.outputs - wanted.outputs)
        ticket.request = replace(asked, prompt=prompt, outputs=outputs)

    async def _elsewhere(self, sent: Sent, send: Send, way: Way, wanted: Continuation, kind: str) -> None:
        """Try workers until one goes on with the answer. Raises Broken if that one fails, too, and
        _NotTaken."""
        desk, ticket = sent.pool.desk, sent.ticket
        query = Query("POST", wanted.path, "", wanted.body, True)
        why = ""
        for _ in range(self._retries + 1):
            try:
                name = (await desk.place(ticket)).worker
            except ApiError as error:
                full = "there is no other that can" if error.status == 503 else error.message
                raise _NotTaken("no_worker", why or full) from None
            try:
                async with attempt(sent, query) as exchange:
                    status, why = exchange.status, f"{name}: {exchange.complaint()}"
                    if status == 200:
                        desk.tally.migrations[kind, "resumed"] += 1
                        await exchange.relay(send, way, partial(desk.first_token, ticket))
                        return
            except WorkerFailed as failure:
                status, why = 502, f"{name}: {failure}"
            if status < 500 and status not in MAY_TRY:
                raise _NotTaken("refused", why)
            desk.close(ticket, Stage.FAILED)
            ticket.avoid.add(name)
        raise _NotTaken("failed", why)
