"""What every route needs. Owns: `Service`, and turning a checked body into a response.

Rules: parsing, rendering and tokenizing happen before anything is submitted. `intake.py` decides where they
happen and within which bounds.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hotprefix.engine.messages import EngineInfo
from hotprefix.errors import EngineDead, InputError
from hotprefix.server import chat, completions, guard
from hotprefix.server.answer import Answer, Choice
from hotprefix.server.bodies import check, count_lists
from hotprefix.server.config import ServerConfig
from hotprefix.server.errors import ApiError
from hotprefix.server.generation import Engine, GenerationResponse
from hotprefix.server.grammar_queue import Turns
from hotprefix.server.guard import ARRIVED, TENANT, Gate, salt
from hotprefix.server.intake import Intake
from hotprefix.server.internal import is_internal, require_internal
from hotprefix.server.metrics import Metrics
from hotprefix.server.presence import while_there
from hotprefix.server.resume import CHAT_PATH, Resume
from hotprefix.server.sampling import check_length, requests_for, sampling_params, structured_output
from hotprefix.server.schemas import Chat, Completion, Generation
from hotprefix.server.text import Text

DETAILS_HEADER = "x-cached-tokens-details"


@dataclass(slots=True)
class Service:
    """The server's parts. text: None while the model's tokenizer loads."""

    engine: Engine
    config: ServerConfig
    text: Text | None = None
    gate: Gate = field(default_factory=Gate)
    metrics: Metrics = field(default_factory=Metrics)
    intake: Intake = field(init=False)
    _turns: Turns = field(init=False)

    def __post_init__(self) -> None:
        self.intake = Intake(self.config)
        self._turns = Turns(
            lambda grammar: self.ready()[0].known_grammar(grammar),
            lambda grammar: self.ready()[0].judge_grammar(grammar),
        )

    def ready(self) -> tuple[Text, EngineInfo]:
        """The text side and the engine's description. Raises EngineDead while loading, ApiError 503 while
        draining."""
        if self.gate.draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers={"retry-after": "5"})
        if self.text is None:
            raise EngineDead("the model is loading")
        return self.text, self.engine.info

    def names(self) -> tuple[str, ...]:
        """The names of the model, the one that is shown first. Raises EngineDead before the first load."""
        return self.config.served_names or (self.engine.info.model,)

    def check_model(self, name: str | None) -> str:
        """The name to show. Raises ApiError 404 if no model has the name given."""
        if name is None or name in self.names():
            return name or self.names()[0]
        known = ", ".join(self.names())
        raise ApiError(404, f"the model {name!r} is not here; there is {known}", param="model",
                       code="model_not_found")  # fmt: skip

    async def completion(self, request: Request) -> Response:
        return await self._respond(request, self._completion)

    async def chat(self, request: Request) -> Response:
        return await self._respond(request, self._chat)

    async def resume(self, request: Request) -> Response:
        """Go on with an answer that another engine began (resume.py). 404 without the internal key."""
        require_internal(self.config, request.headers)
        return await self._respond(request, self._resumed)

    async def _respond(
        self, request: Request, prepare: Callable[[Request, Any], tuple[Answer, bool]]
    ) -> Response:
        answer, stream = await self.intake.use(request, lambda value: prepare(request, value))
        structured = answer.requests[0].params.structured
        if structured is not None:
            payer = guard.payer(self.config, request.headers, request.client.host if request.client else "")
            verdict = await while_there(request.receive, self._turns.verdict(payer, structured))
            if verdict.problem is not None:
                raise InputError(verdict.problem, param=answer.grammar_field)
        keepalive_s = self.config.stream_keepalive_s
        return GenerationResponse(
            answer, self.engine, self.gate, self.metrics, sse=stream, keepalive_s=keepalive_s
        )

    def _resumed(self, request: Request, value: Any) -> tuple[Answer, bool]:
        wanted = check(Resume, value)
        count_lists(wanted.body, self.config)
        prepare = self._chat if wanted.path == CHAT_PATH else self._completion
        answer, stream = prepare(request, wanted.body, wanted.head.id)
        if not stream:
            raise InputError("only a stream can be taken up: ask for a whole answer again", param="stream")
        answer.take_up(wanted)
        return answer, stream

    def _completion(self, request: Request, value: Any, name: str | None = None) -> tuple[Answer, bool]:
        """name: the answer's id; None = a new one."""
        body = check(Completion, value)
        text, info = self.ready()
        model = self.check_model(body.model)
        completions.check(body)
        self._check_choices(completions.prompt_count(body), body.n, info)
        prompts = completions.prompts_of(body, text)
        for number, prompt in enumerate(prompts):
            check_length(
                prompt, body.max_tokens, info, "prompt" if len(prompts) == 1 else f"prompt[{number}]"
            )
        echo_logprobs = body.logprobs if body.echo else None
        grammar_field, structured = structured_output(body)
        params = sampling_params(
            body,
            max_tokens=body.max_tokens,
            skip_special_tokens=body.skip_special_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=_larger(body.prompt_logprobs, echo_logprobs),
            structured=structured,
        )
        params.check_vocab(info.vocab_size)
        id_ = f"cmpl-{uuid.uuid4().hex}"
        requests = requests_for(
            prompts,
            body.n,
            params,
            body,
            id_,
            _salt(request, body),
            request.scope[ARRIVED],
            request.headers.get("traceparent"),
        )
        choices = [
            completions.CompletionChoice(
                number, body, text, one.prompt, completions.echoed(body, number // body.n, one.prompt, text)
            )
            for number, one in enumerate(requests)
        ]
        answer = Answer(name or id_, model, "text_completion", "text_completion", requests, choices, body.n)
        answer.grammar_field, answer.ids_in_choice = grammar_field, True
        return self._with_options(answer, request, body), body.stream

    def _chat(self, request: Request, value: Any, name: str | None = None) -> tuple[Answer, bool]:
        """name: see `_completion`."""
        body = check(Chat, value)
        text, info = self.ready()
        model = self.check_model(body.model)
        chat.check(body)
        self._check_choices(1, body.n, info)
        tools = chat.template_tools(body)
        forced = text.forced_calls(tools, body.choice, parallel=body.parallel_tool_calls)
        prompt = chat.rendered(body, text)
        max_tokens = chat.max_tokens(body)
        check_length(prompt, max_tokens, info, "messages")
        grammar_field, structured = structured_output(body, forced)
        params = sampling_params(
            body,
            max_tokens=max_tokens,
            skip_special_tokens=body.skip_special_tokens and not (tools and text.hides_tool_marks),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            structured=structured,
        )
        params.check_vocab(info.vocab_size)
        id_ = f"chatcmpl-{uuid.uuid4().hex}"
        requests = requests_for(
            [prompt],
            body.n,
            params,
            body,
            id_,
            _salt(request, body),
            request.scope[ARRIVED],
            request.headers.get("traceparent"),
        )
        name = name or id_
        choices: Sequence[Choice] = [
            chat.ChatChoice(number, body, text, name, prompt) for number in range(body.n)
        ]
        answer = Answer(name, model, "chat.completion", "chat.completion.chunk", requests, choices, body.n)
        answer.grammar_field = grammar_field
        return self._with_options(answer, request, body), body.stream

    def _check_choices(self, prompts: int, n: int, info: EngineInfo) -> None:
        """Raises InputError if there are too many choices. There are too many also if the engine does not
        take so many at a time, because waiting would not help them."""
        limit, option = self.config.max_choices, "--max-choices"
        if info.max_requests is not None and info.max_requests < limit:
            limit, option = info.max_requests, "--max-running and --max-waiting together"
        if n < 1 or n * prompts > limit:
            times = f" for {prompts} prompts" if prompts > 1 else ""
            raise InputError(
                f"n={n}{times}: give 1 to {limit} choices in one request ({option}), all prompts together",
                param="n",
            )

    def _with_options(self, answer: Answer, request: Request, body: Generation) -> Answer:
        """The answer with its options. Raises InputError if options of streams are given and the answer is
        not streamed."""
        if body.stream_options is not None:
            if not body.stream:
                raise InputError("stream_options needs stream true", param="stream_options")
            answer.usage_in_stream = body.stream_options.include_usage
            answer.usage_in_chunks = answer.usage_in_stream and body.stream_options.continuous_usage_stats
        header = request.headers.get(DETAILS_HEADER, "").lower() in ("1", "true")
        answer.by_source = body.return_cached_tokens_details or header
        answer.token_ids = body.return_token_ids
        answer.marked = is_internal(self.config, request.headers)
        return answer


def _salt(request: Request, body: Generation) -> str | None:
    return salt(request.scope.get(TENANT), body.cache_salt)


def _larger(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)
