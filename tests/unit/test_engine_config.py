"""Settings of an engine are refused where they are given, whether or not anything reads them yet."""

from __future__ import annotations

from typing import Any

import pytest

from hotprefix.engine.config import EngineConfig
from hotprefix.errors import ConfigError


@pytest.mark.parametrize("l2_tokens", [0, 1024])
@pytest.mark.parametrize("wrong", [{"write": "x"}, {"prefetch": "x"}, {"prefetch_timeout_s": -1.0}])
def test_settings_of_tiers_are_checked_with_and_without_them(l2_tokens: int, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"tiers.{next(iter(wrong))}="):
        EngineConfig(l2_tokens=l2_tokens, **wrong)
    assert (EngineConfig(l2_tokens=l2_tokens).kernel().tiers is not None) == (l2_tokens > 0)
