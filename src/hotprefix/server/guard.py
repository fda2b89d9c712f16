"""Which requests may come in. Owns: API keys, the routers' key, cross-origin answers, request ids and the
gate that drains.

Rules:
1. If there are API keys, every route needs one, unknown routes too. The exceptions are OPTIONS, health,
   liveness and the page at /, which is the same for every client and holds no data.
2. Routes that are for routers of the fleet only are closed unless there is an internal key, and then need it.
   A router needs no API key for those, and for what it reads of a server's load.
3. A key is compared by digest against all keys, in constant time, and is never kept, logged or shown.
4. `sites.py` decides which host names and which pages may call; that check comes before the keys.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotprefix.server.config import ServerConfig, key_digest
from hotprefix.server.errors import ApiError, response_of
from hotprefix.server.internal import closed, is_internal
from hotprefix.server.sites import Sites

OPEN_PATHS = frozenset({"/health", "/readyz", "/livez"})
PAGE_PATH, PAGE_METHODS = "/", frozenset({"GET", "HEAD"})
TENANT = "hotprefix.tenant"
ARRIVED = "hotprefix.arrived"
REQUEST_ID = "hotprefix.request_id"
INTERNAL_PATHS = frozenset({"/kv_snapshot"})  # for routers of this fleet only
ROUTER_PATHS = frozenset({"/load", "/kv_event_sources"})  # they need no API key there


class Gate:
    """Counts requests that generate, and refuses new ones once the server drains."""

    def __init__(self) -> None:
        self.draining = False
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """Raises ApiError 503 while draining."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers={"retry-after": "5"})
        self._active += 1
        self._idle.clear()

    def leave(self) -> None:
        self._active -= 1
        if self._active == 0:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no request is inside."""
        await self._idle.wait()


class Guard:
    """ASGI middleware around everything."""

    def __init__(self, app: ASGIApp, config: ServerConfig, told: Callable[[int], None]) -> None:
        """told: called with the status of each refusal."""
        self._app, self._config = app, config
        self._sites = Sites(config)
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[ARRIVED] = time.monotonic()
        headers = Headers(scope=scope)
        send = self._stamped(scope, headers, send)
        refused = self._sites.wrong_host(headers)
        if refused is None and scope["method"] == "OPTIONS":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        refused = refused or self._sites.wrong_origin(scope["method"], headers) or self._enter(scope, headers)
        if refused is not None:
            self._told(refused.status)
            await response_of(refused)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _enter(self, scope: Scope, headers: Headers) -> ApiError | None:
        """Check the keys that the route needs, and note the API key's owner."""
        config, path = self._config, scope["path"]
        router = path in INTERNAL_PATHS | ROUTER_PATHS and is_internal(config, headers)
        if path in INTERNAL_PATHS and not router:
            return closed(config)
        if not config.key_digests or _open(scope):
            return None
        key = _bearer(headers)
        known = key is not None and self._known(key)
        if not (known or router):
            return _refusal(key is not None)
        if config.isolate_keys and known and key is not None:
            scope[TENANT] = tenant(key)
        return None

    def _known(self, key: bytes) -> bool:
        digest = key_digest(key)
        found = False
        for known in self._config.key_digests:
            found |= hmac.compare_digest(digest, known)
        return found

    def _stamped(self, scope: Scope, request: Headers, send: Send) -> Send:
        """Add the request id, which is noted, and, if the origin may see the answer, the cross-origin
        headers."""
        request_id = request.get("x-request-id", "")
        if not re.fullmatch(r"[\x21-\x7e]{1,128}", request_id):
            request_id = uuid.uuid4().hex
        scope[REQUEST_ID] = request_id
        origin = request.get("origin")
        stamp = {"x-request-id": request_id}
        if origin is not None and self._sites.allows(origin):
            stamp |= {
                "access-control-allow-origin": origin,
                "access-control-allow-methods": "GET, HEAD, POST, OPTIONS",
                "access-control-allow-headers": request.get(
                    "access-control-request-headers", "authorization, content-type"
                ),
                "access-control-expose-headers": "x-request-id, retry-after",
                "access-control-max-age": "600",
                "vary": "origin",
            }
        raw = [(name.encode(), value.encode("latin-1")) for name, value in stamp.items()]

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *raw]
            await send(message)

        return stamped


def _open(scope: Scope) -> bool:
    page = scope["path"] == PAGE_PATH and scope["method"] in PAGE_METHODS
    return page or scope["path"] in OPEN_PATHS


def _bearer(headers: Headers) -> bytes | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        return None
    return key.strip().encode("latin-1")


def _refusal(given: bool) -> ApiError:
    message = "incorrect API key" if given else "no API key given: send `Authorization: Bearer KEY`"
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def tenant(key: bytes) -> str:
    """A name for the key's owner. It does not give the key away, and is the same in every process."""
    return hmac.new(key, b"hotprefix cache namespace", hashlib.sha256).hexdigest()


def payer(config: ServerConfig, headers: Headers, peer: str) -> str:
    """What the work for a request is charged to: its API key, whether keys are isolated or not; the peer's
    address if there are no keys. headers: those of a request that was let in."""
    key = _bearer(headers) if config.key_digests else None
    return f"peer {peer}" if key is None else f"key {tenant(key)}"


def salt(owner: str | None, cache_salt: str | None) -> str | None:
    """The namespace salt of a request. It is JSON, which keeps the parts apart: no two pairs give the same
    text."""
    if owner is None and cache_salt is None:
        return None
    return json.dumps([owner, cache_salt])
