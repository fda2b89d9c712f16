"""The engine as a library. Owns: `LLM`, generation in this process and thread.

Rules: it is the server's loop, driven until the given prompts are done; results come in the order of the
prompts. Records (event log, KV events, spans) are written by an observer, if the caller gives one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, Self

from hotprefix.engine.build import Progress, build_engine
from hotprefix.engine.config import EngineConfig
from hotprefix.engine.executor import TokenLogprob
from hotprefix.engine.messages import Generate, Usage
from hotprefix.engine.model.files import resolve_model
from hotprefix.engine.observe import Observer
from hotprefix.engine.params import SamplingParams
from hotprefix.engine.sampling.checker import GrammarChecker
from hotprefix.engine.sampling.structured import Vocabulary
from hotprefix.engine.text.template import ChatTemplate
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.errors import HotprefixError, InputError
from hotprefix.kernel.plan import Finish

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Completion:
    """One prompt's result. finish: stop, length or abort."""

    prompt: tuple[int, ...]
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
    finish: Finish | None = None
    stop_reason: str | int | None = None


class LLM:
    """A model in this process.

    Example: LLM().generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0.0))

    With a log: `with LLM(config, observer=open_recorder(config)) as llm: ...`, where config has `events`.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        progress: Progress = lambda line: None,
        observer: Observer | None = None,
    ) -> None:
        """observer: writes the records that `config` asks for. Raises ModelLoadError or ConfigError."""
        self.config = config or EngineConfig()
        self.tokenizer = Tokenizer.load(resolve_model(self.config.model).path)
        self.loop = build_engine(self.config, progress, observer=observer)
        self._grammars = GrammarChecker(Vocabulary.of(self.tokenizer, self.loop.info.vocab_size))
        self._numbers = count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close L3, and write records to their end."""
        self.loop.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete one prompt or several, given as texts or token ids. params: one for all, or one for each.

        Raises InputError for a bad prompt or setting (then nothing is run) and HotprefixError if a request
        fails in the engine.
        """
        wanted = [self._ids(p) for p in _listed(prompts)]
        settings = _settings(params, len(wanted))
        for own in settings:
            if own.structured is not None:
                self._grammars.check(own.structured)
        open_: dict[str, Completion] = {}
        try:
            for ids, own in zip(wanted, settings, strict=True):
                message = Generate(f"llm-{next(self._numbers)}", ids, own)
                self.loop.submit(message)
                open_[message.id] = Completion(ids)
            self._run(open_)
        except BaseException:
            self._abandon(open_)
            raise
        return list(open_.values())

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        **template_variables: Any,
    ) -> Completion:
        """Answer a conversation, rendered with the model's own chat template."""
        prompt = self._template.render(messages, kwargs=template_variables)
        return self.generate([list(prompt.ids)], params)[0]

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt, special="template", bos=True))
        return tuple(prompt)

    def _run(self, open_: Mapping[str, Completion]) -> None:
        while any(c.finish is None for c in open_.values()):
            for delta in self.loop.step():
                done = open_[delta.id]
                done.text += delta.text
                done.tokens += delta.tokens
                done.logprobs += delta.logprobs
                done.prompt_logprobs = delta.prompt_logprobs or done.prompt_logprobs
                done.usage, done.finish, done.stop_reason = delta.usage, delta.finish, delta.stop_reason
                if delta.finish is Finish.ERROR:
                    raise HotprefixError(f"request {delta.id} failed: {delta.error}")

    def _abandon(self, open_: Mapping[str, Completion]) -> None:
        """End the requests that are still open after an exception."""
        for request, done in open_.items():
            if done.finish is None:
                self.loop.abort(request)
        while self.loop.has_work:
            self.loop.step()


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    ids = [p for p in prompts if isinstance(p, int)]
    if ids and len(ids) == len(prompts):
        return [ids]
    if ids:
        raise InputError("prompts: give texts, lists of token ids, or one list of token ids", param="prompt")
    return [p for p in prompts if not isinstance(p, int)]


def _settings(params: SamplingParams | Sequence[SamplingParams] | None, n: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [replace(params) if params else SamplingParams()] * n
    if len(params) != n:
        raise HotprefixError(f"{len(params)} settings for {n} prompts: give one, or one each")
    return list(params)
