"""Free ports that stay free. Owns: `Ports`.

Rules: a port is bound and not listened on, so nobody else gets it, a connection to it is refused, and the
child that it is meant for can listen there again after it died. Where the system does not let two sockets be
bound to one port (it does on Linux), a port is only looked for, and may be taken before it is used.
"""

from __future__ import annotations

import sys
from socket import socket

from hotprefix.server.config import ServerConfig
from hotprefix.server.listening import bind


class Ports:
    """The ports of one fleet."""

    def __init__(self) -> None:
        self._held: list[socket] = []

    def take(self, at: ServerConfig) -> int:
        """The port of an address, or a free one if it is 0. Raises ConfigError if it cannot be had."""
        bound = bind(at)
        port: int = bound.getsockname()[1]
        if sys.platform == "linux":
            self._held.append(bound)
        else:
            bound.close()
        return port

    def close(self) -> None:
        for each in self._held:
            each.close()
