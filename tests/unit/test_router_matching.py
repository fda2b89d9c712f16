"""The router's keys are the engine's: for a matrix of bodies the keys that a real server's requests would
have in a real engine's cache."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest
from chat_families import FAMILIES
from text_models import CHATML, default_tokenizer, metadata

from hotprefix.engine.messages import EngineInfo, Generate
from hotprefix.engine.text.source import from_metadata
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.cache.keys import chain, root_key
from hotprefix.kernel.request import Namespace
from hotprefix.records.kvevents import block_hash
from hotprefix.router import key_memory, matching
from hotprefix.router.key_memory import STRIDE, ChainedKeys
from hotprefix.router.matching import CHAT, COMPLETION, ExactMatcher, ModelReader
from hotprefix.router.prompt import Prompt
from hotprefix.router.token_memory import RememberingTokenizer
from hotprefix.server.app import create_app
from hotprefix.server.config import ServerConfig
from hotprefix.server.guard import tenant
from hotprefix.server.model_text import ModelText
from tests.support.server import FakeEngine

PAGE, MODEL = 4, "fp"
LONG = "The cat sat on the mat, and then it slept.\n" * 12
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather", "description": "of a <|im_end|> place", "strict": None,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": []},
        },
    }
]  # fmt: skip
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":  "Rome"}'}}


def user(text: Any = "What is a prefix cache?") -> dict[str, Any]:
    return {"role": "user", "content": text}


TURNS = [
    {"role": "system", "content": "You are terse. <|im_start|>"}, user(),
    {"role": "assistant", "content": "A tree."}, user(LONG),
]  # fmt: skip
CHATS: dict[str, dict[str, Any]] = {
    "one": {"messages": [user()]},
    "system and turns": {"messages": TURNS},
    "developer": {"messages": [{"role": "developer", "content": "Be kind."}, user()]},
    "parts": {"messages": [user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])]},
    "tools": {"messages": [user()], "tools": TOOLS, "tool_choice": "auto"},
    "no tool choice": {"messages": [user()], "tools": TOOLS, "tool_choice": "none"},
    "called": {
        "messages": [
            user(), {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"}, user("And?"),
        ],
        "tools": TOOLS,
    },
    "reasoning": {
        "messages": [
            user(), {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm, <think>"}, user("So?"),
        ],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "reasoning by its other name": {
        "messages": [user(), {"role": "assistant", "content": "Yes.", "reasoning": "Hm"}, user("Why?")]
    },
    "refusal": {"messages": [user(), {"role": "assistant", "refusal": "No."}, user("Why?")]},
    "no generation prompt": {"messages": [user()], "add_generation_prompt": False},
    "salt": {"messages": [user()], "cache_salt": "mine"},
    "options": {
        "messages": [user()], "n": 2, "max_completion_tokens": 5, "stream": True, "temperature": 0.5,
        "user": "me", "stop": "x", "response_format": {"type": "json_object"},
    },
    "emoji and marks": {"messages": [user("naïve 🙂 e\u0301 世界\r\n\n\n  x")]},
}  # fmt: skip
COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": LONG},
    "control tokens in a text": {"prompt": "<|im_start|>user\nHi<|im_end|>\n"},
    "no special tokens": {"prompt": LONG, "add_special_tokens": False},
    "ids": {"prompt": list(range(100, 140))},
    "echo": {"prompt": LONG, "echo": True, "max_tokens": 0},
    "salt": {"prompt": LONG, "cache_salt": "mine"},
    "list of one text": {"prompt": [LONG]},
    "list of one id list": {"prompt": [list(range(100, 140))]},
}


class Otherwise:
    """Counts what no reader can read."""

    def __init__(self) -> None:
        self.asked = 0

    async def read(self, path: str, body: bytes, headers: Mapping[str, str], tenant: str | None) -> Prompt:
        self.asked += 1
        return Prompt()


def text_of(name: str) -> tuple[ModelText, ModelReader]:
    """The server's text side, and a reader of its own over the same files."""
    tokenizer = default_tokenizer() if name == "default" else FAMILIES[name].tokenizer
    remembering = RememberingTokenizer(tokenizer._source)
    remembering.templates = tokenizer.templates
    return ModelText(tokenizer), ModelReader(ModelText(remembering), PAGE, MODEL, remembering)


texts = functools.cache(text_of)


def matcher(name: str = "default") -> tuple[ExactMatcher, Otherwise]:
    otherwise = Otherwise()
    reader = texts(name)[1]
    return ExactMatcher(lambda model: None if model == "another" else reader, otherwise), otherwise


def engine() -> FakeEngine:
    made = FakeEngine()
    made.info = EngineInfo("m", 100_000, 200_000, PAGE, 100_000)
    return made


def engine_keys(request: Generate) -> tuple[int, ...]:
    """As the engine names the prompt's pages in its KV events."""
    state = root_key(Namespace(MODEL, None, None, request.salt), PAGE)
    return tuple(map(block_hash, chain(state, tk.encode(request.prompt), PAGE)))


async def submitted(
    name: str, path: str, body: dict[str, Any], config: ServerConfig, headers: Mapping[str, str]
) -> list[Generate]:
    """What the real server makes of a body; nothing if it refuses it."""
    behind = engine()
    transport = httpx.ASGITransport(create_app(behind, config, texts(name)[0]), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        answer = await http.post(path, json=body, headers=headers)
    assert bool(behind.seen) is (answer.status_code != 400), answer.text
    return behind.seen


async def same(name: str, path: str, body: dict[str, Any], key: str | None = None) -> Prompt:
    """The router's prompt, which is the server's."""
    config, headers, owner = ServerConfig(), {}, None
    if key is not None:
        config = replace(config, key_digests=ServerConfig.digests([key]), isolate_keys=True)
        headers, owner = {"authorization": f"Bearer {key}"}, tenant(key.encode())
    requests = await submitted(name, path, body, config, headers)
    reads, otherwise = matcher(name)
    assert requests
    for _ in range(2):  # cold, and from memory
        prompt = await reads.read(path, json.dumps(body).encode(), headers, owner)
        assert prompt.keys == engine_keys(requests[0])
        assert prompt.tokens == len(requests[0].prompt)
        assert prompt.exact
    assert otherwise.asked == 0
    assert len(requests) == prompt.choices
    return prompt


@pytest.mark.parametrize("body", CHATS.values(), ids=CHATS.keys())
async def test_a_chat_s_keys_are_the_engine_s(body: dict[str, Any]) -> None:
    assert (await same("default", CHAT, body)).keys


@pytest.mark.parametrize("body", COMPLETIONS.values(), ids=COMPLETIONS.keys())
async def test_a_completion_s_keys_are_the_engine_s(body: dict[str, Any]) -> None:
    assert (await same("default", COMPLETION, body)).keys


@pytest.mark.parametrize("name", FAMILIES)
async def test_each_family_of_templates(name: str) -> None:
    """What the family's template refuses, the other matcher reads."""
    taken = 0
    for case in ("one", "system and turns", "called", "reasoning", "parts", "no generation prompt"):
        requests = await submitted(name, CHAT, CHATS[case], ServerConfig(), {})
        reads, otherwise = matcher(name)
        prompt = await reads.read(CHAT, json.dumps(CHATS[case]).encode(), {}, None)
        assert prompt.keys == (engine_keys(requests[0]) if requests else ())
        assert otherwise.asked == (not requests)
        taken += bool(prompt.keys)
    assert taken >= 4


@pytest.mark.parametrize("special", [True, False])
async def test_a_text_of_a_model_that_wants_a_bos(special: bool) -> None:
    source = metadata(CHATML, pre="gpt-2", ggml__add_bos_token=True)
    tokenizer = RememberingTokenizer(from_metadata(source))
    text = ModelText(Tokenizer(from_metadata(source)))
    reads = ExactMatcher(lambda model: ModelReader(ModelText(tokenizer), PAGE, MODEL, tokenizer), Otherwise())
    body = {"prompt": LONG, "add_special_tokens": special}
    prompt = await reads.read(COMPLETION, json.dumps(body).encode(), {}, None)
    assert prompt.tokens == len(LONG) + special == len(text.encode(LONG, add_special_tokens=special))


async def test_a_tenant_s_prefixes_are_apart() -> None:
    keys = {
        (await same("default", CHAT, {**CHATS["one"], **more}, key)).keys[0]
        for key in (None, "sk-1", "sk-2")
        for more in ({}, {"cache_salt": "x"})
    }
    assert len(keys) == 6


async def test_of_several_prompts_the_longest_gives_the_keys_and_shared_pages_count_once() -> None:
    prompts = [list(range(100, 110)), list(range(100, 130)), list(range(200, 212))]
    requests = await submitted("default", COMPLETION, {"prompt": prompts}, ServerConfig(), {})
    prompt = await matcher()[0].read(COMPLETION, json.dumps({"prompt": prompts}).encode(), {}, None)
    assert prompt.keys == engine_keys(requests[1])
    assert prompt.tokens == 10 + 30 + 12 - 2 * PAGE
    mixed = {"prompt": ["Hello there", LONG, "Hello there"]}
    requests = await submitted("default", COMPLETION, mixed, ServerConfig(), {})
    prompt = await matcher()[0].read(COMPLETION, json.dumps(mixed).encode(), {}, None)
    assert prompt.keys == engine_keys(requests[1])
    assert prompt.tokens == sum(len(r.prompt) for r in requests) - len(engine_keys(requests[0])) * PAGE


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 2}, {"prompt_logprobs": 0, "logprobs": 1}]
)
async def test_a_prompt_whose_logprobs_are_wanted_is_computed_as_a_whole(fields: dict[str, Any]) -> None:
    body = {"prompt": LONG, **fields}
    requests = await submitted("default", COMPLETION, body, ServerConfig(), {})
    assert requests[0].params.prompt_logprobs is not None
    prompt = await matcher()[0].read(COMPLETION, json.dumps(body).encode(), {}, None)
    assert (prompt.keys, prompt.tokens, prompt.exact) == ((), len(requests[0].prompt), True)


async def test_fields_of_other_servers_do_no_harm() -> None:
    reads, otherwise = matcher()
    plain = await reads.read(CHAT, json.dumps(CHATS["one"]).encode(), {}, None)
    more = {**CHATS["one"], "mm_processor_kwargs": {}, "top_k": "x", "n": None, "unknown": [1]}
    assert await reads.read(CHAT, json.dumps(more).encode(), {}, None) == plain
    assert otherwise.asked == 0


async def test_what_else_a_choice_needs() -> None:
    body = {
        "messages": [user()], "model": "m", "max_tokens": 7, "n": 3, "stream": True, "user": "u",
        "session_id": "s", "prompt_cache_key": "p",
    }  # fmt: skip

    async def read(headers: Mapping[str, str] | None = None, **change: Any) -> Prompt:
        value = {key: item for key, item in {**body, **change}.items() if item is not None}
        return await matcher()[0].read(CHAT, json.dumps(value).encode(), headers or {}, None)

    whole = await read()
    assert whole[2:] == (7, "m", "s", True, 3, True)
    assert (await read({"x-session-id": "h"})).session == "h"
    assert (await read(session_id=None)).session == "p"
    assert (await read(session_id=5, prompt_cache_key=None)).session == "u"
    assert (await read(max_completion_tokens=9)).outputs == 9
    assert (await read(max_tokens=None)).outputs == 256
    assert (await read(n="x", max_tokens=-1, stream=1))[2:] == (256, "m", "s", False, 1, True)


ILL: dict[str, tuple[str, bytes]] = {
    "no JSON": (CHAT, b"{"),
    "not UTF-8": (CHAT, b'{"messages":"\xff"}'),
    "a list": (CHAT, b"[1]"),
    "nothing": (CHAT, b""),
    "no messages": (CHAT, b"{}"),
    "messages of another type": (CHAT, b'{"messages": 5}'),
    "a role that is none": (CHAT, b'{"messages": [{"role": "x", "content": "y"}]}'),
    "an image": (CHAT, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}'),
    "nested deeply": (CHAT, b'{"messages": ' + b"[" * 100_000),
    "kwargs that break the template": (
        CHAT, b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": 1}}'
    ),
    "no prompt": (COMPLETION, b"{}"),
    "prompt of another type": (COMPLETION, b'{"prompt": {"a": 1}}'),
    "an empty list": (COMPLETION, b'{"prompt": []}'),
    "ids that do not fit": (COMPLETION, b'{"prompt": [99999999999999999999]}'),
    "ids that do not fit 32 bits": (COMPLETION, b'{"prompt": [4294967296]}'),
    "ids and texts": (COMPLETION, b'{"prompt": [1, "x"]}'),
    "another path": ("/v1/embeddings", b'{"input": "x"}'),
    "another model": (CHAT, json.dumps({**CHATS["one"], "model": "another"}).encode()),
    "too many values": (COMPLETION, b'{"prompt": [' + b"1," * (1 << 20) + b"1]}"),
}  # fmt: skip


@pytest.mark.parametrize(("path", "body"), ILL.values(), ids=ILL.keys())
async def test_what_cannot_be_read_goes_to_the_other_matcher(
    path: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reads, otherwise = matcher()
    assert await reads.read(path, body, {}, None) == Prompt()
    assert otherwise.asked == 1
    assert not caplog.records, "it is no fault of the router"


async def test_a_fault_is_logged_and_the_request_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    otherwise = Otherwise()
    reads = ExactMatcher(lambda model: 5, otherwise)  # type: ignore[arg-type, return-value]
    assert await reads.read(CHAT, json.dumps(CHATS["one"]).encode(), {}, None) == Prompt()
    assert otherwise.asked == 1
    assert "a fault of the router" in caplog.text


async def test_what_is_new_and_long_is_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "INLINE_NEW", 1000)
    monkeypatch.setattr(matching, "INLINE_MESSAGES", 20)
    reader = text_of("default")[1]
    threads: list[str] = []
    read = reader.read

    def watched(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read(*args, **options)

    monkeypatch.setattr(reader, "read", watched)
    reads = ExactMatcher(lambda model: reader, Otherwise())

    async def where(body: dict[str, Any]) -> list[str]:
        threads.clear()
        await reads.read(CHAT, json.dumps(body).encode(), {}, None)
        return [name.split("_")[0] for name in threads if name != "MainThread"]

    long = {"messages": [user(LONG * 9)]}
    assert await where(CHATS["one"]) == []
    assert await where(long) == ["prompts"]
    assert await where(long) == [], "it is known now"
    assert (
        await where({"messages": [*long["messages"], {"role": "assistant", "content": "So."}, user()]}) == []
    )
    assert await where({"messages": [user("x")] * 21}) == ["prompts"]
    assert await where({"messages": [user("y " * 200_000)]}) == ["prompts"]
    assert await where({"messages": [user("z " * 600_000)]}) == ["large-prompts"]
    reads.close()


async def test_prompts_that_are_read_at_once_are_read_right() -> None:
    reads, _ = matcher()
    bodies = [json.dumps({"messages": [user(LONG * 40 + str(i % 3))]}).encode() for i in range(9)]
    found = await asyncio.gather(*(reads.read(CHAT, body, {}, None) for body in bodies))
    assert len({prompt.keys for prompt in found}) == 3
    assert [prompt.keys for prompt in found[:3]] == [prompt.keys for prompt in found[3:6]]


async def test_too_long_texts_are_not_tokenized() -> None:
    tokenizer = RememberingTokenizer(default_tokenizer()._source)
    text = ModelText(tokenizer)
    text.bound(100)
    otherwise = Otherwise()
    reads = ExactMatcher(lambda model: ModelReader(text, PAGE, MODEL, tokenizer), otherwise)
    body = json.dumps({"messages": [user("word " * 300_000)]}).encode()
    assert await reads.read(CHAT, body, {}, None) == Prompt()
    assert otherwise.asked == 1
    assert len(tokenizer._known) == 0


async def test_a_model_that_is_an_adapter_has_keys_of_its_own() -> None:
    text = texts("default")[0]
    reader = ModelReader(text, PAGE, MODEL, None, frozenset({"tuned"}))
    reads = ExactMatcher(lambda model: reader, Otherwise())
    body = {"prompt": list(range(100, 140))}
    plain, tuned = [
        await reads.read(COMPLETION, json.dumps({**body, "model": model}).encode(), {}, None)
        for model in ("m", "tuned")
    ]
    state = root_key(Namespace(MODEL, "tuned"), PAGE)
    assert tuned.keys == tuple(map(block_hash, chain(state, tk.encode(body["prompt"]), PAGE)))
    assert plain.keys != tuned.keys


@pytest.mark.parametrize("count", [0, 1, STRIDE - 1, STRIDE, STRIDE + 1, 3 * STRIDE])
def test_keys_from_memory_are_the_chain_s(count: int) -> None:
    memory, ids = ChainedKeys(PAGE), list(range(count * PAGE + 3))
    for salt in (None, "x"):
        state = root_key(Namespace(MODEL, salt=salt), PAGE)
        expected = tuple(map(block_hash, chain(state, tk.encode(ids), PAGE)))
        assert len(expected) == count
        for _ in range(2):
            assert memory.keys(state, tk.encode(ids)) == expected
        other = [*ids[: len(ids) // 2], 7, *ids[len(ids) // 2 :]]
        assert memory.keys(state, tk.encode(other)) == tuple(
            map(block_hash, chain(state, tk.encode(other), PAGE))
        )


def test_keys_of_what_was_seen_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = 0

    def counted(state: bytes, tokens: bytes, page_size: int) -> list[bytes]:
        nonlocal computed
        found = chain(state, tokens, page_size)
        computed += len(found)
        return found

    monkeypatch.setattr(key_memory, "chain", counted)
    memory, state = ChainedKeys(PAGE), root_key(Namespace(MODEL), PAGE)
    ids = tk.encode(range(PAGE * STRIDE * 4))
    memory.keys(state, ids)
    assert computed == STRIDE * 4
    memory.keys(state, ids + tk.encode(range(PAGE)))
    assert computed == STRIDE * 4 + 1
