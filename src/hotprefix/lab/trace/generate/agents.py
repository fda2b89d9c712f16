"""Generated coding agents. Owns: how sessions of tool and user steps grow, reset and start sub-agents.

Rules:
1. The defaults are the published figures of 710 recorded sessions (docs/traces.md). Figures that are not
   published are our fit of the same file.
2. A prompt is the context so far, answers included, and what the step adds.
3. The last token of an answer has no KV (rule 9). So a block that ends at that token or later is not shared
   with the request that gave the answer: it is the next prompt's own.
4. A reset keeps only tools and system prompt.
5. Each session has a random stream of its own, so a larger number of sessions leaves the first ones as they
   were.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

import numpy as np
from pydantic.dataclasses import dataclass

from hotprefix.lab.trace.generate.distributions import (
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
from hotprefix.lab.trace.trace_request import Blocks, TraceRequest


def _lognormal(median: float, sigma: float) -> Distribution:
    return field(default_factory=lambda: LogNormal(median, sigma))


@dataclass(config=FROZEN, frozen=True, slots=True, kw_only=True)
class AgentParams:
    """Parameters, in tokens and seconds.

    session_rate: sessions a second, Poisson.
    prefixes: how many different pairs of tools and system prompt there are; sub-agents have one of their own.
    prefix: the length of tools and system prompt.
    first_context: the length of a session's first prompt.
    steps: requests of a session's main agent.
    fresh_after_*: how many tokens a step's prompt has beyond the prompt before it, the answer included.
    delay_after_*: seconds from an answer to the next step.
    output: tokens of an answer.
    user_share, reset_share: the share of steps that follow a user, and of those that reset the context.
    reset_length: the length of a context after a reset, as a multiple of the length before.
    resumed_*: of sessions that go on from an older one, and so begin with a long context.
    window: a context that would become longer is compacted to tools, system prompt and a summary.
    compacted: the length of a compacted context, all of it.
    sub_agents: the chance that a step starts a sub-agent.
    sub_*: of sub-agents.
    """

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
    """All requests, session after session, in the order of the sessions' starts."""
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
    """Seconds to the next event of a Poisson process."""
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
        """The agent's requests. parent: the request that started this agent, if one did. start: when the
        agent begins, if no request started it."""
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
        """The kind and length of the next prompt, and the blocks that it keeps."""
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
        """The length of a prompt, compacted if it passes the window. It is at least that of tools, system
        prompt and something after them."""
        if length > self._window:
            length = tokens(self._p.compacted, self._random)
        return max(length, len(self._prefix) * self._p.block_size + 1)

    def _think(self, kind: str) -> float:
        delay = self._p.delay_after_user if kind == "user" else self._p.delay_after_tool
        return round(delay.draw(self._random), 3)
