"""Errors as HTTP answers. Owns: the status, OpenAI's error body, and which exception becomes which answer.

Rules: every refusal is `{"error": {message, type, param, code}}`. Nothing internal (a trace, a path, a key)
is in a body. A request that is refused for its size is answered before it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from hotprefix.errors import EngineDead, HotprefixError, InputError, QueueFull

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
LINGER_S = 2.0


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def from_error(error: Exception) -> ApiError:
    """The answer that an exception becomes."""
    match error:
        case ApiError():
            return error
        case QueueFull():
            wait = str(max(1, math.ceil(error.retry_after)))
            return ApiError(429, str(error), code="queue_full", headers={"retry-after": wait})
        case InputError():
            return ApiError(400, error.message, param=error.param, code=error.code)
        case EngineDead():
            return ApiError(503, str(error), code="engine_unavailable", headers={"retry-after": "1"})
        case HotprefixError():
            return ApiError(500, str(error), code="internal_error")
        case ClientDisconnect():
            return ApiError(499, "the client left before its request was complete")
        case HTTPException():
            code = "not_found" if error.status_code == 404 else None
            return ApiError(error.status_code, error.detail, code=code, headers=error.headers)
    return ApiError(500, "internal error; the server's log has its cause", code="internal_error")


async def answer(request: Request, error: Exception) -> Response:
    """Starlette exception handler."""
    if isinstance(error, HTTPException) and error.status_code == 404:
        error = ApiError(404, f"no route {request.method} {request.url.path}", code="not_found")
    if isinstance(error, HTTPException) and error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
        error = ApiError(405, message, code="method_not_allowed", headers=error.headers)
    return response_of(from_error(error))


def response_of(error: ApiError) -> Response:
    kind = Lingering if error.status == 413 else JSONResponse
    return kind(error.body(), status_code=error.status, headers=error.headers)


class Lingering(JSONResponse):
    """An answer to a request that was not read to its end. Before the connection closes, the rest is read and
    thrown away for a moment, because closing on unread data can destroy the answer on its way."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [*self.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})
