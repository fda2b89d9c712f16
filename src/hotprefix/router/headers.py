"""Which headers go on. Owns: those of a request that its worker gets, and those of an answer that the client
gets.

Rules:
1. Headers of a connection (RFC 9110, 7.6.1, and what `Connection` names) end at the router.
2. A client's API key and cookies go to no worker, unless its specification says that it gets the key. What
   only routers may say (`x-hotprefix-...`) is dropped, whoever says it; own engines get this router's own.
3. Trace context (`traceparent`, `tracestate`, `baggage`) and all other headers go on as they are; if the
   router makes spans, the first two name its own (route_spans.py).
4. What the router says itself (request id, cross-origin headers, date) is said once.
"""

from __future__ import annotations

from collections.abc import Iterable

from multidict import CIMultiDict

from hotprefix.router.worker_spec import ClientKey
from hotprefix.server.internal import INTERNAL_HEADER

Raw = Iterable[tuple[bytes, bytes]]

CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade"}
)  # fmt: skip
NOT_ON = CONNECTION | {b"host", b"content-length", b"expect", b"cookie", b"x-request-id"}
NOT_BACK = CONNECTION | {b"date", b"server", b"x-request-id"}
OF_ROUTERS, CROSS_ORIGIN = b"x-hotprefix-", b"access-control-"


def to_worker(
    headers: Raw, client_key: ClientKey, request_id: str, internal: str | None = None
) -> CIMultiDict[str]:
    """The request's headers as its worker gets them. Names in `headers` are in lower case. internal: the key
    by which the router shows an own engine who it is."""
    headers = list(headers)
    named = _named_by_connection(headers)
    found: CIMultiDict[str] = CIMultiDict()
    for name, value in headers:
        if name in NOT_ON or name in named or name.startswith(OF_ROUTERS):
            continue
        if name == b"authorization" and client_key is ClientKey.DROP:
            continue
        found.add(name.decode("latin-1"), value.decode("latin-1"))
    found["x-request-id"] = request_id
    if internal is not None:
        found[INTERNAL_HEADER] = internal
    return found


def to_client(headers: Raw) -> list[tuple[bytes, bytes]]:
    """The answer's headers as the client gets them, names in lower case."""
    lower = [(name.lower(), value) for name, value in headers]
    named = _named_by_connection(lower)
    return [
        (name, value)
        for name, value in lower
        if name not in NOT_BACK and name not in named and not name.startswith(CROSS_ORIGIN)
    ]


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    return frozenset(
        word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")
    )
