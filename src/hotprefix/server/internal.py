"""Calls between a router and its engines. Owns: the header that proves such a call, and its check.

Rules: the key is one line of a file that router and engines are both given (`--internal-key-file`). It is
kept as a digest and compared in constant time. Without a key file, or without the right key, an internal
route answers as a route that does not exist. Clients' API keys are another matter: they are checked beside
this.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from hotprefix.server.config import ServerConfig, key_digest

INTERNAL_HEADER = "x-hotprefix-internal"


def is_internal(config: ServerConfig, headers: Headers) -> bool:
    """Whether a request carries the internal key."""
    given = headers.get(INTERNAL_HEADER)
    if config.internal_digest is None or given is None:
        return False
    return hmac.compare_digest(key_digest(given.encode("latin-1")), config.internal_digest)


def require_internal(config: ServerConfig, headers: Headers) -> None:
    """Raises HTTPException 404, as for a route that does not exist, unless `is_internal`."""
    if not is_internal(config, headers):
        raise HTTPException(404)
