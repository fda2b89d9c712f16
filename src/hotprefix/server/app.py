"""The application. Owns: the table of routes, and the middleware around them.

Rules: one service object is behind every route; nothing is global. Every answer that is an error has OpenAI's
shape, also for unknown routes and for failures of the server itself.
"""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotprefix.errors import HotprefixError
from hotprefix.server.admin import Admin
from hotprefix.server.config import ServerConfig
from hotprefix.server.errors import ApiError, answer, response_of
from hotprefix.server.generation import Engine
from hotprefix.server.guard import Guard
from hotprefix.server.kv_routes import KVRoutes
from hotprefix.server.live_page import LivePage
from hotprefix.server.load_report import LoadRoute
from hotprefix.server.resume import RESUME_PATH
from hotprefix.server.service import Service
from hotprefix.server.text import Text


class Ending:
    """ASGI middleware that answers a request which the end of the server cuts off before its answer began."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if begun:
                raise
            message = "the server shut down before the answer was complete"
            await response_of(ApiError(503, message, code="draining"))(scope, receive, send)


def create_app(engine: Engine, config: ServerConfig, text: Text | None = None) -> Starlette:
    """The ASGI application over an engine. `app.state.service` is its `Service`; if the tokenizer is loaded
    later, set the service's `text` then."""
    service = Service(engine, config, text)
    admin, live, load = Admin(service), LivePage(service), LoadRoute(service)
    kv = KVRoutes(service, load.latest)
    routes = [
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.completion, methods=["POST"]),
        Route(RESUME_PATH, service.resume, methods=["POST"]),
        Route("/v1/models", admin.models),
        Route("/v1/models/{name:path}", admin.model),
        Route("/tokenize", admin.tokenize, methods=["POST"]),
        Route("/detokenize", admin.detokenize, methods=["POST"]),
        Route("/", live.page),
        Route("/live.json", live.data),
        Route("/health", admin.health),
        Route("/readyz", admin.health),
        Route("/livez", admin.alive),
        Route("/metrics", admin.metrics),
        Route("/load", load.load),
        Route("/kv_event_sources", kv.sources),
        Route("/kv_snapshot", kv.snapshot),
        Route("/server_info", admin.server_info),
        Route("/version", admin.version),
        Route("/flush_cache", admin.flush, methods=["POST"]),
        Route("/reset_prefix_cache", admin.flush, methods=["POST"]),
    ]

    async def failed(request: Request, error: Exception) -> Response:
        response = await answer(request, error)
        service.metrics.error(response.status_code)
        return response

    kinds = (ApiError, HotprefixError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Ending), Middleware(Guard, config=config, told=service.metrics.error)],
        exception_handlers=dict.fromkeys(kinds, failed),
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app
