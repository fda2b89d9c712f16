"""Pages in a Valkey or Redis server. Owns: `ValkeyStore`.

Rules: each call tries once, within the socket's time limit; the worker's breaker decides whether to call
again. The server makes room by itself: give it `maxmemory` and the policy `allkeys-lru` (or `-lfu`). Without
such a policy a full server refuses puts (reason full). A key is `hotprefix:`, the envelope's version, `:` and
the raw page key, so pages of another format and keys of other programs are never touched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, unquote

import valkey
from valkey import exceptions as ex
from valkey.backoff import NoBackoff
from valkey.retry import Retry

from hotprefix.engine.stores.base import NOTHING
from hotprefix.engine.stores.envelope import VERSION
from hotprefix.engine.stores.errors import LinkError, PageError, Reason
from hotprefix.engine.stores.url import Options
from hotprefix.errors import ConfigError

PREFIX = b"hotprefix:%d:" % VERSION
_TLS_ONLY = ("ca", "cert", "key", "verify")
_OPTIONS = {"tls", "timeout", "password_file", *_TLS_ONLY}
_REASONS = (  # the first that fits
    (ex.TimeoutError, Reason.TIMEOUT),
    ((ex.AuthenticationError, ex.AuthorizationError, ex.NoPermissionError, ex.ReadOnlyError), Reason.DENIED),
    (ex.OutOfMemoryError, Reason.FULL),
    ((ex.ConnectionError, OSError), Reason.DOWN),
)
_READ_SIZE = 1 << 20

T = TypeVar("T")


class ValkeyStore:
    """See the module's rules and `Store`. settings: keyword arguments of the client's connection."""

    def __init__(self, shown: str, settings: dict[str, Any]) -> None:
        self._shown = shown
        self._client: Any = valkey.Valkey(connection_pool=valkey.ConnectionPool(**settings))
        self._closed = threading.Event()

    @classmethod
    def from_url(cls, url: SplitResult) -> ValkeyStore:
        """valkey://[user:password@]host[:port][/db][?tls=1&ca=FILE&cert=FILE&key=FILE&verify=0
        &timeout=SECONDS&password_file=FILE]"""
        options = Options(url, _OPTIONS)
        database = url.path.strip("/") or "0"
        try:
            port = url.port or 6379
        except ValueError:
            port = 0
        if not (url.hostname and port and database.isdecimal()):
            raise ConfigError(
                f"{options.shown!r} is malformed: write valkey://host:port/database-number", param="l3"
            )
        timeout = options.seconds("timeout", 1.0)
        settings: dict[str, Any] = {
            "host": url.hostname,
            "port": port,
            "db": int(database),
            "username": unquote(url.username) if url.username else None,
            "password": _password(url, options),
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "socket_keepalive": True,
            "socket_read_size": _READ_SIZE,
            "retry": Retry(NoBackoff(), 0),
        }
        return cls(options.shown, settings | _tls(options))

    def describe(self) -> str:
        return self._shown

    def get(self, keys: Sequence[bytes]) -> list[bytes | PageError | None]:
        return self._call(lambda: list(self._client.mget([PREFIX + key for key in keys])))

    def put(self, key: bytes, wrapped: bytes) -> None:
        self._call(lambda: self._client.set(PREFIX + key, wrapped))

    def present(self, keys: Sequence[bytes]) -> int:
        def ask() -> list[int]:
            with self._client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.exists(PREFIX + key)
                return list(pipe.execute())

        found = self._call(ask)
        return found.index(0) if 0 in found else len(found)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._call(lambda: self._client.touch(*(PREFIX + key for key in reversed(keys))))

    def remove(self, key: bytes) -> None:
        self._call(lambda: self._client.unlink(PREFIX + key))

    def passed_over(self) -> Mapping[Reason, int]:
        """Empty: the server evicts, not this store."""
        return NOTHING

    def close(self) -> None:
        """Shuts down the sockets in use, which ends the calls that wait on them."""
        self._closed.set()
        self._client.connection_pool.disconnect()

    def _call(self, action: Callable[[], T]) -> T:
        try:
            if not self._closed.is_set():
                return action()
        except Exception as error:
            if not self._closed.is_set():
                raise LinkError(_reason(error), f"{self._shown}: {type(error).__name__}: {error}") from error
        raise LinkError(Reason.CLOSED, f"{self._shown} was closed")


def _reason(error: Exception) -> Reason:
    return next((reason for kinds, reason in _REASONS if isinstance(error, kinds)), Reason.FAILED)


def _password(url: SplitResult, options: Options) -> str | None:
    """The password, from the URL or from a file. A file is better: a process list shows the URL."""
    path = options.optional("password_file")
    if path is None:
        return unquote(url.password) if url.password else None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"password_file={path!r} cannot be read: {error}", param="password_file") from error


def _tls(options: Options) -> dict[str, Any]:
    given = [name for name in _TLS_ONLY if options.optional(name) is not None]
    if not options.flag("tls", default=False):
        if given:
            raise ConfigError(f"{options.shown!r} has {given} without tls=1: add tls=1", param="l3")
        return {}
    for name in ("ca", "cert", "key"):
        path = options.optional(name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{name}={path!r} of {options.shown!r} is no file", param=name)
    verify = options.flag("verify", default=True)
    return {
        "connection_class": valkey.SSLConnection,
        "ssl_cert_reqs": "required" if verify else "none",
        "ssl_check_hostname": verify,
        "ssl_ca_certs": options.optional("ca"),
        "ssl_certfile": options.optional("cert"),
        "ssl_keyfile": options.optional("key"),
    }
