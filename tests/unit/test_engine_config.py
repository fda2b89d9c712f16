"""Settings of an engine are refused where they are given, whether or not anything reads them yet."""

from __future__ import annotations

from typing import Any

import pytest

from hotprefix.engine.build import build_engine
from hotprefix.engine.config import EngineConfig
from hotprefix.errors import ConfigError
from hotprefix.server.config import ServerConfig


@pytest.mark.parametrize("l2_tokens", [0, 1024])
@pytest.mark.parametrize(
    "wrong",
    [{"write": "x"}, {"prefetch": "x"}, {"prefetch_timeout_s": -1.0}, {"prefetch_timeout_s": float("nan")}],
)
def test_settings_of_tiers_are_checked_with_and_without_them(l2_tokens: int, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
        EngineConfig(l2_tokens=l2_tokens, **wrong)
    assert (EngineConfig(l2_tokens=l2_tokens).kernel().tiers is not None) == (l2_tokens > 0)


def test_a_wrong_store_is_found_before_a_model_is_looked_for() -> None:
    with pytest.raises(ConfigError, match="store scheme 'ftp' is unknown"):
        build_engine(EngineConfig(model="no/such/model", l2_tokens=1024, l3="ftp://host"))


@pytest.mark.parametrize("wrong", [{"drain_s": float("nan")}, {"drain_s": -1.0}, {"served_names": ("a", "")}])
def test_settings_of_the_server(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**wrong)
