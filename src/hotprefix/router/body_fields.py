"""Fields of a body that matter to a choice, beside the prompt. Owns: how each is read.

Rules: a field of another type counts as absent, since the worker says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OUTPUTS = 256
"""Tokens that an answer is taken to have if its request sets no limit."""
MOST = 1 << 20
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_SESSIONS = ("session_id", "prompt_cache_key", "user")


def session(value: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """The session that a request belongs to, as far as its client tells."""
    for given in (headers.get("x-session-id"), *map(value.get, _SESSIONS)):
        if isinstance(given, str) and given:
            return given[:256]
    return None


def outputs(value: Mapping[str, Any]) -> int:
    """Tokens that the answer may have."""
    given = next((value[name] for name in _LIMITS if value.get(name) is not None), None)
    return _whole(given, OUTPUTS)


def choices(value: Mapping[str, Any]) -> int:
    """Answers to one prompt."""
    return _whole(value.get("n"), 1)


def text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: Any, otherwise: int) -> int:
    return min(value, MOST) if type(value) is int and value >= 1 else otherwise
