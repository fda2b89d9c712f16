"""What an engine without a model says. Owns: `Words`, the tokens that it uses, and `Answer`, one request's.

Rules:
1. The next token is a pure function of all tokens before it (prompt and answer alike), and of the seed if the
   request samples and has one. So every worker with this tokenizer says the same, and an answer that another
   worker has begun goes on as it would have there.
2. Answers are made of plain words, so that text and tokens go back and forth without change: a conversation
   that sends an answer back has the same tokens again.
3. An answer without `max_tokens` ends by itself, after MEAN_OUTPUTS tokens on average. With it, it has that
   many, unless a stop string comes up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Self

from hotprefix.engine.params import SamplingParams
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.errors import ProtocolError
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.plan import Chunk

MEAN_OUTPUTS: Final = 256
_FIRST = re.compile(rb"[A-Z][a-z]+")
_FURTHER = re.compile(rb" [a-z]+")


@dataclass(frozen=True, slots=True)
class Words:
    """Ids of tokens.

    first: words that begin a text.
    further: words that follow another word.
    spoken: both.
    end: ends an answer.
    """

    first: tuple[int, ...]
    further: tuple[int, ...]
    spoken: frozenset[int]
    end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """The words of a tokenizer. If it has none, every token that stands for text is one."""
        plain = [
            i for i in range(tokenizer.size) if i not in tokenizer.special_ids and tokenizer.token_bytes[i]
        ]
        first = tuple(i for i in plain if _FIRST.fullmatch(tokenizer.token_bytes[i])) or tuple(plain)
        further = tuple(i for i in plain if _FURTHER.fullmatch(tokenizer.token_bytes[i])) or tuple(plain)
        return cls(first, further, frozenset(first + further), min(tokenizer.eos_ids))


class Answer:
    """One request's answer. prompt: all tokens that are known when the request begins."""

    __slots__ = ("_ends", "_hash", "_known", "_last", "_least", "_seed", "_words")

    def __init__(self, words: Words, prompt: Sequence[int], params: SamplingParams) -> None:
        self._words = words
        self._hash = blake2b(tk.encode(prompt), digest_size=8)
        self._known, self._last = len(prompt), prompt[-1]
        seed = None if params.greedy else params.seed
        self._seed = b"" if seed is None else seed.to_bytes(8, "little", signed=True)
        self._ends = params.max_tokens is None and not params.ignore_eos
        self._least = len(prompt) + params.min_tokens

    def replay(self, outputs: Sequence[int]) -> None:
        """Outputs that were sampled elsewhere follow the prompt."""
        self._hash.update(tk.encode(outputs))
        self._known, self._last = self._known + len(outputs), outputs[-1]

    def after(self, chunk: Chunk) -> int:
        """The token that follows a chunk. Raises ProtocolError if tokens between those that are known and the
        chunk's were never told."""
        if chunk.start > self._known:
            raise ProtocolError(
                f"request {chunk.request}: {self._known} tokens are known, its chunk begins at {chunk.start}"
            )
        new = chunk.tokens[(self._known - chunk.start) * tk.TOKEN_BYTES :]
        if new:
            self._hash.update(new)
            self._known, self._last = chunk.stop, int(tk.view(new)[-1])
        drawn = self._hash.copy()
        drawn.update(self._seed)
        number = int.from_bytes(drawn.digest(), "little")
        words = self._words
        if self._ends and number % MEAN_OUTPUTS == 0 and self._known + 1 >= self._least:
            return words.end
        among = words.further if self._last in words.spoken else words.first
        return among[number // MEAN_OUTPUTS % len(among)]
