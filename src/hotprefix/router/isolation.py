"""Keeping tenants apart at the workers. Owns: `salted`.

Rules: with --isolate-keys the prefixes of one API key are not found by requests of another. Workers do not
see the client's key, so the router puts a `cache_salt` into the body, which own engines and vLLM both take,
made of the key's owner and the salt that the client gave. It is the one case in which a body is changed: a
field is added at its end, where it wins over one of the same name.
"""

from __future__ import annotations

import json

from pydantic_core import from_json

from hotprefix.server.errors import ApiError
from hotprefix.server.guard import salt


def salted(body: bytes | bytearray, owner: str) -> bytes:
    """The body with the salt. Raises ApiError 400 if it is no JSON object: where it went nobody could keep
    its prefixes apart."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_type")
    given = value.get("cache_salt")
    if given is not None and not isinstance(given, str):
        raise ApiError(400, "cache_salt: input should be a valid string", param="cache_salt",
                       code="invalid_value")  # fmt: skip
    made = json.dumps({"cache_salt": salt(owner, given)})
    open_body = bytes(body).rstrip()[:-1].rstrip()
    return open_body + (b"," if value else b"") + made[1:].encode()
