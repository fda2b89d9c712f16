"""Settings of a fleet on this machine. Owns: `LocalFleetConfig`, and which settings of engines and of the
router the command takes.

Rules: what is left out of a configuration is what the fleet decides itself: where its engines listen, where
their KV events go, and the key that they and the router share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hotprefix.engine.config import EngineConfig
from hotprefix.options import Group, check, option, settings
from hotprefix.router.config import SHARED, RouterConfig


def _but(config: type, left_out: Iterable[str]) -> tuple[str, ...]:
    return tuple(one.name for one in settings(config) if one.parameter and one.name not in left_out)


OF_ENGINES = _but(
    EngineConfig,
    ("kv_events", "kv_events_replay", "kv_events_form", "kv_events_topic", "kv_events_tokens"),
)
OF_THEIR_SERVERS = (
    "served_names", "drain_s", "stream_keepalive_s", "body_limit", "max_choices", "max_messages",
    "max_json_values", "max_json_items",
)  # fmt: skip
"""The fields of `ServerConfig` that each engine gets; those of SHARED are the router's."""
OF_THE_ROUTER = _but(
    RouterConfig, ("workers", "worker_file", "relist_s", "cost", "internal_key", "page_size", "tokenizers")
)
TAKEN = tuple(dict.fromkeys(("engines", "restarts", *OF_ENGINES, *OF_THEIR_SERVERS, *SHARED, *OF_THE_ROUTER)))


@dataclass(frozen=True, slots=True)
class LocalFleetConfig:
    """How many engines, and what becomes of those that die. Raises ConfigError."""

    # fmt: off
    engines: int = option(2, "Engines of the fleet.", Group.WORKERS, "COUNT", ">= 1", flag="workers")
    restarts: int = option(
        5, "Deaths in a row, of an engine or the router, that are followed by a new one.", Group.FAILURES,
        "COUNT", ">= 0")
    # fmt: on

    def __post_init__(self) -> None:
        check(self)
