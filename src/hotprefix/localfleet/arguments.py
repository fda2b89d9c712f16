"""What each child is started with. Owns: `Typed`, the options that were given, typed again for `hotprefix
serve` and `hotprefix route`.

Rules:
1. An option goes on to those that take it, and only if it was given.
2. What the fleet decides for its engines: loopback and a port of their own, KV events on free ports, the
   fleet's key, their share of the cores and of memory (`share`), and an event log of their own.
3. If clients need a key, the engines need the fleet's, so that nobody goes past the router.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from hotprefix.definitions import Slo
from hotprefix.engine.config import EngineConfig
from hotprefix.localfleet.config import OF_ENGINES, OF_THE_ROUTER, OF_THEIR_SERVERS
from hotprefix.options import Setting, settings
from hotprefix.router.config import SHARED, RouterConfig
from hotprefix.server.config import ServerConfig

LEAST_KV_TOKENS: Final = 8192
LOOPBACK: Final = "127.0.0.1"


class Engine(NamedTuple):
    """An engine of the fleet. name: what the router calls it."""

    name: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"


def share(given: Mapping[str, Any], workers: int) -> dict[str, int]:
    """What each engine gets of the machine, where it is not given: its part of the cores, and of the tokens
    that one engine's KV pool would have, but not less than LEAST_KV_TOKENS. A paced engine needs neither."""
    if given.get("paced") is not None:
        return {}
    found = {}
    if given.get("threads") is None:
        found["threads"] = max(1, cores() // workers)
    usual = EngineConfig().kv_tokens
    if given.get("kv_tokens") in (None, usual):
        page = given.get("page_size") or 1
        found["kv_tokens"] = max(LEAST_KV_TOKENS, usual // workers) // page * page
    return found


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Typed:
    """given: the command's parameters and their values. workers: how many engines. key: the file with the
    fleet's key."""

    def __init__(self, given: Mapping[str, Any], workers: int, key: Path) -> None:
        self._given = {**given, **share(given, workers)}
        self._key = key
        self._locked = given.get("api_key_file") is not None

    def engine(self, engine: Engine, **other: Any) -> list[str]:
        """The command of one engine. other: options that are not as they were given."""
        given = {**self._given, **other}
        if given.get("events") is not None:
            path = Path(given["events"])
            given["events"] = path.with_name(f"{path.stem}-{engine.name}{path.suffix}")
        return [
            "serve", f"--host={LOOPBACK}", f"--port={engine.port}", f"--internal-key-file={self._key}",
            f"--kv-events=tcp://{LOOPBACK}:*", f"--kv-events-replay=tcp://{LOOPBACK}:*",
            *([f"--api-key-file={self._key}"] if self._locked else []),
            *typed(given, EngineConfig, OF_ENGINES), *typed(given, Slo),
            *typed(given, ServerConfig, OF_THEIR_SERVERS),
        ]  # fmt: skip

    def router(self, port: int, engines: Iterable[Engine], **other: Any) -> list[str]:
        """The command of the router. other: options that are not as they were given."""
        given = {**self._given, **other, "port": port}
        more = f",key-file={self._key}" if self._locked else ""
        return [
            "route", f"--internal-key-file={self._key}", f"--tokenizer={given.get('model') or 'default'}",
            *(f"--worker={each.url},kind=hotprefix,name={each.name}{more}" for each in engines),
            *typed(given, ServerConfig, SHARED), *typed(given, RouterConfig, OF_THE_ROUTER),
        ]  # fmt: skip


def typed(given: Mapping[str, Any], config: type, only: Iterable[str] = ()) -> list[str]:
    """The options of a configuration as they are typed. only: the names of the fields, if not all."""
    every = (one for one in settings(config) if one.parameter and (not only or one.name in only))
    return [text for one in every for text in _typed(one, given.get(one.parameter))]


def _typed(one: Setting, value: Any) -> list[str]:
    if one.kind is bool and one.option.read is None:
        name = one.flag if value else f"--no-{one.flag.removeprefix('--')}"
        return [] if value is None or value == one.default else [name]
    if isinstance(value, list | tuple):
        return [f"{one.flag}={each}" for each in value]
    if value is None or (one.option.read is None and str(value) == str(one.default)):
        return []
    return [f"{one.flag}={value}"]
