"""What requests may hold. Owns: the pydantic models of every body, and which fields are refused.

Rules: an explicit null is the same as an absent field, everywhere. Types are strict: true is not 1, and "1"
is not 1. Each field is of one of four kinds: supported; harmless (`HARMLESS`: it changes no answer of this
server); neutral at one value (`NEUTRAL`: that value asks for what happens anyway); or refused by name. Ranges
of sampling fields are in `engine.params`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hotprefix.errors import InputError

HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prediction", "request_id",
    }
)  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "suffix": ("",),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "include_reasoning": (True,),
    "separate_reasoning": (False,),
    "stream_reasoning": (True,),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "no_stop_trim": (False,),
    "logits_processors": ([],),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "functions": ([],),
    "function_call": ("none",),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
}


MAX_FIELDS = 1000  # each unknown field becomes an error of its own


class Body(BaseModel):
    """The base of every model here: strict, closed, nulls dropped.

    harmless: fields that are ignored.
    neutral: fields that are accepted at these values.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    harmless: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise InputError(f"an object has {len(data)} fields: at most {MAX_FIELDS} are looked at")
        kept = {}
        for name, value in data.items():
            if value is None or name in cls.harmless:
                continue
            if name in cls.neutral and name not in cls.model_fields:
                _neutral(name, value)
                continue
            kept[name] = value
        return kept


def _neutral(name: str, value: Any) -> None:
    allowed = NEUTRAL[name]
    if not any(value == one and type(value) is type(one) for one in allowed):
        only = f"; only {', '.join(map(repr, allowed))} is accepted" if allowed else ""
        raise InputError(f"{name} is not supported{only}", param=name, code="unsupported_parameter")


class StreamOptions(Body):
    """include_obfuscation: asks for padding against traffic analysis, which is never added."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class JsonSchema(Body):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    pattern: str | None = None
    grammar: str | None = None


class StructuredOutputs(Body):
    """Exactly one of the fields is given."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Model(Body):
    """A body that may name the model."""

    harmless = HARMLESS
    neutral = NEUTRAL
    model: str | None = None


class Generation(Model):
    """Fields that chat and text completions share."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    prompt_logprobs: int | None = None
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=4096)
    session_id: str | None = Field(default=None, min_length=1, max_length=256)
    session_hold_s: float = Field(default=30.0, gt=0, le=3600)
    return_cached_tokens_details: bool = False
    return_token_ids: bool = False


class Completion(Generation):
    """POST /v1/completions. `prompt` is checked in `completions.prompts_of`, because pydantic's errors about
    unions of lists name neither the prompt nor the token."""

    prompt: Any
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True


class TextPart(Body):
    harmless = frozenset({"annotations", "cache_control", "citations", "id"})
    type: Literal["text"]
    text: str


Parts = str | list[TextPart]


class Function(Body):
    harmless = frozenset({"cache_control"})
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    harmless = frozenset({"cache_control"})
    type: Literal["function"] = "function"
    function: Function


class CalledFunction(Body):
    """arguments: any text, since an answer may have been cut inside them. An object is accepted, too."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Body):
    harmless = frozenset({"cache_control", "extra_content", "index", "provider_specific_fields"})
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message of a conversation. Fields that answers and client libraries add are accepted: those that
    say something to the model stand here, the others are `harmless`. What a message must have is checked when
    it is rendered (`engine.text.chat_messages`)."""

    harmless = frozenset(
        {
            "annotations", "cache_control", "citations", "created_at", "id", "metadata",
            "provider_specific_fields", "reasoning_details", "status", "thinking_blocks", "timestamp",
            "weight",
        }
    )  # fmt: skip
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Parts | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class Conversation(Model):
    """The fields that the chat template renders."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] = []
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None


class Chat(Conversation, Generation):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    separate_reasoning: bool = False

    @property
    def choice(self) -> str:
        """ "none", "auto", "required" or "name:FUNCTION"."""
        if isinstance(self.tool_choice, NamedTool):
            return f"name:{self.tool_choice.function.name}"
        return self.tool_choice or ("auto" if self.tools else "none")


class TokenizeText(Model):
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(Conversation):
    return_token_strs: bool = False


class Detokenize(Model):
    tokens: list[int]
    skip_special_tokens: bool = False
