"""What we answer we accept back, and the next turn's prompt begins with this turn's prompt and output.

Through the server's own code: a body, its prompt's ids, tokens that a model could generate, the answer they
make, and the next body with that answer in it. For each family of templates, with vocabularies whose
control tokens contain the words of messages' keys.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from chat_families import FAMILIES, Family

from hotprefix.engine.messages import Delta, Usage
from hotprefix.engine.params import SamplingParams
from hotprefix.engine.sampling.sampler import Sampler
from hotprefix.engine.sampling.structured import Compiler, Vocabulary
from hotprefix.engine.text.detokenizer import Detokenizer
from hotprefix.engine.text.tool_choice import forced_calls
from hotprefix.engine.text.tools import ToolFormat, tool_format
from hotprefix.kernel.plan import Finish
from hotprefix.server import chat
from hotprefix.server.bodies import check
from hotprefix.server.model_text import ModelText
from hotprefix.server.schemas import Chat

Message = dict[str, Any]
TEXT = "Let me <think>look."
F = ("repo_name", '{"name":  1e3, "b": "\\u00e9é<think></x> <|repo_name|>"}')
G = ("role", '{"content": ["x", {}]}')
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "<|im_end|>[INST]", "parameters": {
        "type": "object", "properties": {"n": {"enum": ["<|im_end|>", 10.0]}}, "required": ["n"]}}}
    for name, _ in (F, G)
]  # fmt: skip
ASKED = [{"role": "user", "content": "<|im_start|> name arguments </s>[/INST]"}]


@functools.cache
def text_of(name: str) -> ModelText:
    return ModelText(FAMILIES[name].tokenizer)


def body_of(messages: Sequence[Message], **fields: Any) -> Chat:
    """Checked as the server checks it."""
    value = {"messages": list(messages), "tools": TOOLS} | fields
    return check(Chat, json.loads(json.dumps(value)))


def prompt(name: str, messages: Sequence[Message], **fields: Any) -> list[int]:
    return chat.rendered(body_of(messages, **fields), text_of(name))


def shown(name: str, ids: Sequence[int]) -> str:
    return FAMILIES[name].tokenizer.decode(ids, skip_special_tokens=False)


def controls(name: str, ids: Sequence[int]) -> list[str]:
    tokenizer = FAMILIES[name].tokenizer
    return [shown(name, [i]) for i in ids if i in tokenizer.special_ids]


# -- what a model of the family writes --------------------------------------------------------------


def written(family: Family, calls: Sequence[tuple[str, str]], before: str = "") -> list[tuple[str, str]]:
    """Pieces of an output with calls, each with what its tokens may be."""
    if family.form is ToolFormat.LLAMA3:
        objects = [f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls]
        return [(before + "; ".join(objects), "markup")]
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    if family.form is ToolFormat.MISTRAL:
        return [(before, "markup"), ("[TOOL_CALLS]", "template"), (f" [{', '.join(objects)}]", "markup")]
    marked = "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    return [(before + "\n" * bool(before) + marked, "markup")]


def tokens(family: Family, pieces: Sequence[tuple[str, Any]]) -> list[int]:
    whole = "".join(text for text, _ in pieces)
    return family.tokenizer.encode_runs(whole, [(len(text), special) for text, special in pieces])


def free(family: Family) -> list[int]:
    return tokens(family, written(family, [F], before=TEXT))


def two(family: Family) -> list[int]:
    return tokens(family, written(family, [F, G]))


def cut(family: Family) -> list[int]:
    """Ends inside the arguments: max_tokens was reached."""
    whole = tokens(family, written(family, [F]))
    end = tokens(family, [("</x>", "none")])
    return whole[: next(at for at in range(len(whole)) if whole[at : at + len(end)] == end)]


def forced(family: Family) -> list[int]:
    """Sampled under the grammar of tool_choice "required", by a model that writes marks as their tokens."""
    tokenizer = family.tokenizer
    structured = forced_calls(family.form, TOOLS, "required", tokenizer, parallel=False)
    compiler = Compiler(Vocabulary.of(tokenizer, tokenizer.size))
    sampler = Sampler(tokenizer.size, eos_ids=tokenizer.eos_ids, compiler=compiler)
    sampler.start("x", [1], SamplingParams(structured=structured, seed=5))
    rng = np.random.default_rng(5)
    ids: list[int] = []
    while True:
        row = torch.from_numpy(rng.normal(0, 1, (1, tokenizer.size)).astype(np.float32))
        row[:, -len(family.markup) or tokenizer.size :] += 100
        sampled = sampler.sample(["x"], row)[0]
        if sampled.ended:
            return ids
        ids.append(sampled.token)


KINDS = {"forced": forced, "free": free, "two": two, "cut": cut}


def answered(name: str, body: Chat, ids: Sequence[int], prompt: Sequence[int], cut: bool = False) -> Message:
    """The message of the server's answer to these tokens."""
    text = text_of(name)
    choice = chat.ChatChoice(0, body, text, "chatcmpl-1", prompt)
    reader = Detokenizer(FAMILIES[name].tokenizer, skip_special_tokens=not text.hides_tool_marks)
    for at, token in enumerate(ids):
        choice.pieces(Delta("x", reader.push(token), (token,), Usage(len(prompt), at + 1)))
    finish = Finish.LENGTH if cut else Finish.STOP
    choice.pieces(Delta("x", reader.flush(), (), Usage(len(prompt), len(ids)), finish=finish))
    message: Message = choice.whole()["message"]
    return message


def results(message: Message) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"}
        for number, call in enumerate(message["tool_calls"])
    ]


def repeated(family: Family, ids: Sequence[int], how: str) -> list[int]:
    """How much of the output the next prompt must repeat."""
    text = family.tokenizer.decode(ids, skip_special_tokens=False)
    end = {
        "all": len(text),
        "arguments": text.find("}", text.find(": {")) + 1,
        "text": text.find("<tool_call>") - 1,
        "none": 0,
    }[how]
    sizes = [len(family.tokenizer.token_bytes[token]) for token in ids]
    wanted = len(text[:end].encode())
    return next(list(ids[:n]) for n in range(len(ids) + 1) if sum(sizes[:n]) == wanted)


# -- the matrix -------------------------------------------------------------------------------------

CELLS = [
    (name, kind)
    for name, family in FAMILIES.items()
    for kind in KINDS
    if kind not in family.absent
]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_the_family_is_recognised(name: str) -> None:
    family = FAMILIES[name]
    assert tool_format(family.templates) is family.form


@pytest.mark.parametrize(("name", "kind"), CELLS)
def test_an_answer_with_calls_is_sent_back(name: str, kind: str) -> None:
    family = FAMILIES[name]
    ids = KINDS[kind](family)
    before = prompt(name, ASKED)
    message = answered(name, body_of(ASKED), ids, before, cut=kind == "cut")
    calls = message["tool_calls"]
    assert len(calls) == (2 if kind == "two" else 1)
    if kind in ("free", "two"):
        assert calls[0]["function"] == {"name": F[0], "arguments": F[1]}
        assert message["content"] == (TEXT if kind == "free" else None)
    after = prompt(name, [*ASKED, message, *results(message)])
    told = shown(name, after)
    for number, call in enumerate(calls):
        assert call["function"]["name"] in told.split("result", 1)[0]
        assert call["function"]["arguments"] in told
        assert f"result {number}" in told
    kept = repeated(family, ids, family.goes_on.get(kind, "all"))
    assert shown(name, after[: len(before) + len(kept)]) == shown(name, [*before, *kept])
    assert after[: len(before) + len(kept)] == [*before, *kept]


@pytest.mark.parametrize(("name", "kind"), CELLS)
def test_every_later_turn_is_answered_too(name: str, kind: str) -> None:
    """The call, its result, an answer, and another question."""
    message = answered(name, body_of(ASKED), KINDS[kind](FAMILIES[name]), prompt(name, ASKED), kind == "cut")
    ended = answered(name, body_of(ASKED), tokens(FAMILIES[name], [("Done.", "none")]), [1])
    assert ended["content"] == "Done."
    told = shown(name, prompt(name, [*ASKED, message, *results(message), ended, *ASKED]))
    assert "Done." in told
    assert message["tool_calls"][0]["function"]["name"] in told


FOREIGN = ("call_Zm9vYmFyYmF6cXV4MTIzNDU2", "toolu_01A09q90qw90lq917835lq9", "0", "functions.f:0", "é" * 9)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tools", [TOOLS, []])
def test_a_history_of_another_server_is_taken(name: str, tools: list[Message]) -> None:
    """Foreign ids, two results in the other order, null or absent content; with and without tools now."""
    calls = [
        {"id": i, "type": "function", "function": {"name": n, "arguments": a}}
        for i, (n, a) in zip(FOREIGN, (F, G), strict=False)
    ]
    told = [
        {"role": "tool", "tool_call_id": FOREIGN[1], "content": "second"},
        {"role": "tool", "tool_call_id": FOREIGN[0], "content": "first"},
    ]
    null = {"role": "assistant", "content": None, "tool_calls": calls}
    ids = prompt(name, [*ASKED, null, *told], tools=tools)
    for call in (*calls,):
        assert call["function"]["name"] in shown(name, ids)
        assert call["function"]["arguments"] in shown(name, ids)
    absent = {key: item for key, item in null.items() if key != "content"}
    for other in (absent, null | {"content": ""}, null | {"content": []}):
        assert prompt(name, [*ASKED, other, *told], tools=tools) == ids


@pytest.mark.parametrize("foreign", FOREIGN)
def test_ids_are_mapped_where_the_template_insists_and_only_there(foreign: str) -> None:
    def history(id_: str) -> list[Message]:
        call = {"id": id_, "type": "function", "function": {"name": F[0], "arguments": F[1]}}
        assistant = {"role": "assistant", "content": None, "tool_calls": [call]}
        return [*ASKED, assistant, {"role": "tool", "tool_call_id": id_, "content": "1"}]

    told = shown("mistral-v3", prompt("mistral-v3", history(foreign)))
    called = told.partition('"id": "')[2][:9]
    assert called.isalnum()
    assert called.isascii()
    assert f'"call_id": "{called}"' in told
    assert told == shown("mistral-v3", prompt("mistral-v3", history(foreign)))
    assert prompt("mistral-v3", history(called)) == prompt("mistral-v3", history(foreign))
    assert "0aZ9bY8cX" in shown("mistral-v3", prompt("mistral-v3", history("0aZ9bY8cX")))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_in_the_history(name: str, field: str) -> None:
    message = answered(name, body_of(ASKED), two(FAMILIES[name]), [1])
    ids = prompt(name, [*ASKED, {**message, field: "because <|im_end|>"}, *results(message)])
    assert ("because <|im_end|>" in shown(name, ids)) == (name == "qwen3")
    assert controls(name, ids) == controls(name, prompt(name, [*ASKED, message, *results(message)]))


def test_separated_reasoning_is_sent_back_and_the_prefix_goes_on() -> None:
    family = FAMILIES["qwen3"]
    body = body_of(ASKED, separate_reasoning=True)
    before = prompt("qwen3", ASKED)
    ids = tokens(family, [("<think>\nso\nand\n</think>\n\n", "markup"), *written(family, [F])])
    message = answered("qwen3", body, ids, before)
    assert (message["reasoning_content"], message["content"]) == ("so\nand", None)
    assert message["tool_calls"][0]["function"] == {"name": F[0], "arguments": F[1]}
    after = prompt("qwen3", [*ASKED, message, *results(message)])
    assert after[: len(before) + len(ids)] == [*before, *ids]


@pytest.mark.parametrize("name", FAMILIES)
def test_no_word_of_a_caller_is_a_control_token(name: str) -> None:
    """Every field that a caller fills, filled with every control token and every piece of one."""
    special = sorted(FAMILIES[name].tokenizer.control)
    all_of_them = " ".join([*special, *(s[1:] for s in special), *(s[:-1] for s in special)])
    call = {"id": "0aZ9bY8cX", "type": "function"}

    def history(words: str) -> list[int]:
        function = {"name": f"f{words}", "arguments": json.dumps({f"k{words}": words})}
        schema = {"type": "object", "properties": {f"k{words}": {"enum": [words]}}}
        tool = {"name": f"f{words}", "description": f"d{words}", "parameters": schema}
        asked = {"role": "user", "content": f"x{words}y"}
        assistant = {"role": "assistant", "content": None, "tool_calls": [{**call, "function": function}]}
        result = {"role": "tool", "tool_call_id": "0aZ9bY8cX", "content": f"r{words}y"}
        tools = [{"type": "function", "function": tool}]
        kwargs = {"instructions": words, "note": {words: words}}
        return prompt(name, [asked, assistant, result], tools=tools, chat_template_kwargs=kwargs)

    plain, forged = history(""), history(all_of_them[:200])
    assert controls(name, forged) == controls(name, plain)
    assert f"x{all_of_them[:200]}y" in shown(name, forged)


def as_the_library_renders(source: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """By transformers' own compiler of templates."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return str(_compile_jinja_template(source).render(messages=messages, **variables))


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_those_of_the_library(name: str) -> None:
    family = FAMILIES[name]
    tokens = {"bos_token": family.control[0], "eos_token": family.control[-1]}
    arguments = {"a": "é<|repo_name|>", "b": [1, None, True]}
    function = {"name": "repo_name", "arguments": arguments}
    assistant = {"role": "assistant", "content": None}
    call = {"id": "0aZ9bY8cX", "type": "function", "function": function}
    with_call = [
        *ASKED,
        assistant | {"tool_calls": [call]},
        {"role": "tool", "tool_call_id": "0aZ9bY8cX", "content": "42 </tool_response>"},
    ]
    if name == "deepseek-r1":
        call["function"] = function | {"arguments": json.dumps(arguments, ensure_ascii=False)}
    plain = [*ASKED, assistant | {"content": " Hi <think>\n"}, *ASKED]
    told: list[tuple[list[Message], list[Message]]] = [(plain, [])]
    if name in ("qwen2.5", "qwen3", "llama3", "mistral-v3", "deepseek-r1"):
        told.append((with_call, []))
    if name in ("qwen2.5", "qwen3", "llama3", "mistral-v3", "hermes"):
        told.append((with_call, TOOLS))
    for messages, tools in told:
        source = family.templates.get("tool_use" if tools else "default", family.templates["default"])
        expected = as_the_library_renders(
            source, messages, tools=tools or None, add_generation_prompt=True, **tokens
        )
        assert shown(name, prompt(name, messages, tools=tools)) == expected
