"""Grammars: outputs follow them, whatever the other settings; a grammar that cannot be compiled is
refused."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from text_models import CHATML, default_tokenizer, toy

from hotprefix.engine.executor import Unsampled
from hotprefix.engine.params import SamplingParams, StructuredOutput
from hotprefix.engine.sampling import checker
from hotprefix.engine.sampling.checker import GrammarChecker
from hotprefix.engine.sampling.sampler import Sampler
from hotprefix.engine.sampling.structured import MAX_SPEC_CHARS, Compiler, Constraint, Vocabulary
from hotprefix.errors import HotprefixError, InputError

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LARK = 'start: "<" /[a-c]{2}/ ">" | "none"'
V = 300  # wider than the toy's 259 ids


@functools.cache
def compiler() -> Compiler:
    return Compiler(Vocabulary.of(toy(CHATML), V))


def make(kind: str, spec: Any) -> StructuredOutput:
    return StructuredOutput(kind, spec if isinstance(spec, str) else json.dumps(spec))


def generate(structured: StructuredOutput, seed: int, **params: Any) -> tuple[str, bool]:
    """The text generated from random logits, and whether the grammar ended it."""
    tokenizer = toy(CHATML)
    sampler = Sampler(V, eos_ids=tokenizer.eos_ids, compiler=compiler())
    sampler.start("a", [1], SamplingParams(structured=structured, seed=seed, **params))
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    for _ in range(400):
        row = rng.normal(0, 2, (1, V)).astype(np.float32)
        sampled = sampler.sample(["a"], torch.from_numpy(row))[0]
        ids.append(sampled.token)
        assert sampled.token < tokenizer.size
        if sampled.logprob is not None:
            assert np.isfinite([sampled.logprob.logprob, *(v for _, v in sampled.logprob.top)]).all()
        if sampled.ended:
            return tokenizer.decode(ids), True
    return tokenizer.decode(ids), False


@pytest.fixture(scope="module")
def checked() -> Iterator[GrammarChecker]:
    grammar_checker = GrammarChecker(Vocabulary.of(default_tokenizer(), 49152))
    yield grammar_checker
    grammar_checker.close()


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    params=st.sampled_from(
        [
            {},
            {"temperature": 0.0},
            {"top_k": 3, "top_p": 0.5, "logprobs": 3},
            {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "logprobs": 20},
            {"min_tokens": 50, "max_tokens": 400},
            {"logit_bias": {258: 100.0, ord("x"): 100.0}, "ignore_eos": True},
        ]
    ),
)
def test_every_kind_is_followed_with_every_setting(seed: int, params: dict[str, Any]) -> None:
    text, ended = generate(make("json_schema", PERSON), seed, **params)
    assert ended
    value = json.loads(text)
    assert set(value) == {"name", "age"}
    assert len(value["name"]) <= 5
    assert value["age"] <= 99
    text, ended = generate(make("regex", "[0-9]{2}-[a-f]{3,5}"), seed, **params)
    assert ended
    assert re.fullmatch("[0-9]{2}-[a-f]{3,5}", text)
    assert generate(make("choice", ["yes", "no", 'may"be\n']), seed, **params)[0] in ("yes", "no", 'may"be\n')
    for kind in ("lark", "grammar"):
        assert re.fullmatch("<[a-c]{2}>|none", generate(make(kind, LARK), seed, **params)[0])


def test_thousands_of_choices_are_as_good_as_two() -> None:
    """As separate rules of the grammar, the choices would exceed the parser's limits at the answer's second
    token."""
    constraint = compiler().compile(make("choice", [f"option {i}" for i in range(9000)] + ["\x7f"]))
    for byte in b"option 89":
        assert constraint.allowed()[byte]
        constraint.advance(byte)
    assert set(np.flatnonzero(constraint.allowed())) == {*b"0123456789", 258}


def test_json_object_is_an_object() -> None:
    biased = {ord("}"): 30.0, ord('"'): 8.0}
    for seed in range(5):
        text, ended = generate(make("json_object", ""), seed, logit_bias=biased)
        assert ended
        assert isinstance(json.loads(text), dict)


def test_blanks_between_json_tokens_are_bounded() -> None:
    constraint = compiler().compile(make("json_schema", PERSON))
    constraint.advance(ord("{"))
    for _ in range(20):
        assert constraint.allowed()[ord("\n")]
        constraint.advance(ord("\n"))
    assert not constraint.allowed()[ord("\n")]
    assert constraint.allowed()[ord('"')]


def test_two_requests_with_one_grammar_do_not_share_a_place() -> None:
    structured = make("regex", "ab+c")
    first, second = compiler().compile(structured), compiler().compile(structured)
    first.advance(ord("a"))
    assert np.flatnonzero(first.allowed()).tolist() == [ord("b")]
    assert np.flatnonzero(second.allowed()).tolist() == [ord("a")]


def test_an_end_is_allowed_only_where_the_grammar_may_end() -> None:
    constraint = compiler().compile(make("regex", "[0-9]{2,3}"))
    assert not constraint.advance(ord("1"))
    assert not constraint.allowed()[258]
    assert not constraint.advance(ord("2"))
    assert constraint.allowed()[258]
    assert not constraint.allowed()[256]
    assert constraint.advance(258)


def test_on_the_default_models_vocabulary() -> None:
    tokenizer = default_tokenizer()
    constraint = Compiler(Vocabulary.of(tokenizer, 49152)).compile(make("json_schema", PERSON))
    ended = [constraint.advance(i) for i in tokenizer.encode('{"name": "Ada", "age": 36}')]
    assert ended[-1]
    assert not any(ended[:-1])


@pytest.mark.parametrize("options", [["c"], ["hello world"], ["yes", "no"], ["1.5"]])
def test_forced_text_on_the_default_models_vocabulary(options: list[str], checked: GrammarChecker) -> None:
    tokenizer = default_tokenizer()
    structured = make("choice", options)
    constraint = Compiler(Vocabulary.of(tokenizer, 49152)).compile(structured)
    ids = tokenizer.encode(options[0])
    for i in ids[:-1]:
        assert constraint.allowed()[i]
        assert not constraint.advance(i)
    assert constraint.allowed()[ids[-1]]
    assert constraint.advance(ids[-1])
    checked.check(structured)


# -- refusals -------------------------------------------------------------------------------------

BAD = [
    ("json_schema", "{", "not valid JSON"),
    ("json_schema", {"type": "intger"}, "intger"),
    ("json_schema", "false", "give an object"),
    ("json_schema", {"$ref": "#"}, "cannot be used"),
    ("json_schema", {"$ref": "https://example.com/x.json"}, "cannot be used"),
    ("json_schema", "[" * 100_000, "cannot be used|not valid"),
    ("regex", "((", "unclosed group"),
    ("regex", "(?=a)b", "look-ahead"),
    ("lark", "start: b", "unknown name"),
    ("grammar", "", "cannot be used"),
    ("choice", [], "list of non-empty strings"),
    ("choice", {"a": 1}, "list of non-empty strings"),
    ("choice", ["a", ""], "list of non-empty strings"),
    ("xml", "", "kind 'xml'"),
    ("lark", "start: " + " | ".join(f'"a{i}"' for i in range(3000)), "3001 items"),
    ("json_schema", {"type": "object", "properties": {f"k{i}": {} for i in range(3000)}}, "items"),
    ("regex", "a" * (MAX_SPEC_CHARS + 1), "characters"),
    ("regex", "((a{1,100}){1,100}){1,100}", "nested repeats"),
    ("json_schema", {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}, "nested repeats"),
    ("lark", "start: /((a{1,100}){1,100}){1,100}/", "nested repeats"),
]


@pytest.mark.parametrize(("kind", "spec", "message"), BAD)
def test_bad_grammars_are_refused_with_the_reason(kind: str, spec: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        compiler().check(make(kind, spec))
    assert caught.value.param == "response_format"
    assert "\n" not in caught.value.message


def test_a_sampler_without_grammars_says_so() -> None:
    with pytest.raises(InputError, match="not available"):
        Sampler(V).start("a", [1], SamplingParams(structured=make("json_object", "")))


def test_a_grammar_that_fails_later_takes_the_token_from_its_request_alone() -> None:
    class Broken(Constraint):
        def __init__(self) -> None: ...
        def allowed(self) -> Any:
            raise HotprefixError("the grammar failed: too many states")

    class Breaks(Compiler):
        def compile(self, structured: StructuredOutput) -> Constraint:
            return Broken()

    sampler = Sampler(V, compiler=Breaks(Vocabulary.of(toy(CHATML), V)))
    sampler.start("a", [1], SamplingParams(structured=make("json_object", "")))
    sampler.start("b", [1], SamplingParams(temperature=0.0))
    x = torch.zeros(2, V)
    x[1, 5] = 1.0
    none, other = sampler.sample(["a", "b"], x)
    assert none == Unsampled("the grammar failed: too many states")
    assert other.token == 5


# -- the checker's process ------------------------------------------------------------------------


def test_good_and_bad_grammars_are_told_apart(checked: GrammarChecker) -> None:
    checked.check(make("json_schema", PERSON))
    checked.check(make("regex", "[a-z]+"))
    for _ in range(2):
        with pytest.raises(InputError, match="intger"):
            checked.check(make("json_schema", {"type": "intger"}))


def test_a_hostile_schema_is_stopped_and_the_next_one_is_checked(
    checked: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty intersected patterns would take minutes and gigabytes if they were compiled without limits."""
    monkeypatch.setattr(checker, "MAX_WALL_S", 2.0)
    patterns = [{"type": "string", "pattern": f"^.*a{{{i}}}.*$"} for i in range(1, 40)]
    with pytest.raises(InputError, match="simplify"):
        checked.check(make("json_schema", {"allOf": patterns}))
    checked.check(make("choice", ["a", "b"]))


def test_a_process_that_died_is_replaced(checked: GrammarChecker) -> None:
    checked.check(make("choice", ["c"]))
    assert checked._process is not None
    checked._process.kill()
    checked._process.wait()
    checked.check(make("choice", ["d"]))


def test_logits_that_leave_nothing_the_grammar_allows_are_an_error() -> None:
    sampler = Sampler(V, compiler=compiler())
    sampler.start("a", [1], SamplingParams(structured=make("regex", "ab"), temperature=0.0))
    x = torch.zeros(1, V)
    x[0, ord("a")] = -torch.inf
    (none,) = sampler.sample(["a"], x)
    assert isinstance(none, Unsampled)
    assert "no token is allowed" in none.error
    assert sampler.sample(["a"], torch.zeros(1, V))[0].token == ord("a")


def test_a_grammar_that_passes_the_check_and_fails_in_a_late_step_ends_its_own_row() -> None:
    """The grammar exceeds the library's own limit at a token that no check reaches."""
    structured = make("regex", "[b-c]{60}((a{1,100}){1,100}){1,100}")
    compiler().check(structured)
    sampler, alone = Sampler(V, compiler=compiler()), Sampler(V)
    bias = {ord("a"): 100.0, 258: -100.0}
    sampler.start("a", [1], SamplingParams(structured=structured, seed=1, logit_bias=bias))
    for one in (sampler, alone):
        one.start("b", [1], SamplingParams(seed=2, frequency_penalty=0.5))
    rng, failed = np.random.default_rng(3), []
    for step in range(150):
        x = torch.from_numpy(rng.normal(0, 2, (2, V)).astype(np.float32))
        first, second = sampler.sample(["a", "b"], x)
        assert [second] == alone.sample(["b"], x[1:])
        if isinstance(first, Unsampled):
            failed.append(step)
            assert "too many expressions" in first.error
    assert failed
    assert failed == list(range(failed[0], 150)), "it stays failed"


def test_a_request_that_brings_its_grammar_to_its_limits_harms_no_other_with_the_same_one() -> None:
    """Copies of a compiled grammar share the library's lexer, so a failure of the lexer would hit them
    all."""
    structured = make("regex", "[b-c]{60}((a{1,100}){1,100}){1,100}")
    own = Compiler(Vocabulary.of(toy(CHATML), V))
    bad, before = own.compile(structured), own.compile(structured)
    for byte in b"bc" * 25:
        before.advance(byte)

    def fail() -> None:
        for byte in b"b" * 60 + b"a" * 60:
            bad.allowed()
            bad.advance(byte)

    with pytest.raises(HotprefixError, match="too many expressions"):
        fail()
    assert set(np.flatnonzero(before.allowed())) == {*b"bc"}, "one that is on its way"
    for byte in b"bc" * 5:
        before.advance(byte)
    assert set(np.flatnonzero(before.allowed())) == {*b"a"}, "and is where it was"
    later = own.compile(structured)
    assert set(np.flatnonzero(later.allowed())) == {*b"bc"}, "one that comes later"
    with pytest.raises(HotprefixError, match="too many expressions"):
        bad.allowed()


@pytest.mark.parametrize("structured", [make("json_schema", PERSON), make("lark", LARK)])
def test_outputs_from_elsewhere_bring_a_grammar_to_where_they_left_it(structured: StructuredOutput) -> None:
    text = b'{"name":"ab","age":7}' if structured.kind == "json_schema" else b"<ab>"
    for cut in range(1, len(text) + 1):
        here, there = compiler().compile(structured), compiler().compile(structured)
        ended = [here.advance(byte) for byte in text[:cut]][-1]
        assert there.replay(list(text[:cut])) is ended
        assert ended == (cut == len(text))
        assert (there.allowed() == here.allowed()).all()


def test_outputs_that_a_grammar_does_not_allow_are_refused() -> None:
    for wrong in (b"<ad", b"<ab>>", b"x", b"nonee"):
        with pytest.raises(InputError, match="grammar does not allow the outputs so far") as refused:
            compiler().compile(make("lark", LARK)).replay(list(wrong))
        assert refused.value.param == "outputs"


def test_outputs_from_elsewhere_survive_a_lexer_that_others_brought_to_its_limits() -> None:
    structured = make("regex", "[b-c]{60}((a{1,100}){1,100}){1,100}")
    own = Compiler(Vocabulary.of(toy(CHATML), V))
    bad, other = own.compile(structured), own.compile(structured)

    def fail() -> None:
        for byte in b"b" * 60 + b"a" * 60:
            bad.allowed()
            bad.advance(byte)

    with pytest.raises(HotprefixError, match="too many expressions"):
        fail()
    assert not other.replay(list(b"bc" * 30))
    assert set(np.flatnonzero(other.allowed())) == {ord("a")}
