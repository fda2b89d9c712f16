"""Rotary embedding in `config.json`. Owns: `read_rope`, for `rope_parameters` (transformers 5) and for
`rope_scaling` beside `rope_theta` (before transformers 5).

Rules: a key that the named kind does not use is refused, because it shows that another kind was meant. So are
two keys that give different values for the same thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotprefix.engine.model.config import RopeConfig, yarn_attention_factor
from hotprefix.engine.model.strict_fields import Fields, shown
from hotprefix.errors import ModelLoadError

_HARMLESS = frozenset({"type", "rope_type", "rope_theta", "finetuned"})
_HARMLESS_AT: Mapping[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1.0, 1),
    "extrapolation_factor": (1.0, 1),
}


def read_rope(fields: Fields, default_theta: float, positions: int) -> RopeConfig:
    """The rotary embedding that the fields of a `config.json` describe. default_theta: the family's.
    positions: the model's longest context, tokens. Raises ModelLoadError."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    given, other = fields.get("rope_scaling", {}), fields.get("rope_parameters", {})
    if given and other and given != other:
        raise ModelLoadError(
            f"config.json: rope_scaling={shown(given)} and rope_parameters={shown(other)} differ: remove one"
        )
    rope = Fields(given or other, f"config.json, {name}")
    kind = _same(rope, "rope_type", rope, "type") or "default"
    theta = _same(rope, "rope_theta", fields, "rope_theta") or default_theta
    original = _same(rope, "original_max_position_embeddings", fields, "original_max_position_embeddings")
    own: dict[str, Any] = {}
    if kind in ("linear", "llama3", "yarn"):
        own["factor"] = rope.number("factor", above=0)
    if kind == "llama3":
        own |= {key: rope.number(key, above=0) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        own |= _yarn(rope, own["factor"])
    if kind in ("llama3", "yarn"):
        own["original_positions"] = _positions(rope, original, positions)
    config = RopeConfig(theta=_theta(rope, theta), kind=str(kind), **own)
    only = dict(_HARMLESS_AT) if kind != "default" else {**_HARMLESS_AT, "factor": (1.0, 1)}
    rope.finish(_HARMLESS, only)
    return config


def _same(first: Fields, first_key: str, second: Fields, second_key: str) -> Any:
    """The value of two keys that mean the same; None if both are absent. Raises ModelLoadError if they
    differ."""
    one, two = first.get(first_key), second.get(second_key)
    if one is not None and two is not None and one != two:
        raise ModelLoadError(
            f"{first.where} has {first_key}={shown(one)}, but {second.where} has {second_key}={shown(two)}: "
            "remove the wrong one"
        )
    return two if one is None else one


def _theta(rope: Fields, theta: Any) -> float:
    return Fields({"rope_theta": theta}, rope.where).number("rope_theta", above=0)


def _positions(rope: Fields, original: Any, positions: int) -> int:
    key = "original_max_position_embeddings"
    return Fields({key: original}, rope.where).whole(key, positions)


def _yarn(rope: Fields, factor: float) -> dict[str, Any]:
    """Yarn's values. A key `attention_factor` replaces yarn's own formula; `attn_factor` multiplies its
    result, as in yarn's own code."""
    attention = rope.get("attention_factor")
    if attention is None:
        mscale, all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
        attention = yarn_attention_factor(factor, mscale, all_dim) * rope.number("attn_factor", 1.0)
    else:
        attention = rope.number("attention_factor")
        for key in ("mscale", "mscale_all_dim"):  # read, but without effect
            rope.get(key)
    return {
        "attention_factor": attention,
        "beta_fast": rope.number("beta_fast", 32.0) or 32.0,
        "beta_slow": rope.number("beta_slow", 1.0) or 1.0,
        "truncate": rope.flag("truncate", True),
    }
