"""Every route that does not generate. Owns: models, tokenize, health, metrics, server info, flush.

Rules: /health (and /readyz) is 200 only if a request would be answered; /livez is 200 as long as the process
can get there by itself. Nothing here waits long for an engine that is busy or stuck: after `PATIENCE_S` the
answer is given without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hotprefix import __version__
from hotprefix.engine.messages import EngineStats
from hotprefix.errors import HotprefixError, InputError
from hotprefix.server import chat
from hotprefix.server.bodies import check
from hotprefix.server.errors import ApiError
from hotprefix.server.logprobs import token_name
from hotprefix.server.schemas import Detokenize, TokenizeChat, TokenizeText
from hotprefix.server.service import Service

PATIENCE_S = 5.0


class Admin:
    """The routes, each an endpoint of the application."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = int(time.time())

    async def health(self, request: Request) -> Response:
        """200 or 503, with the reason."""
        if self._service.gate.draining:
            return _unhealthy("draining: the server is shutting down")
        if self._service.text is None:
            return _unhealthy("loading: the model is loading")
        health = self._service.engine.health()
        return JSONResponse({"status": "ok"}) if health.ok else _unhealthy(health.reason)

    async def alive(self, request: Request) -> Response:
        """200 also while the engine loads, is replaced or drains; 503 where only a new process can help."""
        health = self._service.engine.health()
        return JSONResponse({"status": "ok"}) if health.alive else _unhealthy(health.reason)

    async def models(self, request: Request) -> Response:
        cards = [self._card(name) for name in self._service.names()]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._card(self._service.check_model(request.path_params["name"])))

    def _card(self, name: str) -> dict[str, Any]:
        info = self._service.engine.info
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "hotprefix",
            "root": info.model,
            "parent": None,
            "max_model_len": info.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        return await self._service.intake.use(request, self._tokenize)

    def _tokenize(self, value: Any) -> Response:
        text, info = self._service.ready()
        body: TokenizeChat | TokenizeText
        if value.get("messages") is not None:
            body = check(TokenizeChat, value)
            ids = chat.rendered(body, text)
        else:
            body = check(TokenizeText, value)
            ids = text.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        self._service.check_model(body.model)
        names = [token_name(text, token) for token in ids] if body.return_token_strs else None
        return JSONResponse(
            {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids, "token_strs": names}
        )

    async def detokenize(self, request: Request) -> Response:
        return await self._service.intake.use(request, self._detokenize)

    def _detokenize(self, value: Any) -> Response:
        body = check(Detokenize, value)
        text, info = self._service.ready()
        self._service.check_model(body.model)
        _check_ids(body.tokens, info.vocab_size)
        decoded = text.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return JSONResponse({"prompt": decoded})

    async def metrics(self, request: Request) -> Response:
        engine, metrics = self._service.engine, self._service.metrics
        stats = await self._stats()
        model = self._service.names()[0] if stats is not None else metrics.engine.model
        metrics.engine.update(model, stats, up=engine.health().ok, restarts=engine.restarts)
        return Response(metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def server_info(self, request: Request) -> Response:
        info, stats = self._service.engine.info, await self._stats()
        return JSONResponse(
            {
                "version": __version__,
                "models": self._service.names(),
                "engine": {**dataclasses.asdict(info), "details": dict(info.details)},
                "state": self._service.engine.health().reason,
                "stats": None if stats is None else dataclasses.asdict(stats),
            }
        )

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def flush(self, request: Request) -> Response:
        """Make what was computed before, also by requests that run now, invisible to later requests. The
        answer tells what could not be freed yet, and what was not touched."""
        async with patience():
            report = await self._service.engine.flush_cache()
        message = f"flushed {report.freed} tokens"
        if report.kept:
            held_by = f"{report.running} running requests until those end"
            message += f"; {report.kept} more are held by {held_by}, and are found by no other"
        if report.storage:
            message += "; the external store (--l3) was not flushed: what it holds can still be found"
        return JSONResponse(
            {
                "success": True,
                "message": message,
                "freed_tokens": report.freed,
                "kept_tokens": report.kept,
                "running_requests": report.running,
                "external_store_flushed": False if report.storage else None,
            }
        )

    async def _stats(self) -> EngineStats | None:
        try:
            async with patience():
                return await self._service.engine.stats()
        except (HotprefixError, ApiError):
            return None


@contextlib.asynccontextmanager
async def patience() -> AsyncIterator[None]:
    """Raises ApiError 503 if the engine does not answer in time."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield
    except TimeoutError:
        message = f"the engine did not answer within {PATIENCE_S:.0f} s"
        raise ApiError(503, message, code="engine_unavailable") from None


def _unhealthy(reason: str) -> Response:
    body = ApiError(503, reason, code="unhealthy").body()
    return JSONResponse({"status": "unavailable", **body}, status_code=503)


def _check_ids(ids: list[int], vocab_size: int) -> None:
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InputError(f"tokens holds {wrong}: the model has ids 0 to {vocab_size - 1}", param="tokens")
