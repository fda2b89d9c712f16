"""From request fields to `SamplingParams`. Owns: that mapping, and which engine requests one HTTP request
becomes.

Rules: `SamplingParams` itself checks ranges; here stands only what differs between the wire and the engine.
The n choices of a prompt have seeds that are derived from the given one; the first has the given one itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from hotprefix.engine.messages import EngineInfo, Generate
from hotprefix.engine.params import SamplingParams, StructuredOutput
from hotprefix.errors import ContextLengthExceeded, InputError
from hotprefix.server.schemas import Generation

MASK_63 = (1 << 63) - 1


def sampling_params(
    body: Generation,
    *,
    max_tokens: int | None,
    skip_special_tokens: bool,
    logprobs: int | None,
    prompt_logprobs: int | None,
    structured: StructuredOutput | None,
) -> SamplingParams:
    """Raises InputError that names the field."""
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=0 if body.top_k == -1 else body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias={_token_id(key): bias for key, bias in body.logit_bias.items()},
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        include_stop=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        skip_special_tokens=skip_special_tokens,
        structured=structured,
    )


def _token_id(key: str) -> int:
    if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key):
        raise InputError(
            f"logit_bias key {key[:40]!r}: give a token id without leading zeros", param="logit_bias"
        )
    return int(key)


def structured_output(
    body: Generation, forced: StructuredOutput | None = None
) -> tuple[str, StructuredOutput] | tuple[None, None]:
    """The one grammar that the request asks for, and the field that gave it. forced: the grammar that a tool
    choice makes necessary. Raises InputError if there are several, or if it is incomplete."""
    found = [*_from_response_format(body), *_from_guided(body), *_from_structured_outputs(body)]
    if forced is not None:
        found.append(("tool_choice", forced))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InputError(f"{names} are given: give one", param=found[1][0])
    return found[0] if found else (None, None)


Found = list[tuple[str, StructuredOutput]]


# For each type of response_format the field that belongs to it; the other fields may not be given.
FIELD_OF = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}


def _from_response_format(body: Generation) -> Found:
    wanted = body.response_format
    if wanted is None:
        return []
    name, own = "response_format", FIELD_OF.get(wanted.type)
    given = {field for field in FIELD_OF.values() if getattr(wanted, field) is not None}
    if own is not None and own not in given:
        raise InputError(f"{name}.{own} is missing: type {wanted.type} needs it", param=f"{name}.{own}")
    for field in sorted(given - {own}):
        raise InputError(
            f"{name}.{field} is given, but type is {wanted.type}: leave it out, or give its type",
            param=f"{name}.{field}",
        )
    if wanted.type == "text":
        return []
    if wanted.json_schema is not None:
        spec = _text(wanted.json_schema.schema_)
    else:
        spec = wanted.pattern or wanted.grammar or ""
    return [(name, StructuredOutput(wanted.type, spec))]


def _from_guided(body: Generation) -> Found:
    given = (
        ("guided_json", "json_schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
    )
    return [(name, StructuredOutput(kind, _text(spec))) for name, kind, spec in given if spec is not None]


def _from_structured_outputs(body: Generation) -> Found:
    wanted = body.structured_outputs
    if wanted is None:
        return []
    given = (
        ("json", "json_schema", wanted.json_),
        ("regex", "regex", wanted.regex),
        ("choice", "choice", wanted.choice),
        ("grammar", "grammar", wanted.grammar),
        ("json_object", "json_object", "" if wanted.json_object else None),
    )
    prefix = "structured_outputs"
    found = [
        (f"{prefix}.{name}", StructuredOutput(kind, _text(spec)))
        for name, kind, spec in given
        if spec is not None
    ]
    if not found:
        names = ", ".join(name for name, _, _ in given)
        raise InputError(
            f"{prefix} constrains nothing: give one of {names} (json_object as true), or leave it out",
            param=prefix,
        )
    return found


def _text(spec: Any) -> str:
    return spec if isinstance(spec, str) else json.dumps(spec, ensure_ascii=False)


def check_length(prompt: Sequence[int], max_tokens: int | None, info: EngineInfo, param: str) -> None:
    """Raises ContextLengthExceeded if the prompt and the outputs asked for (at least one) do not fit,
    InputError if the prompt is empty or holds an id that the model does not have."""
    if not prompt:
        raise InputError(f"{param} is empty: give at least one token", param=param)
    if min(prompt) < 0 or max(prompt) >= info.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < info.vocab_size)
        raise InputError(
            f"{param} holds token id {wrong}: the model has ids 0 to {info.vocab_size - 1}", param=param
        )
    wanted = 1 if max_tokens is None else max_tokens
    if len(prompt) + wanted > info.max_model_len:
        asked = "at least 1 output" if max_tokens is None else f"{max_tokens} outputs (max_tokens)"
        raise ContextLengthExceeded(
            f"this model's maximum context length is {info.max_model_len} tokens, but {len(prompt)} in the "
            f"prompt plus {asked} were asked for: shorten the prompt or lower max_tokens",
            param=param,
        )


def requests_for(
    prompts: Sequence[Sequence[int]],
    n: int,
    params: SamplingParams,
    body: Generation,
    id_: str,
    salt: str | None,
    arrived: float,
    trace: str | None = None,
) -> list[Generate]:
    """One engine request for each choice, in the order of their indices: the n of prompt 0, the n of prompt
    1, and so on. arrived: when the HTTP request came, by `time.monotonic`. trace: its `traceparent`."""
    settings = [_with_seed(params, choice) for choice in range(n)]
    return [
        Generate(
            f"{id_}-{number * n + choice}",
            ids,
            settings[choice],
            priority=body.priority,
            salt=salt,
            session=body.session_id,
            hold_s=body.session_hold_s if body.session_id is not None else 0.0,
            trace=trace,
            arrived=arrived,
        )
        for number, prompt in enumerate(prompts)
        for ids in [tuple(prompt)]
        for choice in range(n)
    ]


def _with_seed(params: SamplingParams, choice: int) -> SamplingParams:
    if params.seed is None or choice == 0:
        return params
    digest = hashlib.blake2b(f"{params.seed}:{choice}".encode(), digest_size=8).digest()
    return params.with_seed(int.from_bytes(digest) & MASK_63)
