"""Every option of `hotprefix serve` changes what the server is started with."""

from __future__ import annotations

import inspect
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from hotprefix import cli
from hotprefix.server import serve

KEYS = Path(__file__).parents[1] / "fixtures" / "api-keys.txt"
L2, L3 = {"l2_tokens": 1024}, {"l2_tokens": 1024, "l3": "file:///tmp/pages"}
KV = {"kv_events": "tcp://127.0.0.1:*"}
# Option: what else has to be given, and a value where another of its type is no good.
WITH: dict[str, dict[str, Any]] = {
    "write": L2, "l3": L2, "prefetch": L3, "prefetch_timeout": L3,
    "preemption": {"order": cli.Order.PRIORITY},
    "kv_events_replay": KV, "kv_events_form": KV, "kv_events_topic": KV, "kv_events_tokens": KV,
    "isolate_keys": {"api_key_file": KEYS},
}  # fmt: skip
VALUES: dict[str, Any] = {
    "l2_tokens": 1024, "kv_events_form": "arrays", "api_key_file": KEYS, "events": Path("log.jsonl"),
    "served_model_name": ["a"], "events_key_file": Path("key"), "window_tokens": 5, "max_model_len": 5,
    "threads": 1, "max_running": 3, "max_connections": 7, "allowed_hosts": ["a"], "allowed_host": ["a"],
    "slo_ttft": 1.0, "slo_tpot": 1.0, "slo_completion": 1.0, "slo_timeout": 1.0,
}  # fmt: skip
OPTIONS = inspect.signature(cli.serve).parameters


def another(name: str, default: Any) -> Any:
    """A value other than the default, of its type."""
    if name in VALUES:
        return VALUES[name]
    if isinstance(default, Enum):
        return next(member for member in type(default) if member is not default)
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int | float) else "another"


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_reaches_the_server_or_its_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(serve, "serve", lambda *given: started.append(given))
    usual = {each: option.default for each, option in OPTIONS.items()}
    with_ = WITH.get(name, {})
    for value in (usual[name], another(name, usual[name])):
        cli.serve(**(usual | with_ | {name: value}))
    assert started[0] != started[1]
