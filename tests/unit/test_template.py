"""Chat templates: text as Jinja gives it, ids whose control tokens are the template's alone."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_models import CHATML, default_tokenizer, toy

from hotprefix.engine.text.template import ChatTemplate
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.errors import InputError, ModelLoadError

CHATML_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA3_TEMPLATE = (
    "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
QWEN_MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
QWEN_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + m.content + '</tool_response><|im_end|>\\n' }}
    {%- else %}
        {%- set text = m.content %}
        {%- if m.role == 'assistant' and '</think>' in text %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + m.role + '\\n' + text }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>' }}{%- endif %}
{%- endif %}"""

Message = dict[str, Any]


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def controls(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    marks = {tokenizer.token_id(c): c for c in tokenizer.control}
    return [marks[i] for i in ids if i in marks]


@functools.cache
def cases() -> list[tuple[Tokenizer, str, ChatTemplate]]:
    pairs = [
        (toy(CHATML), CHATML_TEMPLATE),
        (toy(LLAMA3), LLAMA3_TEMPLATE),
        (toy(CHATML, QWEN_MARKUP), QWEN_TEMPLATE),
        (default_tokenizer(), default_tokenizer().templates["default"]),
    ]
    return [(tokenizer, source, ChatTemplate(tokenizer, source=source)) for tokenizer, source in pairs]


# -- plain rendering ------------------------------------------------------------------------------


def test_the_default_models_prompt() -> None:
    prompt = ChatTemplate(default_tokenizer()).render([user("Hi there 1 2")])
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert prompt.text == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi there 1 2<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert list(prompt.ids) == default_tokenizer().encode(prompt.text, special="template")
    assert controls(default_tokenizer(), prompt.ids) == ["<|im_start|>", "<|im_end|>"] * 2 + ["<|im_start|>"]


def test_text_runs_are_tokenized_across_the_edges_of_a_message() -> None:
    """As the model was trained, and as a completion of the same text gets."""
    tokenizer = default_tokenizer()
    prompt = ChatTemplate(tokenizer).render([user("\n\nHello\n")])
    assert list(prompt.ids) == tokenizer.encode(prompt.text, special="template", bos=True)


def test_llama3_trims_and_has_exactly_one_bos() -> None:
    tokenizer = toy(LLAMA3, ggml__add_bos_token=True)
    prompt = ChatTemplate(tokenizer, source=LLAMA3_TEMPLATE).render([user("  x \n")])
    head = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nx<|eot_id|>"
    assert prompt.text.startswith(head)
    assert prompt.ids.count(256) == 1
    assert list(prompt.ids) == tokenizer.encode(prompt.text, special="template", bos=True)


def test_generation_prompt_and_variables() -> None:
    template = ChatTemplate(toy(CHATML, QWEN_MARKUP), source=QWEN_TEMPLATE)
    assert template.render([user("x")], add_generation_prompt=False).text.endswith("x<|im_end|>\n")
    off = template.render([user("x")], kwargs={"enable_thinking": False})
    assert off.text.endswith("<|im_start|>assistant\n<think>\n\n</think>")
    assert controls(toy(CHATML, QWEN_MARKUP), off.ids)[-2:] == ["<think>", "</think>"]


def test_an_assistants_reasoning_is_left_to_the_template() -> None:
    tokenizer = toy(CHATML, QWEN_MARKUP)
    template = ChatTemplate(tokenizer, source=QWEN_TEMPLATE)
    told = {"role": "assistant", "content": "<think>r</think>\nOK"}
    prompt = template.render([user("x"), told, user("y")])
    assert "<|im_start|>assistant\nOK<|im_end|>" in prompt.text
    assert set(controls(tokenizer, prompt.ids)) == {"<|im_start|>", "<|im_end|>"}
    open_thought = template.render([user("x"), {"role": "assistant", "content": "<think>r"}])
    assert "<think>" in controls(tokenizer, open_thought.ids)


def test_parts_are_joined_and_null_is_absent() -> None:
    template = ChatTemplate(toy(CHATML), source=CHATML_TEMPLATE)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([user(parts)]) == template.render(
        [user("a\nb") | {"name": None, "tool_calls": None}]
    )


def test_an_answer_that_is_only_a_thought_has_empty_content() -> None:
    source = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    thought = {"role": "assistant", "content": None, "reasoning_content": "so"}
    assert ChatTemplate(toy(CHATML), source=source).render([user("x"), thought]).text == "[|x][so|]"


def test_globals_of_the_convention() -> None:
    now = datetime(2024, 2, 3)
    source = "{{ strftime_now('%d %b %Y') }}|{{ bos_token }}|{{ eos_token }}|"
    source += "{% generation %}{{ x | tojson }}{% endgeneration %}"
    template = ChatTemplate(toy(CHATML), source=source, now=lambda: now)
    text = template.render([user("x")], kwargs={"x": {"b": "<é&'>", "a": 1}}).text
    assert text == '03 Feb 2024|<s>|<|im_end|>|{"b": "<é&\'>", "a": 1}'


# -- tools ----------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "description": "d"}}


def test_tools_keep_the_callers_order_of_keys() -> None:
    template = ChatTemplate(toy(CHATML, QWEN_MARKUP), source=QWEN_TEMPLATE)
    other = {"function": dict(reversed(TOOL["function"].items())), "type": "function"}  # type: ignore[union-attr]
    first, second = (template.render([user("x")], tools=[t]).text for t in (TOOL, other))
    assert json.dumps(TOOL) in first
    assert json.dumps(other) in second
    assert first == template.render([user("x")], tools=[dict(TOOL)]).text != second


def test_arguments_come_back_byte_for_byte() -> None:
    raw = '{"b":1,  "a":"\\u00e9<"}'
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": raw}}
    template = ChatTemplate(toy(CHATML, QWEN_MARKUP), source=QWEN_TEMPLATE)
    messages = [
        user("x"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "</tool_response><|im_end|>"},
    ]
    prompt = template.render(messages)
    assert f'<tool_call>{{"name": "f", "arguments": {raw}}}</tool_call><|im_end|>' in prompt.text
    found = controls(toy(CHATML, QWEN_MARKUP), prompt.ids)
    assert [m for m in found if "tool" in m] == [
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
    ]
    assert found.count("<|im_end|>") == 3


def test_a_template_for_tools_is_taken_when_there_are_tools() -> None:
    tokenizer = toy(CHATML)
    tokenizer.templates = {"default": "D", "tool_use": "U{{ tools | length }}"}
    template = ChatTemplate(tokenizer)
    assert template.knows_tools
    assert template.render([user("x")]).text == "D"
    assert template.render([user("x")], tools=[TOOL]).text == "U1"
    assert not ChatTemplate(tokenizer, source=CHATML_TEMPLATE).knows_tools


def test_calls_that_a_template_prints_are_left_to_it_whatever_it_does_with_contents() -> None:
    source = (
        "{% for m in messages %}{{ m.role }} {{ m.content | upper }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.arguments }}]{% endfor %}/{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    told = [
        {"role": "assistant", "content": "so", "tool_calls": [call, call]},
        {"role": "tool", "content": "r"},
    ]
    text = ChatTemplate(toy(CHATML), source=source).render([user("x"), *told]).text
    assert text == 'user X/assistant SO[{"a":1}][{"a":1}]/tool R/'


def test_results_that_a_template_does_not_print_are_told_all_the_same() -> None:
    source = (
        "{% for m in messages %}{{ m.role }} {{ m.content if m.role != 'tool' }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.arguments }}]{% endfor %}/{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    told = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "r"}]
    text = ChatTemplate(toy(CHATML), source=source).render([user("x"), *told]).text
    assert text == (
        'user x/assistant <tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>/'
        "user <tool_response>\nr\n</tool_response>/"
    )


def test_no_key_nor_constant_of_a_call_is_part_of_a_control_token() -> None:
    """Qwen's vocabulary has <|repo_name|>, others have tokens with "function" or "type" in them."""
    words = ("<|repo_name|>", "<|function|>", "<|arguments|>", "<|type|>", "<|user|>", "<|content|>", "<|v|>")
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.type == 'function' }} {{ c.function.name }}"
        "({{ c.function.arguments | tojson }} {{ c.function.arguments.content }}){% endfor %}{% endfor %}"
        " {{ v.name }} {{ v | tojson }} {{ tools | tojson }} {{ messages[0].content | length }}"
        " {{ messages[0].content == '<|user|>' }} {{ {'<|user|>': 1}[messages[0].content] }}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "content", "arguments": '{"content": "v"}'}}
    tools = [{"type": "function", "function": {"name": "user", "parameters": {}}}]
    template = ChatTemplate(toy(("<s>", *words, "<|im_end|>")), source=source)
    told = {"role": "assistant", "content": None, "tool_calls": [call]}
    prompt = template.render([user("<|user|>"), told], tools=tools, kwargs={"v": {"name": "type", "v": "v"}})
    assert prompt.text == (
        'True content({"content": "v"} v) type {"name": "type", "v": "v"} ' + json.dumps(tools) + " 8 True 1"
    )
    assert bytes(prompt.ids).decode() == prompt.text


# -- forgery --------------------------------------------------------------------------------------

_PIECES = [
    "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<think>", "</think>", "<tool_call>",
    "<s>", "<|begin_of_text|>", "<|", "|>", "<", ">", "im_end", "im_end|>", " ", "\n", "x", "é",
    "\ue000", "\ue001",
]  # fmt: skip
_FORGED = st.lists(st.sampled_from(_PIECES), max_size=8).map("".join)


@settings(max_examples=150)
@given(_FORGED, _FORGED)
def test_no_message_becomes_a_control_token(first: str, second: str) -> None:
    for tokenizer, source, template in cases():
        messages = [{"role": "system", "content": first}, user(second)]
        prompt = template.render(messages)
        plain = template.render([{"role": "system", "content": "a"}, user("a")])
        assert controls(tokenizer, prompt.ids) == controls(tokenizer, plain.ids)
        trim = str.strip if source is LLAMA3_TEMPLATE else str
        assert trim(first) in prompt.text
        assert trim(second) in prompt.text
        if tokenizer is not default_tokenizer():
            assert tokenizer.decode(prompt.ids, skip_special_tokens=False) == prompt.text


@pytest.mark.parametrize("marker", ["<|im_end|>", "</think>"])
def test_template_and_message_together_make_no_control_token(marker: str) -> None:
    tokenizer = toy(CHATML, QWEN_MARKUP)
    for start in range(len(marker)):
        for stop in range(start + 1, len(marker) + 1):
            for content in (marker[start:stop], f" {marker[start:stop]} "):
                source = f"{marker[:start]}{{{{ messages[0].content | trim }}}}{marker[stop:]}"
                prompt = ChatTemplate(tokenizer, source=source).render([user(content)])
                assert prompt.text == marker
                assert controls(tokenizer, prompt.ids) == []
        long = "words enough to be no part of a marker"
        for own, source, content in (
            ([marker], f"{{{{ messages[0].content }}}}{marker[start:]}", long + marker[:start]),
            ([], f"{marker[:start]}{{{{ messages[0].content }}}}", marker[start:] + long),
        ):
            prompt = ChatTemplate(tokenizer, source=source).render([user(content)])
            assert marker in prompt.text
            assert controls(tokenizer, prompt.ids) == ([] if start else own)


@functools.cache
def noted() -> tuple[Tokenizer, ChatTemplate]:
    """Qwen's, with a caller's variable put where it would complete a control token."""
    tokenizer = toy(CHATML, QWEN_MARKUP)
    return tokenizer, ChatTemplate(tokenizer, source=QWEN_TEMPLATE + "{{ '<|' ~ note ~ '|>' }}")


@settings(max_examples=100)
@given(_FORGED, _FORGED)
def test_no_tool_nor_variable_nor_name_does(name: str, text: str) -> None:
    tokenizer, template = noted()

    def render(name: str, text: str) -> list[str]:
        call = {"function": {"name": name, "arguments": json.dumps({text: text})}}
        messages = [user("x"), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": text}]
        tools = [{"type": "function", "function": {"name": name, "parameters": {text: [text]}}}]
        prompt = template.render(messages, tools=tools, kwargs={"note": name})
        return [m for m in controls(tokenizer, prompt.ids) if m in tokenizer.special]

    assert render(name, text) == render("f", "a")


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "pirate", "content": "x"}], "messages[0].role"),
        ([user("x"), {"content": "x"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([user(3)], "messages[0].content"),
        ([user([{"type": "image_url", "image_url": {"url": "x"}}])], "messages[0].content[0]"),
        ([user([{"type": "text"}])], "messages[0].content[0]"),
        ([user("x"), {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls[0]"),
        (
            [user("x"), {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}],
            "messages[1].tool_calls[0].function.arguments",
        ),
    ],
)
def test_bad_messages_are_named(messages: list[Message], param: str) -> None:
    with pytest.raises(InputError) as caught:
        ChatTemplate(toy(CHATML), source=CHATML_TEMPLATE).render(messages)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 3 }}", "refuses"),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|safely"),
        ("{{ 1 // 0 }}", "refuses"),
        ("", "empty"),
    ],
)
def test_a_templates_refusal_is_the_callers_error(source: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ChatTemplate(toy(CHATML), source=source).render([user("x")])


def test_deep_nesting_and_reserved_variables_are_refused() -> None:
    template = ChatTemplate(toy(CHATML), source="{{ x | tojson }}")
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InputError, match="deeply"):
        template.render([user("x")], kwargs={"x": deep})
    with pytest.raises(InputError, match="bos_token"):
        template.render([user("x")], kwargs={"bos_token": "x"})


def test_a_model_without_a_template_or_with_a_broken_one() -> None:
    with pytest.raises(ModelLoadError, match="no chat template"):
        ChatTemplate(toy(CHATML))
    with pytest.raises(ModelLoadError, match="parse"):
        ChatTemplate(toy(CHATML), source="{% if %}")
