"""The router as an application. Owns: `Router`: its parts, the table of routes, and the middleware around
them.

Rules:
1. Nothing is global: all parts belong to one router.
2. The hot path is bare ASGI; the routes of those who look after the router use starlette's requests.
3. Every answer that is an error has OpenAI's shape, also for unknown routes and for faults of our own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hotprefix.errors import HotprefixError
from hotprefix.records.open_recorder import needs_otel
from hotprefix.router.admin import Admin
from hotprefix.router.config import RouterConfig
from hotprefix.router.everybody import Everybody
from hotprefix.router.forward import Forward
from hotprefix.router.live_page import LivePage
from hotprefix.router.matching import ExactMatcher
from hotprefix.router.matching_text import TextMatcher
from hotprefix.router.metrics import RouterMetrics
from hotprefix.router.pools import Pools
from hotprefix.router.prompt import Matcher
from hotprefix.router.readers import Readers
from hotprefix.router.roster import OpenFeed, Roster
from hotprefix.router.route_log import RouteLog, open_log
from hotprefix.router.state import state
from hotprefix.router.ticket import Limits
from hotprefix.router.upstream import Client
from hotprefix.router.worker import Say
from hotprefix.router.worker_list import WorkerList
from hotprefix.server.config import ServerConfig
from hotprefix.server.errors import ApiError, from_error, response_of
from hotprefix.server.guard import Gate, Guard

if TYPE_CHECKING:
    from hotprefix.router.route_spans import RouteSpans

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
GENERATES = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
     "/v1/rerank", "/v1/score"}
)  # fmt: skip


class Router:
    """See the module's rules. Made inside the event loop; `begin` before it serves, `close` at its end.

    app: the ASGI application. log: the event log; None = there is none.
    """

    def __init__(
        self, config: RouterConfig, server: ServerConfig, say: Say, *, matcher: Matcher | None = None,
        open_feed: OpenFeed | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.config, self.clock, self.began = config, clock, clock()
        self._spans = None if config.otel is None else _spans(config.otel)
        self.log = open_log(config, self.began)
        self.gate = Gate()
        self.metrics = RouterMetrics(lambda: state(self))
        self._client = Client(config.connect_timeout_s, config.silence_s)
        limits = Limits(config.hold_s, config.max_held, config.refuse_above_s)
        log = None if self.log is None else partial(RouteLog, self.log)
        self.pools = Pools(config.fleet, limits, config.page_size, clock, log)
        self.roster = Roster(config, self._client, self.pools, say, open_feed, clock)
        self._list = WorkerList(config.workers, config.worker_file, say)
        self._readers = Readers(config.tokenizers, self.pools, say)
        self._matcher = ExactMatcher(self._readers.of, TextMatcher(self.pools.page_size), server)
        self.forward = Forward(
            config,
            server,
            self.pools,
            matcher or self._matcher,
            self.gate,
            self.metrics.error,
            clock,
            self._spans,
        )
        self._handlers = _table(Admin(self), Everybody(self, server), LivePage(self))
        self.app = Guard(self._serve, _with_admins(server, config), self.metrics.error)
        self._following: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Ask the workers once, and go on asking."""
        await self.roster.begin((await self._list.now()).values())
        await self._readers.begin()
        self._following = asyncio.ensure_future(self._list.follow(self.roster, self.config.relist_s))

    async def close(self) -> None:
        """End every task and connection."""
        if self._following is not None:
            self._following.cancel()
        await self.roster.close()
        await self._readers.close()
        self._matcher.close()
        await self._client.close()
        if self.log is not None:
            self.log.close()
        if self._spans is not None:
            self._spans.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if method == "POST" and path in GENERATES:
            try:
                await self.forward(scope, receive, send)
            except Exception:
                log.exception("%s %s failed by a fault of the router", method, path)
                raise
            return
        request = Request(scope, receive)
        try:
            response = await self._handler(path, method)(request)
        except Exception as error:
            response = self._failed(error)
        await response(scope, receive, send)

    def _handler(self, path: str, method: str) -> Handler:
        """Raises ApiError 404 or 405."""
        named = path if path in self._handlers or path in GENERATES else _prefix(path)
        methods = {**self._handlers.get(named, {})}
        if "GET" in methods:
            methods["HEAD"] = methods["GET"]
        handler = methods.get(method)
        if handler is not None:
            return handler
        if not methods and path not in GENERATES:
            raise ApiError(404, f"no route {method} {path[:200]}", code="not_found")
        allowed = ", ".join(sorted(methods)) or "POST"
        raise ApiError(405, f"{path} does not take {method}", code="method_not_allowed",
                       headers={"allow": allowed})  # fmt: skip

    def _failed(self, error: Exception) -> Response:
        if not isinstance(error, ApiError | HotprefixError | ClientDisconnect):
            log.error("a fault of the router", exc_info=error)
        answer = from_error(error)
        self.metrics.error(answer.status)
        return response_of(answer)


def _spans(url: str) -> RouteSpans:
    with needs_otel(url):
        from hotprefix.router.route_spans import open_route_spans
    return open_route_spans(url)


def _table(admin: Admin, everybody: Everybody, live: LivePage) -> dict[str, dict[str, Handler]]:
    """Handlers by path and method. A path that ends with a slash stands for all below it."""
    return {
        "/": {"GET": live.page},
        "/live.json": {"GET": live.data},
        "/health": {"GET": admin.health},
        "/readyz": {"GET": admin.health},
        "/livez": {"GET": admin.alive},
        "/version": {"GET": admin.version},
        "/metrics": {"GET": admin.metrics},
        "/workers": {"GET": admin.workers, "POST": admin.add},
        "/workers/": {"GET": admin.worker, "POST": admin.drain, "DELETE": admin.remove},
        "/v1/models": {"GET": everybody.models},
        "/v1/models/": {"GET": everybody.model},
        "/tokenize": {"POST": everybody.one},
        "/detokenize": {"POST": everybody.one},
        "/flush_cache": {"POST": everybody.flush},
        "/reset_prefix_cache": {"POST": everybody.flush},
    }


def _prefix(path: str) -> str:
    """The table's name for paths below one of its own."""
    for prefix in ("/workers/", "/v1/models/"):
        if path.startswith(prefix) and len(path) > len(prefix):
            return prefix
    return path


def _with_admins(server: ServerConfig, config: RouterConfig) -> ServerConfig:
    """The server's settings for the guard: where keys are asked for, an admin's key opens what a client's
    opens."""
    if not server.key_digests:
        return server
    values: dict[str, Any] = {name: getattr(server, name) for name in server.__slots__}
    return ServerConfig(**{**values, "key_digests": server.key_digests | config.admin_digests})
