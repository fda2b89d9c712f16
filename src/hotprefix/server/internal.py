"""Calls between a router and its engines. Owns: the header that proves such a call, and its check.

Rules: the key is one line of a file that router and engines are both given (`--internal-key-file`). It is
kept as a digest and compared in constant time. Without a key file the internal routes are closed. Clients'
API keys are another matter: they are checked beside this.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers

from hotprefix.server.config import ServerConfig, key_digest
from hotprefix.server.errors import ApiError

INTERNAL_HEADER = "x-hotprefix-internal"


def is_internal(config: ServerConfig, headers: Headers) -> bool:
    """Whether a request carries the internal key."""
    given = headers.get(INTERNAL_HEADER)
    if config.internal_digest is None or given is None:
        return False
    return hmac.compare_digest(key_digest(given.encode("latin-1")), config.internal_digest)


def require_internal(config: ServerConfig, headers: Headers) -> None:
    """Raises ApiError unless `is_internal`."""
    if not is_internal(config, headers):
        raise closed(config)


def closed(config: ServerConfig) -> ApiError:
    """Why an internal route does not answer: 404 if there is no key here, 401 if the request's is not it."""
    if config.internal_digest is None:
        return ApiError(404, "this route is closed: it needs --internal-key-file", code="closed")
    message = f"the header {INTERNAL_HEADER} has no key, or a wrong one"
    return ApiError(401, message, code="invalid_internal_key")
