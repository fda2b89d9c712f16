"""Server settings. Owns: `ServerConfig`, frozen and validated when built.

Rules: API keys are held as SHA-256 digests only, so no log and no trace can show one. Units: seconds, bytes.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from hotprefix.errors import ConfigError

COUNTS = (
    "body_limit", "max_choices", "max_header_bytes", "max_headers", "min_body_rate", "max_connections",
    "max_json_values", "max_json_items", "max_messages",
)  # fmt: skip
TIMEOUTS = ("header_timeout_s", "body_timeout_s", "idle_timeout_s", "send_timeout_s")
LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How requests are taken. The option of each limit is its name, with hyphens and without `_s`.

    key_digests: SHA-256 of each API key; empty = no keys.
    isolate_keys: requests share cached prefixes only with requests of the same key.
    served_names: names of the model that requests may give; the first is shown. Empty = the engine's name.
    cors_origin: regular expression of the origins whose pages may call the server.
    allowed_hosts: names that a Host header may give besides addresses and names of this machine; "*" = any.
    body_limit: bytes of one body.
    max_choices: prompts times n in one request.
    drain_s: how long open requests may run on after SIGTERM.
    stream_keepalive_s: a stream sends a comment after so long without a byte; 0 = never.
    max_header_bytes, max_headers: of one request's line and headers.
    header_timeout_s: for a request's headers, from its first byte, or from the connection's beginning.
    body_timeout_s, min_body_rate: a body may take body_timeout_s, and one second more for each min_body_rate
    bytes of it.
    idle_timeout_s: how long a connection waits for its next request.
    send_timeout_s: how long a client may read nothing of its answer.
    max_connections: None = as many as the process may open files for, 4096 at most.
    max_json_values: in one body, of any kind (token ids are the most).
    max_json_items: texts, names of fields, lists and objects in one body.
    max_messages: messages of one conversation; it may have as many tools.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    key_digests: frozenset[bytes] = field(default=frozenset(), repr=False)
    isolate_keys: bool = False
    served_names: tuple[str, ...] = ()
    cors_origin: str = LOCAL_ORIGINS
    allowed_hosts: tuple[str, ...] = ()
    body_limit: int = 32 * 1024 * 1024
    max_choices: int = 128
    drain_s: float = 30.0
    stream_keepalive_s: float = 0.0
    max_header_bytes: int = 64 * 1024
    max_headers: int = 256
    header_timeout_s: float = 20.0
    body_timeout_s: float = 60.0
    min_body_rate: int = 64 * 1024
    idle_timeout_s: float = 75.0
    send_timeout_s: float = 300.0
    max_connections: int | None = None
    max_json_values: int = 1 << 20
    max_json_items: int = 1 << 18
    max_messages: int = 10_000

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port}: give 0 (any free port) to 65535", param="port")
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: give a whole number >= 1", param=name)
        for name in TIMEOUTS:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)}: give seconds > 0", param=name)
        for name in ("drain_s", "stream_keepalive_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)}: give seconds >= 0", param=name)
        try:
            re.compile(self.cors_origin)
        except re.error as error:
            raise ConfigError(f"cors_origin={self.cors_origin!r}: no regular expression: {error}",
                              param="cors_origin") from error  # fmt: skip
        if self.isolate_keys and not self.key_digests:
            raise ConfigError(
                "isolate_keys: there are no keys to tell apart; give api_key_file, or leave it out",
                param="isolate_keys",
            )
        if not all(self.served_names):
            raise ConfigError("a served model name is empty: give at least one character", param="model")

    @classmethod
    def digests(cls, keys: list[str]) -> frozenset[bytes]:
        """Digests of keys. Raises ConfigError if one is empty."""
        if not all(keys):
            raise ConfigError("an API key is empty: give at least one character", param="api_key")
        return frozenset(key_digest(key.encode()) for key in keys)

    @classmethod
    def keys_from_file(cls, path: Path) -> frozenset[bytes]:
        """Digests of the keys in a file, one key a line. Empty lines and lines that start with # are left
        out. Raises ConfigError if the file cannot be read or holds no key."""
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api key file {path}: {error}", param="api_key_file") from error
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"api key file {path} holds no key: put one on a line", param="api_key_file")
        return cls.digests(keys)

    def at(self, host: str, port: int) -> Self:
        """The same settings on another address."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return type(self)(**{**values, "host": host, "port": port})


def key_digest(key: bytes) -> bytes:
    """The digest that is kept of an API key."""
    return hashlib.sha256(key).digest()
