"""kv-cache-tester's own files: one Claude Code session each, every prompt with all of its block ids. Owns:
making a session's rows from such a file (`as_session`), and one file of many sessions (`gather`).

Rules: ids are local to a session and chained: an id stands for everything before it. So a prompt is written
as the first `keep` blocks of the earlier prompt that shares most with it (of equals the latest), and `new`
further ones. A file whose ids are not chained is refused. Rows are ordered by time, those of sub-agents too.
Equal files give equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from hotprefix.lab.trace.line_fields import STRICT, Outputs, Seconds, Tokens
from hotprefix.lab.trace.lines import files_of, lines
from hotprefix.lab.trace.problems import BadTrace, bad_beginning

COLUMNS: Final = (
    "t", "agent", "in", "out", "parent", "keep", "new", "think", "api", "ttft", "inp", "stop", "model",
)  # fmt: skip
MARK: Final = b'"hash_id_scope"'
_LETTERS: Final = {"text": "u", "tool_result": "r", "tool_use": "c", "thinking": "k"}
_DIGITS: Final = 6  # a sum of two times is rounded to so many digits; the file writes milliseconds

Ids = list[Annotated[int, Field(ge=0)]]


@dataclass(config=STRICT, slots=True, kw_only=True)
class _Request:
    """One request of a file. tokens_in (`in` in the file): prompt tokens. input_types: what the prompt
    adds."""

    type: Literal["n", "s"]
    t: Seconds
    model: str
    tokens_in: Annotated[Tokens, Field(validation_alias="in")]
    out: Outputs
    hash_ids: Ids
    input_types: list[Literal["text", "tool_result", "tool_use", "thinking"]]
    stop: str | None = None
    api_time: Seconds | None = None
    think_time: Seconds | None = None
    ttft: Seconds | None = None


@dataclass(config=STRICT, slots=True, kw_only=True)
class _SubAgent:
    """A sub-agent's requests. t: when it began; the times of its requests count from there."""

    type: Literal["subagent"]
    t: Seconds
    requests: list[_Request]


@dataclass(config=STRICT, slots=True, kw_only=True)
class _File:
    id: str
    models: list[str]
    block_size: Tokens
    hash_id_scope: Literal["local"]
    tool_tokens: Outputs
    system_tokens: Outputs
    requests: list[Annotated[_Request | _SubAgent, Field(discriminator="type")]]


_FILE: Final = TypeAdapter(_File)


def as_session(raw: bytes) -> dict[str, Any]:
    """A file's content in the form of `agents.Session`. Raises ValueError."""
    held = _FILE.validate_json(raw)
    rows: list[list[Any]] = []
    latest: dict[int, int] = {}
    before: dict[int, int | None] = {}
    for number, (t, agent, request) in enumerate(_by_time(held)):
        ids = request.hash_ids
        keep = next((i for i, name in enumerate(ids) if name not in latest), len(ids))
        parent = latest[ids[keep - 1]] if keep else -1
        for above, name in zip([None, *ids], ids, strict=False):
            if before.setdefault(name, above) != above:
                raise ValueError(f"requests.hash_ids: {name} stands after {before[name]} and after {above}")
            latest[name] = number
        added = "".join(sorted(_LETTERS[kind] for kind in request.input_types))
        model = held.models.index(request.model) if request.model in held.models else request.model
        rows.append([
            t, agent, request.tokens_in, request.out, parent, keep, len(ids) - keep, request.think_time,
            request.api_time, request.ttft, added, request.stop, model,
        ])  # fmt: skip
    names = ("id", "models", "block_size", "tool_tokens", "system_tokens")
    return {name: getattr(held, name) for name in names} | {"cols": list(COLUMNS), "rows": rows}


def _by_time(held: _File) -> list[tuple[float, int, _Request]]:
    """(time, agent, request) by time, where agent 0 is the main agent; equal times keep the file's order."""
    found: list[tuple[float, int, _Request]] = []
    agents = 0
    for one in held.requests:
        if isinstance(one, _Request):
            found.append((one.t, 0, one))
            continue
        agents += 1
        found += [(round(one.t + request.t, _DIGITS), agents, request) for request in one.requests]
    return sorted(found, key=lambda entry: entry[0])


def gather(folder: Path, max_bytes: int | None = None) -> Iterator[tuple[Path, bytes | None]]:
    """Each file of a folder with its session as a line, or with None if the file is larger than `max_bytes`.
    Raises BadTrace."""
    for path in files_of(folder):
        if max_bytes is not None and path.stat().st_size > max_bytes:
            yield path, None
            continue
        for number, raw in lines(path):
            try:
                session = as_session(raw)
            except ValueError as error:
                raise bad_beginning(path, number, error) from None
            yield path, json.dumps(session, separators=(",", ":")).encode() + b"\n"
            break
        else:
            raise BadTrace(f"{path}: empty", param="trace")
