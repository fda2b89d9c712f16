"""Which names and pages may call. Owns: the checks of Host, Origin and Sec-Fetch-Site.

Rules: a web page that a user visits must not be able to use a server on that user's machine. So a server on a
loopback address answers only if Host is an address or a name of this machine, because a page's own name can
be made to point there (DNS rebinding). A request from a page of another origin is refused, unless
`cors_origin` lets that origin in; following a link to the live page is no such request. Clients that are not
browsers send Host alone.
"""

from __future__ import annotations

import re
import socket
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from hotprefix.server.config import ServerConfig
from hotprefix.server.errors import ApiError

LOCAL_SUFFIXES = (".localhost", ".internal")  # reserved: no name below them can be registered
SAFE_METHODS = frozenset({"GET", "HEAD"})


class Sites:
    """The checks for one configuration."""

    def __init__(self, config: ServerConfig) -> None:
        given = {name.lower() for name in config.allowed_hosts}
        self._any_host = "*" in given or not (given or _loopback(config.host))
        self._hosts = given | {"localhost", config.host.lower(), socket.gethostname().lower()}
        self._suffixes = LOCAL_SUFFIXES + tuple(name[1:] for name in given if name.startswith("*."))
        self._origin = re.compile(config.cors_origin)

    def allows(self, origin: str | None) -> bool:
        """Whether pages of this origin may read answers."""
        return origin is not None and self._origin.fullmatch(origin) is not None

    def wrong_host(self, headers: Headers) -> ApiError | None:
        """Why the request is not for this server; None if it is."""
        hosts = headers.getlist("host")
        if len(hosts) > 1:
            return ApiError(400, "the request has several Host headers: send one", code="invalid_http")
        if self._any_host or not hosts:
            return None
        name = _name(hosts[0])
        if name in self._hosts or name.endswith(self._suffixes) or _is_address(name):
            return None
        message = (
            f"Host {hosts[0][:200]!r} is not a name of this server: call it by its address, or start it with "
            f"--allowed-host {name[:200]}"
        )
        return ApiError(403, message, code="wrong_host")

    def wrong_origin(self, method: str, headers: Headers) -> ApiError | None:
        """Why a page may not make this request; None if no page made it, or one that may."""
        origin = headers.get("origin")
        if origin is not None:
            host = headers.get("host", "").lower()
            if self.allows(origin) or (host and _place(origin) == host):
                return None
            message = (
                f"pages of {origin[:200]!r} may not use this server: if they should, start it with "
                "--cors-origin and a regular expression of their origins"
            )
            return ApiError(403, message, code="cross_origin")
        follows_link = method in SAFE_METHODS and headers.get("sec-fetch-mode") == "navigate"
        if follows_link or headers.get("sec-fetch-site") not in ("cross-site", "same-site"):
            return None
        return ApiError(403, "a page of another site may not use this server", code="cross_origin")


def _name(host: str) -> str:
    """A Host header without its port and without the brackets of an address."""
    bracketed = re.fullmatch(r"\[([^\]]*)\](:\d*)?", host)
    name = bracketed[1] if bracketed else re.sub(r":\d*$", "", host)
    return name.lower().removesuffix(".")


def _place(origin: str) -> str:
    """Host and port of an origin; "" if it has none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _loopback(host: str) -> bool:
    return host.lower() == "localhost" or (_is_address(host) and ip_address(host).is_loopback)
