"""Sampling settings of one request. Owns: `SamplingParams`, validated when built.

Rules: settings are frozen. Every refusal names the field, its value and the allowed range. What needs the
model (vocabulary size, token ids) is checked once by `check_vocab`. A field means what it means in OpenAI's
API, or in vLLM if OpenAI has no such field.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hotprefix.errors import InputError

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 4096
MAX_LISTED_TOKENS = 4096
# A logit that is divided by less overflows: with 1e-38 the logit of every repeated token is infinite.
MIN_REPETITION_PENALTY = 0.01


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A grammar that the output must follow.

    kind: json_schema | json_object | regex | grammar | choice | lark (llguidance's Lark dialect).
    spec: the schema or expression, as text.
    """

    kind: str
    spec: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen. Raises InputError.

    max_tokens: None = what the context leaves; 0 = the prompt is scored and there are no outputs.
    min_tokens: before that many outputs no end token and no stop ends the request.
    temperature: 0 = greedy.
    top_k: 0 = off.
    seed: the random stream is a function of (seed, output index) alone, whatever else is in the batch.
    repetition_penalty: below 1 it favours tokens that have occurred.
    logprobs: how many top entries are wanted; 0 = only the sampled token's, None = none at all.
    prompt_logprobs: the same for the prompt.
    stop, stop_token_ids, logit_bias: bounded (`MAX_STOPS`, `MAX_STOP_CHARS`, `MAX_LISTED_TOKENS`), because
    each output token costs as much as they hold.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 10.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _whole("top_k", self.top_k, 0, None)
        _whole("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 0, None)
            if self.min_tokens > self.max_tokens:
                raise InputError(
                    f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}", param="min_tokens"
                )
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        self._check_stops()
        for name, listed in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            if len(listed) > MAX_LISTED_TOKENS:
                raise InputError(
                    f"{name} holds {len(listed)} token ids: give at most {MAX_LISTED_TOKENS}", param=name
                )
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, None)
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0, None)
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0, param="logit_bias")

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS or any(not isinstance(s, str) or not s for s in self.stop):
            empty = ", an empty one" if "" in self.stop else ""
            raise InputError(
                f"stop holds {len(self.stop)} strings{empty}: give at most {MAX_STOPS}, none of them empty",
                param="stop",
            )
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_CHARS:
            raise InputError(
                f"stop holds a string of {longest} characters: give at most {MAX_STOP_CHARS}", param="stop"
            )

    def with_seed(self, seed: int) -> SamplingParams:
        """The same settings with another seed (64-bit, signed). They are not checked again, because that
        takes as long as the longest list in them, and would be done for each of a request's choices."""
        copied = copy.copy(self)
        object.__setattr__(copied, "seed", seed)
        return copied

    def check_vocab(self, vocab_size: int) -> None:
        """Raise InputError if a token id lies outside [0, vocab_size)."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", tuple(self.logit_bias))):
            for token in ids:
                if token >= vocab_size:
                    raise InputError(
                        f"{name} holds token id {token}: the model has ids 0 to {vocab_size - 1}", param=name
                    )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _number(
    name: str, value: Any, low: float, high: float, *, open_low: bool = False, param: str | None = None
) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or value > high or (value <= low if open_low else value < low):
        edge = "above" if open_low else "from"
        raise InputError(f"{name}={value!r}: give a number {edge} {low} to {high}", param=param or name)


def _whole(name: str, value: Any, low: int, high: int | None) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool)
    if not ok or value < low or (high is not None and value > high):
        limit = f"from {low} to {high}" if high is not None else f">= {low}"
        raise InputError(f"{name}={value!r}: give a whole number {limit}", param=name)
