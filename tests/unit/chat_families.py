"""Chat templates of the families that people run, in our own words. Not a test itself.

Each is built from the family's documented prompt format and does with a message what the
family's template does: what it asks of it (`is none`, `is string`, a length, a split), what it refuses, how
it prints calls. Vocabularies are single bytes and the family's control tokens, among them tokens that
contain the words of messages' keys and roles.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from text_models import metadata

from hotprefix.engine.text.source import from_metadata
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.engine.text.tools import ToolFormat

WORDS = (
    "<|repo_name|>",
    "<repo_name>",
    "<|file_sep|>",
    "<|function|>",
    "<|arguments|>",
    "<|user|>",
    "<|content|>",
    "<|tool_call_id|>",
    "<|type|>",
    "<|role|>",
)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True)
class Family:
    """control: the first is BOS, the last EOS. goes_on: how far the next turn's prompt repeats an
    answer, by kind of answer: "all" of it, "arguments" (through the first call's), "text" (before the calls),
    or "none". absent: the model does not answer so."""

    form: ToolFormat
    control: tuple[str, ...]
    templates: Mapping[str, str]
    markup: tuple[str, ...] = MARKS
    goes_on: Mapping[str, str] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        source = metadata((*self.control[:-1], *WORDS, self.control[-1]), self.markup)
        tokenizer = Tokenizer(from_metadata(source))
        tokenizer.templates = self.templates
        return tokenizer


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TOOLS = """\
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'Functions:\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nWrite <tool_call>\\n{"name": N, "arguments": A}\\n</tool_call><|im_end|>\\n' }}"""
_RESULTS = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"""
_END = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"


def _filled(template: str) -> str:
    return template.replace("@TOOLS@", _TOOLS).replace("@RESULTS@", _RESULTS).replace("@END@", _END)


QWEN25 = _filled("""\
{%- if tools %}@TOOLS@
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first)
            or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}@RESULTS@
    {%- endif %}
{%- endfor %}@END@""")

QWEN3 = _filled("""\
{%- if tools %}@TOOLS@
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set at = messages|length - 1 - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string and not (
            message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}{%- set ns.last = at %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>' + message.role }}
            {{- '\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}@RESULTS@
    {%- endif %}
{%- endfor %}@END@
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}""")

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system_message + '<|eot_id|>' }}
{%- if tools is not none %}
    {%- set asked = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nAnswer as {"name": N, "parameters": P}.\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- asked + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim
            + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- '}' }}{{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

MISTRAL1 = """\
{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('roles must alternate') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
{%- else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"""

MISTRAL3 = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set asked = rest | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(turn=0) %}
{%- for message in rest %}
    {%- if not (message.role == 'tool'
            or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message['role'] == 'user') != (ns.turn % 2 == 0) %}
            {{- raise_exception('roles must alternate') }}
        {%- endif %}{%- set ns.turn = ns.turn + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and message == asked[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != 'return' %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ', ' }}{%- endif %}
                {%- endfor %}{{- '}}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' }}{%- endif %}
            {%- endfor %}{{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception('ids have nine letters and digits') }}
            {%- endif %}{{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] | trim + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('ids have nine letters and digits') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

DEEPSEEK_R1 = """\
{%- set ns = namespace(first=true, results=false, system='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{%- set ns.system = message['content'] %}
{%- endif %}{%- endfor %}
{{- bos_token }}{{- ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- set ns.first = true %}
        {%- for tool in message['tool_calls'] %}
            {%- if ns.first %}{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}{%- set ns.first = false %}
            {%- else %}{{- '\\n' }}{%- endif %}
            {{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' }}
            {{- tool['function']['name'] + '\\n' + '```json' + '\\n' }}
            {{- '' + tool['function']['arguments'] + '\\n' + '```' + '<｜tool▁call▁end｜>' }}
        {%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {%- if ns.results %}{{- '<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
            {%- set ns.results = false %}
        {%- else %}
            {%- set content = message['content'] %}
            {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
            {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
        {%- endif %}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {%- if not ns.results %}{{- '<｜tool▁outputs▁begin｜>' }}{%- else %}{{- '\\n' }}{%- endif %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
        {%- set ns.results = true %}
    {%- endif %}
{%- endfor %}
{%- if ns.results %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
{%- if add_generation_prompt and not ns.results %}{{- '<｜Assistant｜>' }}{%- endif %}"""

SMOLLM2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{% endif %}\
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

SMOLLM3 = """\
{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}
{%- set mode = '/think' if enable_thinking else '/no_think' %}
{%- if messages[0].role == 'system' %}
    {%- if '/no_think' in messages[0].content %}{%- set mode = '/no_think' %}{%- endif %}
    {%- set instructions = messages[0].content.replace('/no_think', '').replace('/think', '').rstrip() %}
{%- endif %}
{{- '<|im_start|>system\\n' }}
{{- '## Metadata\\nToday: ' ~ strftime_now('%Y') ~ '\\nMode: ' ~ mode ~ '\\n\\n' }}
{%- if instructions %}{{- instructions + '\\n' }}{%- endif %}
{%- if xml_tools %}
    {%- set listed = namespace(text='Functions:\\n<tools>\\n') %}
    {%- for tool in xml_tools %}{%- set listed.text = listed.text ~ (tool | string) ~ '\\n' %}{%- endfor %}
    {{- listed.text ~ '</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' %}{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}
        {%- if mode == '/think' %}{{ '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}
        {%- else %}
            {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' }}
            {{- content.lstrip('\\n') + '<|im_end|>\\n' }}
        {%- endif %}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- if mode == '/think' %}{{ '<|im_start|>assistant\\n' }}
    {%- else %}{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' }}{%- endif %}
{%- endif %}"""

HERMES = """\
{{- bos_token }}{{- '<|im_start|>system\\nYou call functions. Here they are: <tools> ' }}
{%- for tool in tools %}
    {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
    {{- '{"type": "function", "function": ' }}{{- '{"name": "' + tool.name + '", ' }}
    {{- '"parameters": ' }}{{- tool.parameters | tojson }}{{- '}}' }}
    {%- if not loop.last %}{{- '\\n' }}{%- endif %}
{%- endfor %}
{{- ' </tools> Answer within <tool_call></tool_call> as follows:\\n' }}
{{- '<tool_call>\\n{"name": N, "arguments": A}\\n</tool_call><|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'system'
            or (message.role == 'assistant' and message.tool_calls is not defined) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' }}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '{' }}{{- '"name": "' }}{{- tool_call.name }}{{- '"' }}{{- ', "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

_LLAMA = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|python_tag|>",
    "<|eom_id|>",
    "<|eot_id|>",
)
_MISTRAL = (
    "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "</s>",
)  # fmt: skip
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<｜end▁of▁sentence｜>",
)
_HERMES = ToolFormat.HERMES

FAMILIES: Mapping[str, Family] = {
    "qwen2.5": Family(_HERMES, _CHATML, {"default": QWEN25}),
    "qwen3": Family(_HERMES, _CHATML, {"default": QWEN3}),
    "llama3": Family(
        ToolFormat.LLAMA3, _LLAMA, {"default": LLAMA3}, (),
        {"two": "arguments", "cut": "all"}, frozenset({"free"}),
    ),
    "mistral-v1": Family(_HERMES, ("<s>", "</s>"), {"default": MISTRAL1}, ()),
    "mistral-v3": Family(
        ToolFormat.MISTRAL, _MISTRAL, {"default": MISTRAL3}, (),
        {"forced": "arguments", "free": "none", "two": "arguments", "cut": "all"},
    ),
    "deepseek-r1": Family(_HERMES, _DEEPSEEK, {"default": DEEPSEEK_R1}, ("<think>", "</think>")),
    "smollm2": Family(_HERMES, _CHATML, {"default": SMOLLM2}, ()),
    "smollm3": Family(_HERMES, _CHATML, {"default": SMOLLM3}),
    "hermes": Family(
        _HERMES, _CHATML, {"default": SMOLLM2, "tool_use": HERMES}, goes_on={"free": "text"},
    ),
}  # fmt: skip
