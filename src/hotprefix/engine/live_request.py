"""One request inside the engine loop. Owns: `LiveRequest`, from its submission to its last delta, and the
limit on its outputs.

Rules: sampled tokens become text once, in order. Whether a request has to stop is decided with the token that
stops it. The last delta comes once, and carries `finish`, usage and timing. Outputs that were given with the
request pass through the same text and the same decisions as sampled ones, and give the same deltas, except
for times and log-probabilities.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from hotprefix.engine.executor import Sampled, TokenLogprob
from hotprefix.engine.messages import Delta, EngineInfo, Generate, Timing, Usage
from hotprefix.errors import ContextLengthExceeded, InputError
from hotprefix.kernel.plan import Finish, Progress


class OutputText(Protocol):
    """Turns one request's tokens into text that may be shown."""

    def push(self, token: int) -> tuple[str, bool, str | None]:
        """(new text, whether a stop string is complete, which one)."""
        ...

    def flush(self) -> str:
        """The text that was held back; called at the request's end."""
        ...


class TokensOnly:
    """An OutputText for clients that read token ids and no text (the bench)."""

    def push(self, token: int) -> tuple[str, bool, str | None]:
        return "", False, None

    def flush(self) -> str:
        return ""


class LiveRequest:
    """What the loop remembers of one request between its submission and its last delta."""

    __slots__ = (
        "admitted", "deadline", "first", "last", "logprobs", "message", "outputs", "prompt_logprobs",
        "reused", "stop_ids", "stop_reason", "submitted", "text", "token", "unsent",
    )  # fmt: skip

    def __init__(self, message: Generate, text: OutputText, now: float) -> None:
        self.message = message
        self.text = text
        self.stop_ids = frozenset(message.params.stop_token_ids)
        self.submitted = now
        self.deadline = None if message.deadline is None else now + message.deadline
        self.admitted: float | None = None
        self.first: float | None = None
        self.last: float | None = None
        self.outputs = 0
        self.token = 0
        self.reused = (0, 0, 0)
        self.unsent = ""
        self.stop_reason: str | int | None = None
        self.logprobs: tuple[TokenLogprob, ...] = ()
        self.prompt_logprobs: list[TokenLogprob] = []

    def timing(self) -> Timing:
        def between(start: float | None, end: float | None) -> float | None:
            return None if start is None or end is None else end - start

        return Timing(
            between(self.submitted, self.admitted),
            between(self.admitted, self.first),
            between(self.first, self.last),
        )

    def take(self, sampled: Sampled, eos: Collection[int], now: float) -> bool:
        """Append a sampled token, unless the request asks for no outputs. True if the token ends the
        request."""
        if self.message.params.max_tokens == 0:
            return False
        self.first = now if self.first is None else self.first
        self.last = now
        self.outputs += 1
        self.token = sampled.token
        self.logprobs = () if sampled.logprob is None else (sampled.logprob,)
        return self._stops(sampled.token, eos) or sampled.ended

    def replay(self, eos: Collection[int], limit: int, *, ended: bool) -> list[Delta]:
        """One delta for each given output. The last one has `finish` if the request ends with it. limit:
        outputs in all. ended: the grammar is complete with the last one. Raises InputError if an output
        before the last one ends the request."""
        outputs = self.message.outputs
        if self.message.params.prompt_logprobs is not None:
            self.prompt_logprobs = [_placeholder(token) for token in self.message.prompt[1:]]
        deltas = []
        for number, token in enumerate(outputs, 1):
            self.outputs, self.token = number, token
            if self.message.params.logprobs is not None:
                self.logprobs = (_placeholder(token),)
            stopped, last = self._stops(token, eos), number == len(outputs)
            if stopped and not last:
                raise InputError(
                    f"output {number} of {len(outputs)} (token {token}) ends the answer: give none behind it",
                    param="outputs",
                )
            finish = None
            if last and (stopped or ended):
                finish = Finish.STOP
            elif number == limit:
                finish = Finish.LENGTH
            if finish is not None:
                self.unsent += self.text.flush()
            deltas.append(self._delta((token,), finish, None))
        return deltas

    def _stops(self, token: int, eos: Collection[int]) -> bool:
        params = self.message.params
        if self.outputs >= params.min_tokens:
            named = token in self.stop_ids
            if named or (token in eos and not params.ignore_eos):
                self.stop_reason = token if named else None
                if params.include_stop:
                    self.unsent += self.text.push(token)[0]
                return True
        text, matched, reason = self.text.push(token)
        self.unsent += text
        self.stop_reason = reason if matched else None
        return matched

    def delta(self, progress: Progress, finish: Finish | None = None, error: str | None = None) -> Delta:
        """The delta for a step, or for the request's end."""
        if finish in (Finish.STOP, Finish.LENGTH):
            self.unsent += self.text.flush()
        self.reused = progress.cached - progress.host - progress.storage, progress.host, progress.storage
        return self._delta(() if progress.token is None else (progress.token,), finish, error)

    def gained(self) -> Delta:
        """The delta for a step that gave the request one token and changed nothing else."""
        return self._delta((self.token,), None, None)

    def _delta(self, tokens: tuple[int, ...], finish: Finish | None, error: str | None) -> Delta:
        text, self.unsent = self.unsent, ""
        logprobs, self.logprobs = self.logprobs, ()
        first = self.outputs == len(tokens) and self.message.params.prompt_logprobs is not None
        return Delta(
            id=self.message.id,
            text=text,
            tokens=tokens,
            usage=Usage(
                len(self.message.prompt),
                self.outputs,
                *self.reused,
            ),
            finish=finish,
            stop_reason=self.stop_reason if finish is Finish.STOP else None,
            logprobs=logprobs,
            prompt_logprobs=tuple(self.prompt_logprobs) if first else None,
            error=error,
            timing=self.timing() if finish is not None else None,
        )


def _placeholder(token: int) -> TokenLogprob:
    """Stands for the log-probability of a token that was computed elsewhere."""
    return TokenLogprob(token, 0.0, 1)


def output_limit(message: Generate, info: EngineInfo) -> int:
    """How many outputs a request may have, those given included: what it asks for, otherwise what the context
    leaves. Raises InputError for a bad prompt or bad outputs, ContextLengthExceeded with the numbers."""
    for name in ("prompt", "outputs"):
        bad = next((t for t in getattr(message, name) if not 0 <= t < info.vocab_size), None)
        if bad is not None:
            raise InputError(
                f"{name} holds token id {bad}: the model has ids 0 to {info.vocab_size - 1}", param=name
            )
    length, limit = len(message.prompt), info.max_model_len
    if not length:
        raise InputError("the prompt is empty: give at least one token", param="prompt")
    room = limit - length
    wanted = message.params.max_tokens
    least = max(1, message.params.min_tokens)
    if room < (least if wanted is None else wanted):
        asked = f"at least {least} output{'s' * (least > 1)}" if wanted is None else f"max_tokens={wanted}"
        lower = "min_tokens" if wanted is None and least > 1 else "max_tokens"
        raise ContextLengthExceeded(
            f"the prompt has {length} tokens and {asked} was asked for; the context is {limit} tokens: "
            f"shorten the prompt or lower {lower}",
            param="prompt" if room < 1 else lower,
        )
    most = wanted if wanted is not None else room
    if len(message.outputs) > most:
        raise InputError(
            f"{len(message.outputs)} outputs are given: the request may have {most} in all", param="outputs"
        )
    return most
