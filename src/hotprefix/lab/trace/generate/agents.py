"""Generated coding agents. Owns: how sessions of tool and user steps grow, reset and start sub-agents.

Rules: the defaults are the published figures of 710 recorded sessions (docs/traces.md), and what is not
published there is our fit of the same file. A prompt is the context so far, answer included, and what the
step adds. Blocks count as far as their KV is computed, which the last token of an answer has not: a block
that ends there or later is the next prompt's own. A reset keeps tools and system prompt only. Each session
has a random stream of its own, so more sessions leave the first ones as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

import numpy as np
from pydantic.dataclasses import dataclass

from hotprefix.lab.trace.generate.draw import (
    FROZEN,
    Count,
    Distribution,
    Ids,
    Length,
    LogNormal,
    Positive,
    Random,
    Share,
    extended,
    tokens,
)
from hotprefix.lab.trace.record import Blocks, TraceRequest


def _lognormal(median: float, sigma: float) -> Distribution:
    return field(default_factory=lambda: LogNormal(median, sigma))


@dataclass(config=FROZEN, frozen=True, slots=True, kw_only=True)
class AgentParams:
    """Tokens and seconds. session_rate: sessions a second, Poisson. prefixes: how many different tools and
    system prompts there are; sub-agents have one of their own. fresh: tokens a step's prompt has beyond
    the one before it, the answer among them. delay: from an answer to the next step. user_share,
    reset_share: of steps. reset_length: of a context after a reset, as a multiple of before.
    resumed_*: sessions that begin where an older one left off, with a long context. window: a
    context that would pass it is compacted to tools, system prompt and a summary, `compacted` long in all.
    sub_agents: chance that a step starts one."""

    sessions: Count = 64
    session_rate: Positive = 0.1
    block_size: Length = 64
    prefixes: Count = 1
    prefix: Length = 15_000
    first_context: Distribution = _lognormal(24_500, 0.6)
    steps: Distribution = _lognormal(39, 1.16)
    fresh_after_tool: Distribution = _lognormal(704, 1.25)
    fresh_after_user: Distribution = _lognormal(576, 1.25)
    delay_after_tool: Distribution = _lognormal(9, 1.62)
    delay_after_user: Distribution = _lognormal(97, 2.01)
    output: Distribution = _lognormal(216, 1.11)
    user_share: Share = 0.13
    reset_share: Share = 0.017
    reset_length: Distribution = _lognormal(0.95, 0.3)
    resumed_share: Share = 0.0
    resumed_context: Distribution = _lognormal(200_000, 0.6)
    resumed_steps: Distribution = _lognormal(19, 1.0)
    resumed_window: Length = 1_000_000
    window: Length = 160_000
    compacted: Distribution = _lognormal(38_500, 0.55)
    sub_agents: Share = 0.0015
    sub_prefix: Length = 9_000
    sub_first_context: Distribution = _lognormal(10_500, 0.15)
    sub_steps: Distribution = _lognormal(10, 0.5)


def generate(params: AgentParams, seed: int) -> Iterator[TraceRequest]:
    """All requests, session after session, in order of their starts."""
    ids, starts, now = Ids(), np.random.default_rng((seed, 0)), 0.0
    size = params.block_size
    prefixes = [ids.fresh(params.prefix // size) for _ in range(params.prefixes)]
    sub_prefix = ids.fresh(params.sub_prefix // size)
    for number in range(params.sessions):
        random = np.random.default_rng((seed, 1, number))
        resumed = random.random() < params.resumed_share
        first = params.resumed_context if resumed else params.first_context
        steps = params.resumed_steps if resumed else params.steps
        window = params.resumed_window if resumed else params.window
        prefix = prefixes[random.integers(params.prefixes)]
        chain = _Chain(params, ids, random, f"s{number}", prefix, window)
        launched = 0
        for request in chain.run(first, steps, f"s{number}", None, now):
            yield request
            if random.random() < params.sub_agents:
                launched += 1
                sub = _Chain(params, ids, random, f"s{number}", sub_prefix, params.window)
                yield from sub.run(
                    params.sub_first_context, params.sub_steps, f"s{number}.{launched}", request.id, None
                )
        now += random_gap(starts, params.session_rate)


def random_gap(random: Random, rate: float) -> float:
    """Seconds to the next of a Poisson process."""
    return float(random.exponential(1 / rate))


class _Chain:
    """One agent's requests, each triggered by the one before it."""

    def __init__(
        self, params: AgentParams, ids: Ids, random: Random, session: str, prefix: Blocks, window: int
    ) -> None:
        self._p, self._ids, self._random = params, ids, random
        self._session, self._prefix, self._window = session, prefix, window

    def run(
        self, first: Distribution, steps: Distribution, name: str, parent: str | None, start: float | None
    ) -> Iterator[TraceRequest]:
        """parent: what started this agent; start: when it began, where nothing did."""
        p, size = self._p, self._p.block_size
        context, kind = self._prefix, "user"
        length = self._fitting(tokens(first, self._random))
        for number in range(tokens(steps, self._random)):
            context = extended(context, length // size, self._ids)
            answer = tokens(p.output, self._random)
            after = extended(context, max(length // size, (length + answer - 1) // size), self._ids)
            think = None if parent is None else self._think(kind)
            yield TraceRequest(
                id=f"{name}/{number}",
                input_length=length,
                output_length=answer,
                blocks=after[: -(-length // size)],
                arrival_s=start if number == 0 else None,
                session=self._session,
                parent=parent,
                think_s=think,
                output_blocks=after[length // size :],
                kind=kind,
            )
            parent = f"{name}/{number}"
            kind, length, context = self._step(length, answer, after)

    def _step(self, length: int, answer: int, after: Blocks) -> tuple[str, int, Blocks]:
        """Kind and length of the next prompt, and the blocks it keeps."""
        p, random = self._p, self._random
        which = random.random()
        if which < p.reset_share:
            return "user", self._fitting(round(length * p.reset_length.draw(random))), self._prefix
        kind = "user" if which < p.reset_share + p.user_share else "tool"
        fresh = tokens(p.fresh_after_user if kind == "user" else p.fresh_after_tool, random)
        longer = length + max(fresh, answer + 1)
        kept = after if longer <= self._window else self._prefix
        return kind, self._fitting(longer), kept

    def _fitting(self, length: int) -> int:
        """Compacted where it passes the window; at least tools, system prompt and something after them."""
        if length > self._window:
            length = tokens(self._p.compacted, self._random)
        return max(length, len(self._prefix) * self._p.block_size + 1)

    def _think(self, kind: str) -> float:
        delay = self._p.delay_after_user if kind == "user" else self._p.delay_after_tool
        return round(delay.draw(self._random), 3)
