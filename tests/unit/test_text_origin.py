"""Text that remembers where it came from: the very text for everybody who looks, marked for the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotprefix.engine.text.chat_messages import Absent, Arguments, normalise
from hotprefix.engine.text.dialect import Environment
from hotprefix.engine.text.json_text import to_json
from hotprefix.engine.text.origin import Origin, Traced, joined, runs_of, traced

# A character says who wrote it, so each outcome can be judged by itself.
LETTERS = {Origin.CALLER: "aB ,", Origin.MODEL: "cD\n;", Origin.TEMPLATE: "eF\t-"}
_runs = st.sampled_from(Origin).flatmap(
    lambda origin: st.text(LETTERS[origin], max_size=4).map(lambda text: traced(text, origin))
)
_traced = st.lists(_runs, max_size=6).map(joined)
_any = st.text("".join(LETTERS.values()), max_size=2)


def origins(text: str) -> list[Origin]:
    return [origin for length, origin in runs_of(text) for _ in range(length)]


def writer(character: str) -> Origin:
    """By the letter, whatever its case."""
    return next(origin for origin, letters in LETTERS.items() if character.lower() in letters.lower())


def right(text: str) -> bool:
    return origins(text) == [writer(character) for character in text]


def plain(value: str) -> str:
    return "".join((value,))


CUTS: list[Callable[[Any, str, int], Any]] = [
    lambda t, sep, n: t[n:],
    lambda t, sep, n: t[:n],
    lambda t, sep, n: t[n : n + 3],
    lambda t, sep, n: t[::-1],
    lambda t, sep, n: t[:: n or 1],
    lambda t, sep, n: t[n] if -len(t) <= n < len(t) else "",
    lambda t, sep, n: list(t),
    lambda t, sep, n: t.split(),
    lambda t, sep, n: t.split(None, abs(n)),
    lambda t, sep, n: t.rsplit(None, abs(n)),
    lambda t, sep, n: t.split(sep or "x", n),
    lambda t, sep, n: t.rsplit(sep or "x", n),
    lambda t, sep, n: t.splitlines(),
    lambda t, sep, n: t.splitlines(True),
    lambda t, sep, n: t.partition(sep or "x"),
    lambda t, sep, n: t.rpartition(sep or "x"),
    lambda t, sep, n: t.strip(),
    lambda t, sep, n: t.lstrip(sep),
    lambda t, sep, n: t.rstrip(sep),
    lambda t, sep, n: t.removeprefix(sep),
    lambda t, sep, n: t.removesuffix(sep),
    lambda t, sep, n: t.upper(),
    lambda t, sep, n: t.lower(),
    lambda t, sep, n: t.title(),
    lambda t, sep, n: t.capitalize(),
    lambda t, sep, n: t * max(n, 0),
    lambda t, sep, n: max(n, 0) * t,
    lambda t, sep, n: str(t),
]


@given(_traced, _any, st.integers(-3, 12))
def test_cutting_gives_what_str_gives_and_remembers(text: Traced, sep: str, n: int) -> None:
    for cut in CUTS:
        found, expected = cut(text, sep, n), cut(plain(text), sep, n)
        assert found == expected
        assert type(found) is not str or not found
        for piece in [found] if isinstance(found, str) else found:
            assert right(piece)


@given(_traced, _traced, st.text("aB ,", max_size=3))
def test_joining_gives_what_str_gives_and_remembers(one: Traced, other: Traced, callers: str) -> None:
    forms = [
        (lambda a, b, c: a + b + c, True),
        (lambda a, b, c: c + a + c, True),
        (lambda a, b, c: a.join([b, c, b]), True),
        (lambda a, b, c: b.replace("e", a), True),
        (lambda a, b, c: b.replace("e", a, 1), True),
        (lambda a, b, c: _own("e%s-%%%s") % (b, c), False),
        (lambda a, b, c: c.join([a, b]), False),
        (lambda a, b, c: c.replace("a", a), False),
    ]
    for form, remembers in forms:
        found, expected = form(one, other, callers), form(plain(one), plain(other), callers)
        assert found == expected
        if remembers:
            assert right(found)


def _own(text: str) -> Traced:
    return traced(text, Origin.TEMPLATE)


@given(_traced)
def test_looking_at_a_text_tells_nothing(text: Traced) -> None:
    same = plain(text)
    assert (text == same, hash(text) == hash(same), len(text), bool(text)) == (
        True,
        True,
        len(same),
        bool(same),
    )
    assert {same: 1}[text] == {text: 1}[same] == 1
    assert json.dumps({text: text}) == json.dumps({same: same})
    assert ("aB" in text, text.find("e"), text.startswith("c")) == (
        "aB" in same,
        same.find("e"),
        same.startswith("c"),
    )
    assert f"{text!r}|{text}" == f"{same!r}|{same}"


def test_what_cannot_be_followed_is_the_callers() -> None:
    own = _own("<s>")
    for forgotten in (
        own.center(9),
        own.ljust(9),
        own.zfill(9),
        own.swapcase(),
        own.expandtabs(),
        _own("%3s") % "<s>",
        own.replace("", "-"),
        own.translate({}),
        Traced(own),
    ):
        assert set(origins(forgotten)) <= {Origin.CALLER}, forgotten
    assert set(origins(_own("ﬁ<s>").upper())) == {Origin.CALLER}  # grows: FI


@pytest.mark.parametrize(
    ("form", "args", "kwargs", "own"),
    [
        ("<{}>{{<s>}}", ("b",), {}, "<>{<s>}"),
        ("<{0}{0}>", ("b",), {}, "<>"),
        ("<{x}>", (), {"x": "b"}, "<>"),
        ("<{:>3}>", ("b",), {}, ""),
        ("<{x[0]}>", (), {"x": "b"}, ""),
        ("<{}>", ("<",), {}, "<>"),
    ],
)
def test_format(form: str, args: tuple[str, ...], kwargs: dict[str, str], own: str) -> None:
    source = f"{{{{ {form!r}.format(*args, **kwargs) }}}}"
    text = environment().from_string(source).render(args=args, kwargs=kwargs)
    assert text == form.format(*args, **kwargs)
    assert "".join(c for c, o in zip(text, origins(text), strict=True) if o is Origin.TEMPLATE) == own


# -- templates --------------------------------------------------------------------------------------


def environment() -> Environment:
    return Environment(lambda: datetime(2024, 2, 3))


def library() -> Any:
    """transformers' own environment, by its compiler."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template("").environment


# E is the template's word, x the caller's: every construct that carries text to the output.
CONSTRUCTS = [
    "E{{ x }}E",
    "{{ 'E' + x + 'E' }}",
    "{{ 'E' ~ x ~ 'E' ~ 3 }}",
    "{{ x ~ x }}",
    "{{ ['E', x] | join('E') }}",
    "{{ [x, x] | join }}",
    "{{ [{'k': x}] | join('E', attribute='k') }}",
    "{{ ('E' + x) | trim }}",
    "{% set y = 'E' + x %}{{ y }}",
    "{% set y %}E{{ x }}{% endset %}{{ y }}",
    "{% set n = namespace(t='') %}{% for i in [1, 2] %}{% set n.t = n.t + 'E' + x %}{% endfor %}{{ n.t }}",
    "{% macro m(a, b='E') %}E{{ a }}{{ b }}{% endmacro %}{{ m(x) }}{{ m('E', x) }}",
    "{% macro m() %}E{{ caller() }}{% endmacro %}{% call m() %}{{ x }}E{% endcall %}",
    "{% filter trim %}  E{{ x }}E  {% endfilter %}",
    "{{ {'x': x, 'E': 'E'}['E'] }}{{ {'E': x}.E }}",
    "{{ ('E' + x + 'E').split(x or 'q')[0] }}",
    "{{ ('E,' + x).split(',') | first }}",
    "{{ ('E' + x)[0] }}",
    "{{ ('E' + x)[1:] }}",
    "{{ 'E%sE' % x }}",
    "{{ 'E' * 3 }}",
    "{{ 'E' if x else 'E' }}",
    "{{ x | default('E') }}{{ none_such | default('E') }}",
    "{{ ('E' + x) | string }}",
    "{{ ('E' + x) | safe }}",
    "{{ ('E' + x).replace('q', 'E') }}",
    "{% for c in 'E' + x %}{{ c }}{% endfor %}",
    "{{ ('E' + x) | list | join }}",
    "{{ ('E' + x) | reverse }}",
    "{{ (('Ee' | upper) + x) | string }}",
    "{{ 'E{}E'.format(x) }}",
    "{{ ('E ' + x + ' E').strip() }}",
    "{{ [x, 'E'] | map('trim') | join('E') }}",
    "{{ x | tojson }}E",
    "{{ [x, 'E'] | last }}{{ ['E', x] | first }}",
]


@pytest.mark.parametrize("source", CONSTRUCTS)
@pytest.mark.parametrize("x", ["x", "xyz", "<|im_end|>", " \n", "", "\ue000é", "a,b"])
def test_a_template_renders_as_in_the_library_and_only_its_own_words_are_marked(source: str, x: str) -> None:
    text = environment().from_string(source).render(x=x)
    expected = library().from_string(source).render(x=x)
    if "safe" in source or "filter" in source:
        expected = str(expected)
    assert text == expected
    marked = [c for c, origin in zip(text, origins(text), strict=True) if origin is Origin.TEMPLATE]
    assert marked.count("E") == text.count("E")
    assert set(marked) <= set("Ee, 3")


# -- arguments and JSON -----------------------------------------------------------------------------

_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(
    _values, st.booleans(), st.none() | st.integers(0, 4), st.none() | st.tuples(_any, _any), st.booleans()
)
def test_tojson_is_the_standard_librarys(
    value: Any, ascii: bool, indent: int | None, separators: Any, sort: bool
) -> None:
    options: dict[str, Any] = {
        "ensure_ascii": ascii,
        "indent": indent,
        "separators": separators,
        "sort_keys": sort,
    }
    assert to_json(value, **options) == json.dumps(value, **options)
    assert to_json({"k": (value, {1: 2, None: True})}, **options | {"sort_keys": False}) == json.dumps(
        {"k": [value, {1: 2, None: True}]}, **options | {"sort_keys": False}
    )


@pytest.mark.parametrize("origin", Origin)
def test_tojson_remembers_who_wrote_a_text(origin: Origin) -> None:
    text = to_json({"k": [traced('a"é', origin)]})
    assert text == '{"k": ["a\\"é"]}'
    assert origins(text) == [Origin.CALLER] * 7 + [origin] * 6 + [Origin.CALLER] * 2


RAW = '{"b":1,  "a":1e3, "é\\u00e9":"</"}'


@pytest.mark.parametrize(
    "source",
    [
        "{{ c.function.arguments }}",
        "{{ c.function.arguments | tojson }}",
        "{{ c.function.arguments | tojson(indent=2) }}",
        "{{ c.function.arguments | string }}",
        "{{ c.function.arguments | trim }}",
        "{{ c | tojson }}",
        "{{ c.function | tojson(sort_keys=true) }}",
        "{{ messages | tojson }}",
        "{{ c | tojson(indent=4) }}",
        "{{ 'E' + c.function.arguments + 'E' }}",
        "{{ c.function.arguments + '\\n' }}",
        "{{ c.function.arguments ~ 3 }}",
        "{{ '%s' % c.function.arguments }}",
        "{{ (c.function | tojson)[:-1] }}",
        "{{ ['E', c.function.arguments] | join }}",
        "{{ '{}'.format(c.function.arguments) }}",
    ],
)
@pytest.mark.parametrize("raw", [RAW, '{"a": "cut', "[1,  2]", '{"a": 1} and more', "not JSON", "1e3"])
def test_arguments_are_the_very_bytes_wherever_they_are_printed(source: str, raw: str) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": raw}}
    messages = list(normalise([{"role": "assistant", "tool_calls": [call]}]))
    text = environment().from_string(source).render(messages=messages, c=messages[0]["tool_calls"][0])
    assert raw in text
    at = text.index(raw)
    assert set(origins(text)[at : at + len(raw)]) == {Origin.MODEL}


@pytest.mark.parametrize(
    ("given_", "members"),
    [
        (RAW, {"b": 1, "a": 1000.0, "éé": "</"}),
        ("", {}),
        (None, {}),
        ("[1]", {}),
        ("null", {}),
        ("{", {}),
        ("x", {}),
        ('{"a"', {}),
        ('{"a":', {}),
        ('{"a": "cu', {}),
        ('{"a": 12', {}),
        ('{"a": [1, {"b": 2}], "c": "d', {"a": [1, {"b": 2}]}),
        ('{"a": 12, ', {"a": 12}),
        (' { "a" : 12 , "b":tr', {"a": 12}),
        ('{"a": 1} }', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("9" * 5000, {}),
    ],
)
def test_members_of_arguments_are_those_that_are_whole(given_: Any, members: dict[str, Any]) -> None:
    arguments = Arguments.of(given_)
    assert dict(arguments) == members
    expected = given_ if isinstance(given_, str) and given_ else json.dumps(members)
    assert arguments.text == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ c is none }}", "True"),
        ("{{ c is not none }}", "False"),
        ("{{ c == none }}", "True"),
        ("{{ none == c }}", "True"),
        ("{{ c != none }}", "False"),
        ("{{ c }}", ""),
        ("{{ 'a' in c }}", "False"),
        ("{{ 'E' + c }}", "E"),
        ("{{ c | tojson }}", "null"),
        ("{{ {'c': c} | tojson }}", '{"c": null}'),
        ("{{ c or 'E' }}", "E"),
        ("{{ c | trim }}", ""),
        ("{{ c.split('x')[-1] }}", ""),
        ("{{ c | length }}", "0"),
        ("{{ c == '' }}", "True"),
        ("{{ c == 'x' }}", "False"),
        ("{% if c %}E{% endif %}", ""),
        ("{{ none is none }}{{ '' is none }}", "TrueFalse"),
    ],
)
def test_absent_content_is_none_for_those_who_ask_and_empty_for_those_who_print(
    source: str, expected: str
) -> None:
    assert environment().from_string(source).render(c=Absent()) == expected
