"""Server settings. Owns: `ServerConfig`, frozen and validated when built.

Rules: API keys are held as SHA-256 digests only, so that no log or trace can show one. Units: seconds,
bytes.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from hotprefix.errors import ConfigError

LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How requests are taken.

    key_digests: SHA-256 of each API key; empty = no keys. isolate_keys: a key's requests share cached
    prefixes only with the same key's. served_names: names of the model that requests may give, the
    first is shown (empty = the engine's name). cors_origin: regular expression of origins whose pages
    may call the server. body_limit: bytes. max_choices: prompts times n in one request. drain_s: how
    long open requests may run on after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    key_digests: frozenset[bytes] = field(default=frozenset(), repr=False)
    isolate_keys: bool = False
    served_names: tuple[str, ...] = ()
    cors_origin: str = LOCAL_ORIGINS
    body_limit: int = 32 * 1024 * 1024
    max_choices: int = 128
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port}: give 0 (any free port) to 65535", param="port")
        for name in ("body_limit", "max_choices"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: give a whole number >= 1", param=name)
        if not 0 <= self.drain_s < math.inf:
            raise ConfigError(f"drain_s={self.drain_s}: give seconds >= 0", param="drain_s")
        if self.isolate_keys and not self.key_digests:
            raise ConfigError(
                "isolate_keys: there are no keys to tell apart; give api_key_file, or leave it out",
                param="isolate_keys",
            )
        if not all(self.served_names):
            raise ConfigError("a served model name is empty: give at least one character", param="model")

    @classmethod
    def digests(cls, keys: list[str]) -> frozenset[bytes]:
        """Digests of keys. Raises ConfigError where one is empty."""
        if not all(keys):
            raise ConfigError("an API key is empty: give at least one character", param="api_key")
        return frozenset(key_digest(key.encode()) for key in keys)

    @classmethod
    def keys_from_file(cls, path: Path) -> frozenset[bytes]:
        """Digests of the keys in a file, one a line; empty lines and lines that start with # are left
        out. Raises ConfigError where the file cannot be read or holds no key."""
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
    """What is kept of an API key."""
    return hashlib.sha256(key).digest()
