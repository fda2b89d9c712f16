"""The routes of those who look after the router. Owns: health, version, metrics, and the list of workers.

Rules:
1. Reading the list of workers is as open as /metrics. Changing it needs an admin's key, whatever else is
   open; without --admin-key-file the routes that change it answer as routes that do not exist.
2. /health is 200 while a request would be answered, by one pool at least; /livez while the process runs.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hotprefix import __version__
from hotprefix.errors import ConfigError
from hotprefix.router.state import state, trouble
from hotprefix.router.worker_spec import parse
from hotprefix.server.config import key_digest
from hotprefix.server.errors import ApiError

if TYPE_CHECKING:
    from hotprefix.router.router import Router

MOST_BYTES = 64 * 1024


class Admin:
    """The routes, each an endpoint."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def health(self, request: Request) -> Response:
        """200 or 503, with the reason."""
        why = trouble(self._router)
        if why is None:
            return JSONResponse({"status": "ok"})
        body = ApiError(503, why, code="unhealthy").body()
        return JSONResponse({"status": "unavailable", **body}, status_code=503)

    async def alive(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        return Response(self._router.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def workers(self, request: Request) -> Response:
        """The whole view."""
        return JSONResponse(state(self._router))

    async def worker(self, request: Request) -> Response:
        name = self._named(request)
        found = next(w for w in state(self._router)["workers"] if w["name"] == name)
        return JSONResponse(found)

    async def add(self, request: Request) -> Response:
        """A worker more: {"worker": "URL[,field=value]..."}, as --worker takes it."""
        self._check_key(request)
        text = (await _object(request)).get("worker")
        if not isinstance(text, str):
            raise ApiError(400, 'worker is missing: send {"worker": "http://HOST:PORT"}', param="worker",
                           code="missing_required_parameter")  # fmt: skip
        spec = parse(text)
        if spec.dns:
            raise ConfigError("a name with dns+ is for --worker and --worker-file: give an address",
                              param="worker")  # fmt: skip
        self._router.roster.add(spec)
        return JSONResponse({"added": spec.name}, status_code=201)

    async def drain(self, request: Request) -> Response:
        """POST /workers/NAME/drain."""
        self._check_key(request)
        name = self._named(request, "/drain")
        self._router.roster.drain(name)
        return JSONResponse({"draining": name})

    async def remove(self, request: Request) -> Response:
        self._check_key(request)
        name = self._named(request)
        self._router.roster.remove(name)
        return JSONResponse({"leaving": name}, status_code=202)

    def _named(self, request: Request, end: str = "") -> str:
        """The worker in the path. Raises ApiError 404."""
        name = unquote(request.url.path.removeprefix("/workers/"))
        if name.endswith(end) and name.removesuffix(end) in self._router.roster.workers:
            return name.removesuffix(end)
        known = ", ".join(self._router.roster.workers) or "none"
        raise ApiError(404, f"no worker {name[:200]!r}; there is {known}", code="worker_not_found")

    def _check_key(self, request: Request) -> None:
        """Raises ApiError 404 if nobody may change the list, else 401 without an admin's key."""
        digests = self._router.config.admin_digests
        if not digests:
            raise ApiError(404, f"no route {request.method} {request.url.path[:200]}", code="not_found")
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        digest = key_digest(key.strip().encode("latin-1"))
        found = False
        for known in digests:
            found |= hmac.compare_digest(digest, known)
        if scheme.lower() != "bearer" or not found:
            raise ApiError(401, "this needs an admin's key (--admin-key-file)", code="invalid_api_key",
                           headers={"www-authenticate": "Bearer"})  # fmt: skip


async def _object(request: Request) -> dict[str, Any]:
    """The body's JSON object. Raises ApiError 400 or 413."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise ApiError(413, f"the body has more than {MOST_BYTES} bytes", code="body_too_large")
    try:
        value = from_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_type")
    return value
