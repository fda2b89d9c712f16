"""Coding-agent sessions. Owns: the importer for `cc_weka_sessions_b64`, one Claude Code session a line, and
for the files of kv-cache-tester that it was gathered from (kvtester.py).

Rules:
1. A row's prompt is the first `keep` blocks of an earlier row's prompt (its `parent`) and `new` fresh ones.
   So a block is named by (session, the row that brought it, offset); these names are numbered through the
   whole trace. Only complete blocks have an id.
2. A cache belongs to one model: a row shares nothing with a parent that ran on another model.
3. For closed-loop replay, `row_triggers` says which row's completion leads to which row.
docs/traces.md says what is assumed, and how often it matters.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass as plain
from typing import Final, NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from hotprefix.errors import ConfigError
from hotprefix.lab.trace import kvtester
from hotprefix.lab.trace.kvtester import COLUMNS
from hotprefix.lab.trace.line_fields import MAX_BLOCK, STRICT, Outputs, Seconds, Tokens
from hotprefix.lab.trace.timestamps import UNIX_SECONDS
from hotprefix.lab.trace.trace_request import Blocks, TraceRequest


class Row(NamedTuple):
    """A request as recorded.

    t: seconds since the session's start.
    agent: 0 is the main agent.
    parent, keep, new: see the module's rules.
    inp: what the prompt adds, as letters: u user text, r tool result, c tool use, k thinking.
    model: an index into the session's models, or a name.
    """

    t: Seconds
    agent: Outputs
    tokens_in: Tokens
    tokens_out: Outputs
    parent: int
    keep: Outputs
    new: Outputs
    think: Seconds | None
    api: Seconds | None
    ttft: Seconds | None
    inp: str
    stop: str | None
    model: int | str

    @property
    def kind(self) -> str:
        return "user" if "u" in self.inp else "tool"


@dataclass(config=STRICT, slots=True)
class Session:
    """One line of the file. tool_tokens, system_tokens: the lengths of the tools and the system prompt that
    precede the main agent's first message."""

    id: str
    models: list[str]
    block_size: Tokens
    tool_tokens: Outputs
    system_tokens: Outputs
    cols: list[str]
    rows: list[Row]

    def model(self, row: Row) -> str:
        if isinstance(row.model, str):
            return row.model
        if not 0 <= row.model < len(self.models):
            raise ValueError(f"rows: model {row.model} is not among the session's {len(self.models)}")
        return self.models[row.model]


_SESSION: Final = TypeAdapter(Session)
MARK_WITHIN: Final = 4096  # an original file has the mark by which it is known in its first bytes


@plain(frozen=True, slots=True)
class SessionStarts:
    """When sessions begin, which the file does not record. rate: sessions a second on average, of a Poisson
    process drawn with `seed`; None: all begin at 0."""

    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate={self.rate}: give sessions per second above 0", param="rate")

    def times(self) -> Iterator[float]:
        """The start of each session, seconds, never decreasing."""
        random, now = np.random.default_rng(self.seed), 0.0
        while True:
            yield now
            now += random.exponential(1 / self.rate) if self.rate else 0.0


@plain(frozen=True, slots=True)
class Assumed:
    """Assumptions about what the file does not record.

    shared_prefix: main agents with equal (model, tool_tokens, system_tokens) begin with the same tools and
    system prompt.
    answers: an answer is part, unchanged, of the next prompt that keeps all of this one, so that prompt tells
    the answer's blocks.
    """

    shared_prefix: bool = True
    answers: bool = False

    def notes(self, starts: SessionStarts) -> tuple[str, ...]:
        when = f"Poisson, {starts.rate} a second, seed {starts.seed}" if starts.rate else "all at 0 s"
        return (
            "blocks: expanded from parent/keep/new, complete 64-token blocks only; none shared across models",
            "tools and system prompt: shared between sessions with equal (model, tool_tokens, system_tokens)"
            if self.shared_prefix
            else "sessions share nothing with each other",
            "answers: assumed to stand in the next prompt as generated"
            if self.answers
            else "answers: their blocks are not recorded, so nothing of an answer is reused",
            f"session starts are not recorded: {when}; arrivals inside a session are the recorded ones",
            "think times: from the end of the triggering request as recorded, 0 where they overlapped",
        )


def parse_session(raw: bytes) -> Session:
    """The session in one line, or in a file of kv-cache-tester. Raises ValueError, which names a row's column
    as the file does."""
    try:
        original = kvtester.MARK in raw[:MARK_WITHIN]
        session = _SESSION.validate_json(json.dumps(kvtester.as_session(raw)) if original else raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        match first["loc"]:
            case ("rows", int(i), int(column), *_):
                raise ValueError(f"rows.{i}.{COLUMNS[column]}: {first['msg']}") from None
        raise
    if session.cols != list(COLUMNS):
        raise ValueError(f"cols: {session.cols} instead of {list(COLUMNS)}")
    return session


class CodingAgents:
    """Importer for one reading. block_size: a session with another one is refused; None: any is taken."""

    def __init__(self, block_size: int | None, starts: SessionStarts, assumed: Assumed) -> None:
        self._block_size = block_size
        self._starts = starts.times()
        self._assumed = assumed
        self._sessions: set[str] = set()
        self._prefixes: dict[tuple[str, int, int], Blocks] = {}
        self._next = 0

    def take(self, line: int, raw: bytes) -> Sequence[TraceRequest]:
        session = parse_session(raw)
        if self._block_size not in (None, session.block_size):
            raise ValueError(f"block_size: {session.block_size}, but {self._block_size} was asked for")
        if session.id in self._sessions:
            raise ValueError(f"id: session {session.id!r} stands twice")
        prompts = self._prompts(session)
        self._sessions.add(session.id)
        triggers, ends = row_triggers(session.rows), row_ends(session.rows)
        start = next(self._starts)
        answers = _answers(session, prompts) if self._assumed.answers else [None] * len(prompts)
        return [
            TraceRequest(
                id=f"{session.id}/{i}",
                input_length=row.tokens_in,
                output_length=row.tokens_out,
                blocks=_with_partial(prompts[i], answers[i], row.tokens_in % session.block_size > 0),
                arrival_s=start + row.t,
                session=session.id,
                parent=None if trigger is None else f"{session.id}/{trigger}",
                think_s=None if trigger is None else max(0.0, row.t - ends[trigger]),
                output_blocks=answers[i],
                namespace=session.model(row),
                kind=row.kind,
            )
            for i, (row, trigger) in enumerate(zip(session.rows, triggers, strict=True))
        ]

    def _prompts(self, session: Session) -> list[Blocks]:
        """The block ids of each row's prompt. Raises ValueError if a row contradicts an earlier one."""
        found: list[Blocks] = []
        for i, row in enumerate(session.rows):
            _check(session, i)
            kept = found[row.parent][: row.keep] if row.parent >= 0 else np.empty(0, np.int32)
            if row.parent >= 0 and session.model(row) != session.model(session.rows[row.parent]):
                kept = kept[:0]
            elif i == 0 and self._assumed.shared_prefix:
                kept = self._prefix(session)[: row.new]
            fresh = self._fresh(row.keep + row.new - len(kept))
            found.append(np.concatenate((kept, fresh)))
        return found

    def _prefix(self, session: Session) -> Blocks:
        key = (session.model(session.rows[0]), session.tool_tokens, session.system_tokens)
        if key not in self._prefixes:
            self._prefixes[key] = self._fresh((key[1] + key[2]) // session.block_size)
        return self._prefixes[key]

    def _fresh(self, count: int) -> Blocks:
        if self._next + count > MAX_BLOCK:
            raise ValueError("rows: more than 2^30 distinct blocks")
        self._next += count
        return np.arange(self._next - count, self._next, dtype=np.int32)


def _check(session: Session, i: int) -> None:
    """Raises ValueError if row `i` does not fit the rows before it."""
    row, rows = session.rows[i], session.rows
    if not -1 <= row.parent < i:
        raise ValueError(f"rows.{i}.parent: {row.parent} is not an earlier row")
    held = rows[row.parent].keep + rows[row.parent].new if row.parent >= 0 else 0
    if row.keep > held:
        raise ValueError(f"rows.{i}.keep: {row.keep} blocks of a prompt that has {held}")
    if row.keep + row.new != row.tokens_in // session.block_size:
        raise ValueError(
            f"rows.{i}: keep + new = {row.keep + row.new} blocks for {row.tokens_in} tokens, but blocks of "
            f"{session.block_size} tokens make {row.tokens_in // session.block_size}"
        )
    if row.t >= UNIX_SECONDS.start:
        raise ValueError(f"rows.{i}.t: {row.t} looks like Unix time; count from the session's start")
    if i and row.t < rows[i - 1].t:
        raise ValueError(f"rows.{i}.t: time goes back from {rows[i - 1].t} to {row.t}")


def row_ends(rows: Sequence[Row]) -> list[float]:
    """When each row was answered. If a row's service time was not recorded, the session's median is taken."""
    usual = statistics.median([row.api for row in rows if row.api is not None] or [0.0])
    return [row.t + (usual if row.api is None else row.api) for row in rows]


def row_triggers(rows: Sequence[Row]) -> list[int | None]:
    """For each row, the row whose completion leads to it, or None.

    For a row of an agent, it is the row before it of the same agent. For the first row of a sub-agent, it is
    the main agent's latest row that had ended by then or, if none had, the main agent's latest row. The
    session's first row has none, nor has the first row of a sub-agent that precedes all rows of the main
    agent.
    """
    ends = row_ends(rows)
    last: dict[int, int] = {}
    main: list[int] = []
    found: list[int | None] = []
    for i, row in enumerate(rows):
        ended = (j for j in reversed(main) if ends[j] <= row.t)
        found.append(last[row.agent] if row.agent in last else next(ended, main[-1] if main else None))
        last[row.agent] = i
        if row.agent == 0:
            main.append(i)
    return found


def _answers(session: Session, prompts: list[Blocks]) -> list[Blocks | None]:
    """The blocks of each answer, taken from the first later prompt that keeps all complete blocks of the
    answer's prompt; None if no prompt does. The last token of an answer has no KV, so a block with that token
    is not an answer's block."""
    size = session.block_size
    found: list[Blocks | None] = [None] * len(prompts)
    for i, row in enumerate(session.rows):
        if row.parent < 0 or found[row.parent] is not None:
            continue
        before = session.rows[row.parent]
        complete, reached = before.tokens_in // size, (before.tokens_in + before.tokens_out - 1) // size
        if row.keep == complete < reached <= len(prompts[i]):
            found[row.parent] = prompts[i][complete:reached]
    return found


def _with_partial(prompt: Blocks, answer: Blocks | None, partial: bool) -> Blocks:
    """The prompt's blocks, with an id for its partial last block if the answer completes that block."""
    return prompt if answer is None or not partial else np.concatenate((prompt, answer[:1]))
