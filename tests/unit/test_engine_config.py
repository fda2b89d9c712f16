"""Settings of an engine are refused where they are given, whether or not anything reads them yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotprefix.commands.calibrate import calibrate
from hotprefix.engine.build import build_engine
from hotprefix.engine.config import EngineConfig
from hotprefix.engine.token_engine import TokenEngine
from hotprefix.errors import ConfigError, InputError
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


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kv_tokens": 0}, "--kv-tokens 0"),
        ({"page_size": 0}, "--page-size 0"),
        ({"threads": 0}, "--threads 0"),
        ({"out": Path("/proc/none/c.json")}, "cannot write the cost model"),
    ],
)
def test_a_calibration_that_cannot_be_is_refused_before_a_model_is_looked_for(
    wrong: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=says):
        calibrate(**{"out": tmp_path / "c.json", "model": "no/such/model"} | wrong)
    with pytest.raises(ConfigError, match="threads=0"):
        TokenEngine.load("no/such/model", "auto", "auto", pages=1, page_size=16, threads=0)
