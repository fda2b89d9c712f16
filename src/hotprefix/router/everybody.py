"""Routes that the router answers for the whole fleet. Owns: the models of all workers, questions that any
worker of a pool can answer, and the flush of every cache.

Rules: nothing here is booked, because nothing here is computed by a model. A question goes to one worker
after the other until one answers. A flush goes to all workers, and says what each of them said.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING, Any

import aiohttp
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hotprefix.router.asking import reason
from hotprefix.router.forward import query_of
from hotprefix.router.headers import to_client, to_worker
from hotprefix.router.worker import Worker
from hotprefix.router.worker_spec import Kind
from hotprefix.server.config import ServerConfig
from hotprefix.server.errors import ApiError
from hotprefix.server.guard import REQUEST_ID
from hotprefix.server.intake import Intake

if TYPE_CHECKING:
    from hotprefix.router.router import Router

MOST_BYTES = 64 << 20
PATIENCE_S = 30.0


class Everybody:
    """The routes, each an endpoint."""

    def __init__(self, router: Router, server: ServerConfig) -> None:
        self._router = router
        self._intake = Intake(server)
        self._turns = count()

    async def models(self, request: Request) -> Response:
        """The union of what the workers say, each name once."""
        return JSONResponse({"object": "list", "data": list(self._cards().values())})

    async def model(self, request: Request) -> Response:
        name = request.url.path.removeprefix("/v1/models/")
        card = self._cards().get(name)
        if card is None:
            known = ", ".join(self._cards()) or "none"
            raise ApiError(404, f"the model {name[:200]!r} is not here; there is {known}", param="model",
                           code="model_not_found")  # fmt: skip
        return JSONResponse(card)

    def _cards(self) -> dict[str, Any]:
        cards: dict[str, Any] = {}
        for worker in self._router.roster.workers.values():
            for card in worker.heard.cards if worker.heard is not None and worker.model is not None else ():
                cards.setdefault(str(card["id"]), card)
        return cards

    async def one(self, request: Request) -> Response:
        """The answer of one worker of the pool, as it is."""
        async with self._intake.reading(request) as body:
            sent = bytes(body)
            try:
                value = from_json(sent)
            except ValueError:
                value = None
            model = value.get("model") if isinstance(value, dict) else None
            pool = self._router.pools.of(model if isinstance(model, str) else None)
            able = pool.able(self._router.clock())
            turn = next(self._turns)
            last = "none can be asked now"
            for number in range(len(able)):
                worker = able[(turn + number) % len(able)]
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        return await _asked(worker, request, sent)
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                    last = f"{worker.name}: {reason(error)}"
        raise ApiError(502, f"no worker answered ({last})", code="worker_failed")

    async def flush(self, request: Request) -> Response:
        """Every worker flushes. 200 if all did."""
        workers = [w for w in self._router.roster.workers.values() if w.model is not None]
        answers = await asyncio.gather(*(self._flush(worker) for worker in workers))
        told = {worker.name: answer for worker, answer in zip(workers, answers, strict=True)}
        failed = sorted(name for name, answer in told.items() if not answer["success"])
        message = f"flushed {len(told) - len(failed)} of {len(told)} workers"
        if failed:
            message += f"; not flushed: {', '.join(failed)}"
        return JSONResponse(
            {"success": not failed, "message": message, "workers": told},
            status_code=200 if not failed else 502,
        )

    async def _flush(self, worker: Worker) -> dict[str, Any]:
        own = worker.heard is not None and worker.heard.kind is Kind.HOTPREFIX
        try:
            async with asyncio.timeout(PATIENCE_S):
                path = "/flush_cache" if own else "/reset_prefix_cache"
                async with worker.upstream.request("POST", path) as answer:
                    body = (await answer.content.read(4096)).decode(errors="replace")
                    status = answer.status
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return {"success": False, "message": reason(error)}
        if status != 200:
            return {"success": False, "message": f"{path} answers {status}"}
        if worker.model is not None:
            self._router.pools.all[worker.model].desk.flushed(worker.name)
        return {"success": True, "message": body[:1000]}


async def _asked(worker: Worker, request: Request, body: bytes) -> Response:
    """One worker's answer. Raises what aiohttp raises, and ValueError if it is too long."""
    scope = request.scope
    headers = to_worker(scope["headers"], worker.spec.client_key, scope[REQUEST_ID])
    path, query = scope["path"], query_of(scope)
    async with worker.upstream.request("POST", path, query, body, headers) as answer:
        found = bytearray()
        async for part in answer.content.iter_any():
            found += part
            if len(found) > MOST_BYTES:
                raise ValueError(f"its answer has more than {MOST_BYTES} bytes")
        response = Response(bytes(found), status_code=answer.status)
        kept = [(n, v) for n, v in to_client(answer.raw_headers) if n != b"content-length"]
        response.raw_headers = [*kept, (b"content-length", str(len(found)).encode())]
        return response
