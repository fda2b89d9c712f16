"""Server settings. Owns: `ServerConfig`, frozen and validated when built.

Rules: API keys are held as SHA-256 digests only, so no log and no trace can show one. Units: seconds, bytes.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hotprefix.errors import ConfigError
from hotprefix.options import Group, check, option

SERVER, SECURITY, INTAKE = Group.SERVER, Group.SECURITY, Group.INTAKE
LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How requests are taken; docs/policies.md has the settings as a page. Raises ConfigError."""

    # fmt: off
    host: str = option("127.0.0.1", "Address to listen on.", SERVER, "ADDRESS")
    port: int = option(8000, "Port, at most 65535; 0 takes any free one.", SERVER, "PORT", ">= 0")
    served_names: tuple[str, ...] = option(
        (), "Name that clients may give; repeatable, the first is shown.", SERVER, "NAME",
        flag="served-model-name", unset="the model's own")
    drain_s: float = option(
        30.0, "How long open requests may run on after SIGTERM.", SERVER, "SECONDS", ">= 0",
        flag="drain-seconds")
    stream_keepalive_s: float = option(
        0.0, "Silence after which a stream sends a comment; 0 = never.", SERVER, "SECONDS", ">= 0")

    # SHA-256 of each API key; empty = no keys.
    key_digests: frozenset[bytes] = option(
        frozenset(), "File with one API key a line.", SECURITY, "FILE", flag="api-key-file", repr=False,
        read=lambda path: ServerConfig.keys_from_file(path), unset="no keys")
    # SHA-256 of the key of routers; None = there are none.
    internal_digest: bytes | None = option(
        None, "File with one key, by which routers show who they are; opens the routes that only they may "
        "call.", SECURITY, "FILE", flag="internal-key-file", repr=False,
        read=lambda path: ServerConfig.internal_from_file(path), unset="those routes are closed")
    isolate_keys: bool = option(False, "Keys do not share cached prefixes; needs --api-key-file.", SECURITY)
    cors_origin: str = option(
        LOCAL_ORIGINS, "Regular expression of the origins whose pages may call.", SECURITY, "REGEX",
        unset="localhost")
    allowed_hosts: tuple[str, ...] = option(
        (), "Further name a Host header may give: NAME, *.NAME, or * for any; repeatable.", SECURITY, "NAME",
        flag="allowed-host", unset="addresses and names of this machine")

    body_limit: int = option(32 * 1024 * 1024, "Size of a request's body.", INTAKE, "BYTES", ">= 1")
    max_choices: int = option(128, "Prompts times n in one request.", INTAKE, "COUNT", ">= 1")
    max_messages: int = option(
        10_000, "Messages of one conversation; as many tools.", INTAKE, "COUNT", ">= 1")
    max_json_values: int = option(
        1 << 20, "Values of any kind in a body; token ids are the most.", INTAKE, "COUNT", ">= 1")
    max_json_items: int = option(
        1 << 18, "Texts, names of fields, lists and objects in a body.", INTAKE, "COUNT", ">= 1")
    max_header_bytes: int = option(64 * 1024, "Size of request line and headers.", INTAKE, "BYTES", ">= 1")
    max_headers: int = option(256, "Headers of a request.", INTAKE, "COUNT", ">= 1")
    max_connections: int | None = option(
        None, "Open connections.", INTAKE, "COUNT", ">= 1",
        unset="what the limit of open files allows, at most 4096")
    header_timeout_s: float = option(
        20.0, "How long a request's headers may take, from its first byte or the connection's beginning.",
        INTAKE, "SECONDS", "> 0")
    body_timeout_s: float = option(
        60.0, "How long a body may take, plus what its bytes buy.", INTAKE, "SECONDS", "> 0")
    min_body_rate: int = option(
        64 * 1024, "What of a body buys one second more.", INTAKE, "BYTES", ">= 1")
    idle_timeout_s: float = option(
        75.0, "How long a connection waits for its next request.", INTAKE, "SECONDS", "> 0")
    send_timeout_s: float = option(
        300.0, "How long a client may read nothing of its answer.", INTAKE, "SECONDS", "> 0")
    # fmt: on

    def __post_init__(self) -> None:
        check(self)
        if self.port > 65535:
            raise ConfigError(f"port={self.port}: give 0 (any free port) to 65535", param="port")
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
        return cls.digests(_keys(path, "api_key_file"))

    @classmethod
    def internal_from_file(cls, path: Path) -> bytes:
        """Digest of the one key in a file. Raises ConfigError if the file cannot be read or does not hold
        one."""
        return key_digest(internal_key(path).encode())

    def at(self, host: str, port: int) -> Self:
        """The same settings on another address."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return type(self)(**{**values, "host": host, "port": port})


def internal_key(path: Path) -> str:
    """The one key in the file of a router and its engines. Raises ConfigError as above."""
    keys = _keys(path, "internal_key_file")
    if len(keys) > 1:
        raise ConfigError(
            f"internal key file {path} holds {len(keys)} keys: leave one", param="internal_key_file"
        )
    return keys[0]


def _keys(path: Path, param: str) -> list[str]:
    """The keys in a file. Raises ConfigError if it cannot be read or holds none."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{param.replace('_', ' ')} {path}: {error}", param=param) from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{param.replace('_', ' ')} {path} holds no key: put one on a line", param=param)
    return keys


def key_digest(key: bytes) -> bytes:
    """The digest that is kept of an API key."""
    return hashlib.sha256(key).digest()
