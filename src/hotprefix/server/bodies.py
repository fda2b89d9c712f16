"""From bytes to a checked body. Owns: reading within the size limit, JSON, pydantic's errors as ours.

Rules: a body over the limit is refused from its Content-Length alone where it has one, else when the
limit is passed. NaN and infinities are not JSON. Bodies that take long to parse and tokenize are worked
on in a thread, so that streams go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from hotprefix.server.errors import ApiError
from hotprefix.server.schemas import Body

INLINE_BYTES = 16 * 1024

B = TypeVar("B", bound=Body)
T = TypeVar("T")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises ApiError 413, 415."""
    # A page of any site can send a body of another type, or of none, without asking first.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415, f"content-type {kind!r}: send application/json", param="content-type",
            code="unsupported_media_type",
        )  # fmt: skip
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(f"{declared} bytes", limit)
    body = bytearray()
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit:
            raise _too_large("the body", limit)
    return bytes(body)


def _too_large(what: str, limit: int) -> ApiError:
    return ApiError(413, f"{what}: a request may have at most {limit} bytes", code="body_too_large")


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run `work` here for a small body, in a thread for a large one."""
    return work() if size <= INLINE_BYTES else await asyncio.to_thread(work)


def parse(kind: type[B], body: bytes) -> B:
    """Raises ApiError 400."""
    return check(kind, load(body))


def load(body: bytes) -> Any:
    """The JSON value. Raises ApiError 400."""
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


def check(kind: type[B], value: Any) -> B:
    """Raises ApiError 400 that names the first wrong field."""
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_type")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _first_error(error, value) from None


def _first_error(error: ValidationError, value: Any) -> ApiError:
    """The most telling one: a wrong `type`, else an unknown field, else the first."""
    found = error.errors(include_url=False, include_context=False)
    first = min(found, key=lambda e: (e["loc"][-1:] != ("type",), e["type"] != "extra_forbidden"))
    path = _path(first["loc"], value, missing=first["type"] == "missing")
    if first["type"] == "extra_forbidden":
        message, code = f"{path} is not a field of this request", "unknown_parameter"
    elif first["type"] == "missing":
        message, code = f"{path} is missing", "missing_required_parameter"
    else:
        text = first["msg"].removeprefix("Value error, ")
        message, code = f"{path}={_short(first['input'])}: {text[0].lower()}{text[1:]}", "invalid_value"
    return ApiError(400, message, param=path, code=code)


def _path(location: tuple[Any, ...], value: Any, *, missing: bool) -> str:
    """Where in the body, without the names pydantic gives to branches of a union."""
    path = []
    for depth, part in enumerate(location):
        if (isinstance(value, list) and isinstance(part, int)) or (isinstance(value, dict) and part in value):
            value = value[part]
        elif not missing or not isinstance(value, dict) or depth < len(location) - 1:
            continue
        path.append(f"[{part}]" if isinstance(part, int) else f".{part}")
    return "".join(path).removeprefix(".")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
