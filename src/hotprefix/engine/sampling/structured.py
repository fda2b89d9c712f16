"""Grammars the output must follow. Owns: compiling a `StructuredOutput` and the mask of allowed tokens.

Rules: llguidance does the parsing. A grammar is compiled once and copied for each request that uses it (n >
1, repeated schemas). A fault of a schema is an InputError when the schema is compiled or checked; if a
grammar exceeds the same limits later, only that request ends with an error. This module does not import
torch, because the checker's process (checker.py) imports this module.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from hotprefix.engine.params import StructuredOutput
from hotprefix.engine.sampling.json_schema import JSON_OPTIONS, adapted
from hotprefix.errors import HotprefixError, InputError

if TYPE_CHECKING:
    from hotprefix.engine.text.tokenizer import Tokenizer

MAX_SPEC_CHARS = 200_000
_PARAM = "response_format"
_KEPT_GRAMMARS = 64
WALKED_TOKENS = 48
_TAKEN_AT_ONCE = 32
Sizes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Vocabulary:
    """What a grammar needs of a tokenizer. It can be pickled if `encode` can.

    tokens: each id's bytes.
    size: the width of the logits, at least the number of tokens.
    special_ids: ids that stand for no text.
    eos_ids: end-of-sequence ids.
    encode: turns a text that the output must contain into ids with the same bytes.
    """

    tokens: Sequence[bytes]
    size: int
    special_ids: Sequence[int]
    eos_ids: Sequence[int]
    encode: Callable[[str], list[int]]

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int) -> Vocabulary:
        """The vocabulary of a tokenizer, for logits of width `size`."""
        return cls(
            tokenizer.token_bytes,
            size,
            sorted(tokenizer.special_ids),
            sorted(tokenizer.eos_ids),
            tokenizer.continuation,
        )


class Constraint:
    """One request's place in its grammar.

    Copies of a compiled grammar share the library's lexer, and one copy can bring that lexer to its limits
    for all of them. So if a copy fails, `renew` compiles a grammar for it alone, in which it takes the same
    tokens again. Only if it fails there too has the request failed.
    """

    def __init__(self, matcher: LLMatcher, size: int, renew: Callable[[], LLMatcher]) -> None:
        self._matcher = matcher
        self._size = size
        self._renew = renew
        self._shares = True
        self._taken: list[int] = []

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which ids may come next, bool [V]. Raises HotprefixError if the grammar has exceeded a limit."""
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error() and self._shares:
            self._go_again()
            bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise HotprefixError(f"the grammar failed: {_one_line(self._matcher.get_error())}")
        mask = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little", count=self._size)
        return mask.astype(np.bool_)

    def advance(self, token: int) -> bool:
        """Take an allowed token. True if nothing but an end may follow."""
        self._taken.append(token)
        return bool(self._matcher.consume_token(token) and self._matcher.is_stopped())

    def replay(self, tokens: Sequence[int]) -> bool:
        """Take tokens that were sampled elsewhere, at the grammar's start. True if nothing but an end may
        follow. Raises InputError if the grammar does not allow them."""
        self._taken.extend(tokens)
        if not self._take_again():
            self._go_again()
        if self._matcher.is_error():
            problem = _one_line(self._matcher.get_error())
            raise InputError(f"the grammar does not allow the outputs so far: {problem}", param="outputs")
        return bool(self._matcher.is_stopped())

    def _go_again(self) -> None:
        self._shares = False
        self._matcher = self._renew()
        self._take_again()

    def _take_again(self) -> bool:
        """Take all tokens, from the grammar's start. Whether the grammar allows them."""
        for start in range(0, len(self._taken), _TAKEN_AT_ONCE):
            self._matcher.compute_bitmask()  # allots one step's budget, which the tokens taken next use up
            if not self._matcher.consume_tokens(self._taken[start : start + _TAKEN_AT_ONCE]):
                return False
        return True


class Compiler:
    """Compiles grammars for one vocabulary. Thread-safe: a thread that compiles one grammar delays no thread
    that asks for another."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # of the table
        self._loading = threading.Lock()  # of the tokenizer

    def compile(self, structured: StructuredOutput) -> Constraint:
        """A fresh constraint at the grammar's start. Raises InputError."""
        matcher = self._matcher(structured)
        return Constraint(
            matcher.deep_copy(), self._vocabulary.size, lambda: self._renewed(structured, matcher)
        )

    def pending(self, structured: StructuredOutput | None) -> Callable[[], None] | None:
        """A function for another thread that prepares this grammar, so that `compile` is quick afterwards;
        None if `compile` is quick already."""
        if structured is None or self._get(structured) is not None:
            return None

        def prepare() -> None:
            self._matcher(structured)

        return prepare

    def check(self, structured: StructuredOutput) -> None:
        """Compile the grammar, and take some steps in it under the limits that every step of a request has.
        Raises InputError if either fails."""
        matcher = self._build(structured)
        for prefer in (_shortest, _longest):
            if problem := _walked(matcher.deep_copy(), self._sizes, prefer):
                raise _refusal(structured, problem)

    def _matcher(self, structured: StructuredOutput) -> LLMatcher:
        matcher = self._get(structured)
        if matcher is None:
            matcher = self._build(structured)
            with self._lock:
                self._compiled[structured] = matcher
                if len(self._compiled) > _KEPT_GRAMMARS:
                    self._compiled.popitem(last=False)
        return matcher

    def _renewed(self, structured: StructuredOutput, failed: LLMatcher) -> LLMatcher:
        """A matcher that shares nothing with the failed one. Later requests share nothing with that
        either."""
        with self._lock:
            if self._compiled.get(structured) is failed:
                del self._compiled[structured]
        return self._build(structured)

    def _get(self, structured: StructuredOutput) -> LLMatcher | None:
        with self._lock:
            matcher = self._compiled.get(structured)
            if matcher is not None:
                self._compiled.move_to_end(structured)
            return matcher

    def _build(self, structured: StructuredOutput) -> LLMatcher:
        grammar = grammar_text(structured)
        with self._loading:
            tokenizer = self._tokenizer
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise _refusal(structured, matcher.get_error())
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return _ll_tokenizer(self._vocabulary)

    @cached_property
    def _sizes(self) -> Sizes:
        """Bytes of each id's text, [V]."""
        v = self._vocabulary
        sizes = np.zeros(v.size, dtype=np.int64)
        sizes[: len(v.tokens)] = [len(token) for token in v.tokens]
        return sizes


def _shortest(sizes: Sizes) -> int:
    """The last of the ids with the shortest text: a letter rather than the quotation mark that would end a
    string."""
    return int(np.flatnonzero(sizes == sizes.min())[-1])


def _longest(sizes: Sizes) -> int:
    return int(sizes.argmax())


def _walked(matcher: LLMatcher, sizes: Sizes, prefer: Callable[[Sizes], int]) -> str:
    """What goes wrong in the first steps of an output whose tokens `prefer` picks by their sizes; "" if
    nothing does. The steps are needed because many faults show only in a mask, and a nested repeat exceeds
    the limits only after some dozens of short tokens."""
    for _ in range(WALKED_TOKENS):
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little", count=sizes.size))
        if matcher.is_error() or matcher.is_stopped() or not len(allowed):
            break
        if not matcher.consume_token(int(allowed[prefer(sizes[allowed])])):
            break
    return str(matcher.get_error()) if matcher.is_error() else ""


def grammar_text(structured: StructuredOutput) -> str:
    """The grammar in llguidance's own form, not yet checked. Raises InputError."""
    spec = structured.spec
    if len(spec) > MAX_SPEC_CHARS:
        raise InputError(
            f"{structured.kind} of {len(spec)} characters: give at most {MAX_SPEC_CHARS}", param=_PARAM
        )
    make = _GRAMMARS.get(structured.kind)
    if make is None:
        known = ", ".join(_GRAMMARS)
        raise InputError(f"structured output of kind {structured.kind!r}: give one of {known}", param=_PARAM)
    try:
        return str(make(structured))
    except (ValueError, RecursionError) as error:  # a lone surrogate, a number that is none, a deep schema
        raise _refusal(structured, str(error)) from None


def _schema(structured: StructuredOutput) -> str:
    schema = _json(structured)
    if not isinstance(schema, dict):
        raise InputError(f"json_schema is {type(schema).__name__}: give an object", param=_PARAM)
    text = json.dumps(adapted(schema), ensure_ascii=False, allow_nan=False)
    return str(LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS))


def _choices(structured: StructuredOutput) -> str:
    options = _json(structured)
    if not isinstance(options, list) or not options or not all(isinstance(o, str) and o for o in options):
        raise InputError("choice: give a JSON list of non-empty strings", param=_PARAM)
    # One terminal: as rules, each option would be an item of a row of the parser, which holds at most 2000.
    quoted = (json.dumps(option, ensure_ascii=False).replace("\x7f", r"\u007f") for option in options)
    return "start: CHOICE\nCHOICE: " + " | ".join(quoted)


_GRAMMARS: dict[str, Callable[[StructuredOutput], str]] = {
    "json_schema": _schema,
    "json_object": lambda _: LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=JSON_OPTIONS),
    "regex": lambda given: LLMatcher.grammar_from_regex(given.spec),
    "grammar": lambda given: LLMatcher.grammar_from_lark(given.spec),
    "lark": lambda given: LLMatcher.grammar_from_lark(given.spec),
    "choice": lambda given: LLMatcher.grammar_from_lark(_choices(given)),
}


def _json(structured: StructuredOutput) -> Any:
    try:
        return json.loads(structured.spec)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{structured.kind} is not valid JSON: {error}", param=_PARAM) from None


def _refusal(structured: StructuredOutput, problem: str) -> InputError:
    return InputError(f"{structured.kind} cannot be used: {_one_line(problem)}", param=_PARAM)


def _one_line(problem: str) -> str:
    """llguidance's message, without the parser state and call stack that may follow it."""
    words = re.split("<state>|<backtrace>|<non-verbose/>", problem)[0]
    hint = ": simplify it, nested repeats multiply" if "too many expressions" in words else ""
    return (" ".join(words.split())[:300] or "unknown problem") + hint


def _limits() -> LLParserLimits:
    return LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)


def _ll_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    class Source:
        """The attributes that llguidance's wrapper asks for."""

        eos_token_id = vocabulary.eos_ids[0]
        bos_token_id = None
        tokens = vocabulary.tokens
        special_token_ids = vocabulary.special_ids

        def __call__(self, text: str) -> list[int]:
            return vocabulary.encode(text)

    return LLTokenizer(
        TokenizerWrapper(Source()), n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_ids)
    )
