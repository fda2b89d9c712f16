"""From bytes to a checked body. Owns: how much a JSON text may hold, parsing it, and pydantic's errors as
ours.

Rules: how much there is to parse and to check is bounded before that is done. The text's length alone is no
bound: an object of a hundred thousand members costs as much as a book. NaN and infinities are not JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from hotprefix.errors import shortened
from hotprefix.server.config import ServerConfig
from hotprefix.server.errors import ApiError
from hotprefix.server.schemas import Body

COUNTED_LISTS = ("messages", "tools")

B = TypeVar("B", bound=Body)


def bounded(body: bytes | bytearray, config: ServerConfig) -> None:
    """Raises ApiError 400 if the text holds more values, or more texts, lists and objects, than the limits
    allow. Only scans of the whole text that run in C are used. The count is exact for every text that a
    parser would accept."""
    most_values, most_items = config.max_json_values, config.max_json_items
    if len(body) <= min(most_values, most_items):
        return  # each item takes a byte at least, so these are few enough
    items = body.count(b"{") + body.count(b"[") + body.count(b'"')
    if items <= most_items and body.count(b",") < most_values:
        return
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # each quote left begins or ends a text
    texts = bare.count(b'"') // 2
    if texts > most_items:
        raise _too_complex(f"{texts} texts and names", most_items, "--max-json-items")
    bare = b"".join(bare.split(b'"')[::2])
    items, values = texts + bare.count(b"{") + bare.count(b"["), bare.count(b",") + 1
    if items > most_items:
        raise _too_complex(f"{items} texts, names, lists and objects", most_items, "--max-json-items")
    if values > most_values:
        raise _too_complex(f"{values} values", most_values, "--max-json-values")


def _too_complex(what: str, limit: int, option: str) -> ApiError:
    return ApiError(
        400, f"the body holds {what}: at most {limit} are taken ({option})", code="body_too_complex"
    )


def load(body: bytes | bytearray, config: ServerConfig) -> Any:
    """The JSON value of a body. Raises ApiError 400."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_type")
    count_lists(value, config)
    return value


def count_lists(value: Mapping[str, Any], config: ServerConfig) -> None:
    """Raises ApiError 400 if one of a request's lists is too long."""
    for name in COUNTED_LISTS:
        given, limit = value.get(name), config.max_messages
        if isinstance(given, list) and len(given) > limit:
            message = f"{name} has {len(given)} entries: at most {limit} are taken (--max-messages)"
            raise ApiError(400, message, param=name, code="too_many_entries")


def check(kind: type[B], value: Any) -> B:
    """The checked body. Raises ApiError 400 that names the first wrong field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _first_error(error, value) from None


def _first_error(error: ValidationError, value: Any) -> ApiError:
    """The error that tells most: a wrong `type`, otherwise an unknown field, otherwise the first."""
    found = error.errors(include_url=False, include_context=False)
    first = min(found, key=lambda e: (e["loc"][-1:] != ("type",), e["type"] != "extra_forbidden"))
    path = _path(first["loc"], value, missing=first["type"] == "missing")
    if first["type"] == "extra_forbidden":
        message, code = f"{path} is not a field of this request", "unknown_parameter"
    elif first["type"] == "missing":
        message, code = f"{path} is missing", "missing_required_parameter"
    else:
        text = first["msg"].removeprefix("Value error, ")
        message, code = (
            f"{path}={shortened(first['input'], 80)}: {text[0].lower()}{text[1:]}",
            "invalid_value",
        )
    return ApiError(400, message, param=path, code=code)


def _path(location: tuple[Any, ...], value: Any, *, missing: bool) -> str:
    """The field's place in the body, without the names that pydantic gives to branches of a union."""
    path = []
    for depth, part in enumerate(location):
        if (isinstance(value, list) and isinstance(part, int)) or (isinstance(value, dict) and part in value):
            value = value[part]
        elif not missing or not isinstance(value, dict) or depth < len(location) - 1:
            continue
        path.append(f"[{part}]" if isinstance(part, int) else f".{part}")
    return "".join(path).removeprefix(".")
