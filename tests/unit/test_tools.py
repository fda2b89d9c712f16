"""Tool calls: read from any cut of the text, arguments byte for byte, nothing lost; forced by grammar."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from text_models import CHATML, default_tokenizer, toy

from hotprefix.engine.params import SamplingParams
from hotprefix.engine.sampling.sampler import Sampler
from hotprefix.engine.sampling.structured import Compiler, Vocabulary
from hotprefix.engine.text.template import ChatTemplate
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.engine.text.tool_choice import forced_calls, shows_markers
from hotprefix.engine.text.tools import OPENERS, ToolFormat, ToolParser, tool_format
from hotprefix.errors import InputError

HERMES, LLAMA3, MISTRAL = ToolFormat
Calls = list[tuple[str, str]]


def read(form: ToolFormat, parts: Sequence[str]) -> tuple[str, Calls]:
    parser = ToolParser(form, ["f", "g"])
    content, calls = "", dict[int, list[str]]()
    for output in [*map(parser.push, parts), parser.flush()]:
        content += output.content
        for piece in output.calls:
            if piece.name is not None:
                assert piece.index == len(calls)
                calls[piece.index] = [piece.name, ""]
            calls[piece.index][1] += piece.arguments
    assert parser.count == len(calls)
    return content, [(name, arguments) for name, arguments in calls.values()]


F = ("f", '{"a":  "}\\"\\u00e9", "b": [1, {}]}')
KNOWN: list[tuple[ToolFormat, str, str, Calls]] = [
    (HERMES, f'Let me.\n<tool_call>\n{{"name": "f", "arguments": {F[1]}}}\n</tool_call>', "Let me.", [F]),
    (HERMES, f'<tool_call>{{"arguments": {F[1]}, "name": "f"}}</tool_call>\n'
     '<tool_call>{"name":"x","arguments":{}}</tool_call>\n', "", [F, ("x", "{}")]),
    (HERMES, '<tool_call>{"name":"f","arguments":{}}</tool_call>\n after', "\n after", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', "", [("f", '{"a":1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    (HERMES, 'x <tool_call>{"name": "f"', 'x <tool_call>{"name": "f"', []),
    (HERMES, "a <tool_cal b <tool_call>no</tool_call> c ", "a <tool_cal b <tool_call>no</tool_call> c ", []),
    (HERMES, '<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
    (HERMES, "  just text \n", "  just text \n", []),
    (LLAMA3, f' {{"name": "f", "parameters": {F[1]}}}; {{"name": "g", "parameters": {{}}}}', "",
     [F, ("g", "{}")]),
    (LLAMA3, f'<|python_tag|>{{"name": "f", "parameters": {F[1]}}}', "", [F]),
    (LLAMA3, '{"name": "Ada", "age": 3} ok', '{"name": "Ada", "age": 3} ok', []),
    (LLAMA3, '{"name": "zz", "parameters": {}}', '{"name": "zz", "parameters": {}}', []),
    (LLAMA3, 'Hi {"name": "f", "parameters": {}}', 'Hi {"name": "f", "parameters": {}}', []),
    (LLAMA3, "<|python", "<|python", []),
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "f", "arguments": {F[1]}}}, {{"name":"g","arguments":{{}}}}]', "",
     [F, ("g", "{}")]),
    (MISTRAL, f'hi [TOOL_CALLS]f[ARGS]{F[1]}[TOOL_CALLS]g{{"b":2}}', "hi", [F, ("g", '{"b":2}')]),
    (MISTRAL, f"[TOOL_CALLS]f[CALL_ID]abc12[ARGS]{F[1]}", "", [F]),
    (MISTRAL, "[TOOL_CALLS]what is this", "[TOOL_CALLS]what is this", []),
    (MISTRAL, "[TOOL_CALLS][1, 2] x", "[TOOL_CALLS][1, 2] x", []),
    (MISTRAL, "x [TOOL_C", "x [TOOL_C", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), KNOWN)
def test_known_outputs_whole_and_by_character(
    form: ToolFormat, text: str, content: str, calls: Calls
) -> None:
    assert read(form, [text]) == (content, calls)
    assert read(form, list(text)) == (content, calls)


_PIECES = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "f", ',
    '"arguments": ', '"parameters": ',
    "{", "}", "[", "]", '"', "\\", ",", ":", ";", "f", " ", "\n", "null", '{"a": "x"}', "1",
]  # fmt: skip


@settings(max_examples=400)
@given(
    form=st.sampled_from(ToolFormat),
    text=st.lists(st.sampled_from(_PIECES), max_size=14).map("".join),
    cuts=st.lists(st.integers(0, 120), max_size=8),
)
def test_no_cut_changes_the_outcome_and_nothing_is_lost(form: ToolFormat, text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(edges)]
    content, calls = read(form, parts)
    assert (content, calls) == read(form, [text]) == read(form, list(text))
    if not calls:
        assert content == text


def test_arguments_stream_as_they_come_and_content_is_not_held() -> None:
    parser = ToolParser(HERMES)
    assert parser.push("so").content == "so"
    parser.push('<tool_call>{"name": "f", "arguments": {"a')
    assert [p.arguments for p in parser.push('": "long').calls] == ['": "long']


def test_formats_are_told_by_the_template() -> None:
    assert tool_format({"default": "...<tool_call>..."}) is HERMES
    assert tool_format({"default": "", "tool_use": "[TOOL_CALLS]"}) is MISTRAL
    assert tool_format({"default": '<|start_header_id|> {"name": x, "parameters": y}'}) is LLAMA3
    assert tool_format(default_tokenizer().templates) is HERMES


# -- forcing --------------------------------------------------------------------------------------

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"],
        "additionalProperties": False, "$defs": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}}}},
    {"type": "function", "function": {"name": "g\"é", "parameters": {"enum": [{}]}}},
]  # fmt: skip


def tokenizer_for(form: ToolFormat, special: bool) -> Tokenizer:
    marks = ("<tool_call>", "<|python_tag|>", "[TOOL_CALLS]")
    return toy((*CHATML[:2], *marks, "<|im_end|>")) if special else toy(CHATML)


@pytest.mark.parametrize("form", ToolFormat)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("choice", ["required", "name:f", 'name:g"é'])
def test_forced_calls_are_calls_of_the_tools(form: ToolFormat, special: bool, choice: str) -> None:
    tokenizer = tokenizer_for(form, special)
    structured = forced_calls(form, TOOLS, choice, tokenizer)
    sampler = Sampler(300, eos_ids=tokenizer.eos_ids, compiler=Compiler(Vocabulary.of(tokenizer, 300)))
    for seed in range(6):
        ids: list[int] = []
        sampler.start(f"{seed}", [1], SamplingParams(structured=structured, seed=seed))
        rng = np.random.default_rng(seed)
        ended = False
        while not ended and len(ids) < 600:
            row = torch.from_numpy(rng.normal(0, 1, (1, 300)).astype(np.float32))
            sampled = sampler.sample([f"{seed}"], row)[0]
            ended = sampled.ended
            ids.append(sampled.token)
        assert ended
        end = min(tokenizer.eos_ids)
        text = tokenizer.decode([i for i in ids if i != end], skip_special_tokens=False)
        assert shows_markers(form, tokenizer) == special
        if form is not LLAMA3:
            assert (ids[0] == tokenizer.token_id(OPENERS[form])) == special
        parser = ToolParser(form, ["f", 'g"é'])
        outputs = [parser.push(text), parser.flush()]
        assert "".join(o.content for o in outputs) == ""
        names = [p.name for o in outputs for p in o.calls if p.name is not None]
        assert names
        assert set(names) <= ({"f", 'g"é'} if choice == "required" else {choice.removeprefix("name:")})
        arguments = "".join(p.arguments for o in outputs for p in o.calls)
        value, _ = json.JSONDecoder().raw_decode(arguments)
        assert value == {} or 0 <= value["n"] <= 9


def test_parallel_calls_can_be_forbidden_and_choices_are_checked() -> None:
    tokenizer = toy(CHATML)
    structured = forced_calls(HERMES, TOOLS, "required", tokenizer, parallel=False)
    assert structured is not None
    assert "start: call\n" in structured.spec
    assert forced_calls(HERMES, TOOLS, "auto", tokenizer) is None
    assert forced_calls(HERMES, [], "none", tokenizer) is None
    with pytest.raises(InputError, match="the request's tools are f"):
        forced_calls(HERMES, TOOLS, "name:h", tokenizer)
    with pytest.raises(InputError, match="are none"):
        forced_calls(HERMES, [], "required", tokenizer)


# -- a template that knows no tools ---------------------------------------------------------------


def test_tools_reach_a_model_whose_template_knows_none() -> None:
    template = ChatTemplate(default_tokenizer())
    assert not template.knows_tools
    call = {"type": "function", "function": {"name": "f", "arguments": '{"n":1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42"},
    ]
    text = template.render(messages, tools=TOOLS).text
    assert text.count("<|im_start|>system") == 1
    assert json.dumps(TOOLS[1], ensure_ascii=False) in text
    assert text.index("</tools>") < text.index("Be brief.")
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"n":1}}\n</tool_call><|im_end|>'
        in text
    )
    assert "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>" in text
    assert "Be brief.<|im_end|>" in template.render(messages[:2]).text
