"""What crosses between an engine and its client. Owns: the frozen messages, picklable.

Rules: one `Generate` leads to any number of `Delta`s, the last of which has `finish`; that last one
comes exactly once, whatever happens. Token ids and text go to the client that asked, never to logs
or events.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotprefix.engine.executor import TokenLogprob
from hotprefix.engine.params import SamplingParams
from hotprefix.kernel.plan import Finish
from hotprefix.kernel.request import RequestId


@dataclass(frozen=True, slots=True)
class Generate:
    """Ask for one generation. salt: isolates the cache of a tenant. deadline: seconds from now after
    which it is aborted (None = never). arrival: the client's `time.monotonic()`."""

    id: RequestId
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    salt: str | None = None
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. cached: prompt tokens reused, by final source."""

    prompt_tokens: int
    completion_tokens: int
    cached_device: int = 0
    cached_host: int = 0
    cached_storage: int = 0

    @property
    def cached_tokens(self) -> int:
        return self.cached_device + self.cached_host + self.cached_storage


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one request. text: what may be shown now (held-back stop candidates and split
    UTF-8 characters come later); join of all texts equals the non-stream text. tokens: ids since the
    last delta. finish: set on the last delta only. stop_reason: the stop string or token id that hit.
    error: human-readable, with finish ERROR."""

    id: RequestId
    text: str
    tokens: tuple[int, ...]
    usage: Usage
    finish: Finish | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None
