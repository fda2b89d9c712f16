"""Text to token ids and back. Owns: `Tokenizer`, and the rule of where added tokens apply.

Rules: plain text never becomes a control token, whatever it holds. Text becomes one only if all of the
token's characters are said to be a template's. BOS is put first at most once. A token is a fixed string of
bytes, so decoding is joining: nothing depends on neighbours, and streaming equals decoding at once. A
tokenizer is immutable and safe to use from several threads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, Self

from hotprefix.engine.text.continuation import Continuation
from hotprefix.engine.text.source import AddedToken, TokenizerSource, from_directory, from_gguf
from hotprefix.engine.text.turn_ends import with_turn_ends
from hotprefix.errors import InputError, ModelLoadError

Special = Literal["none", "markup", "template"]

_MARKUP = re.compile(r"<[^\s<>]+>|\[[A-Z_/]+\]")
_BLANKS = re.compile(r"\s*")
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """One model's tokenizer.

    size: ids are 0 to size - 1. The model's logits may be wider.
    special_ids: control tokens, which skip_special_tokens hides.
    control: texts that plain input never turns into their token: those of control tokens, and of added tokens
    that look like markup (<tool_call>, [INST]).
    templates: chat templates by name.
    """

    def __init__(self, source: TokenizerSource) -> None:
        self._source = source
        self._bpe = source.bpe
        self._inner = source.inner
        self._added = {a.content: a for a in source.added}
        self.special_ids = frozenset(a.id for a in source.added if a.special)
        self.special = frozenset(a.content for a in source.added if a.special)
        self.control = self.special.union(c for c in self._added if _MARKUP.fullmatch(c))
        self.bos_id = source.bos_id
        self.eos_id = source.eos_id
        self.eos_ids = source.eos_ids
        self.add_bos = source.add_bos
        self.templates = source.templates
        self.token_bytes = _byte_table(source)
        self.size = len(self.token_bytes)
        self._everywhere = _pattern([a for a in source.added if a.content not in self.control])
        control = [a for a in source.added if a.content in self.control]
        self._patterns = {
            "none": None,
            "markup": _pattern([a for a in control if not a.special]),
            "template": _pattern(control),
        }

    @classmethod
    def load(cls, path: Path) -> Self:
        """The tokenizer of a Hugging Face directory or a GGUF file. Raises ModelLoadError."""
        source = with_turn_ends(from_directory(path) if path.is_dir() else from_gguf(path))
        if not source.eos_ids:
            raise ModelLoadError(f"{path} names no end-of-sequence token: set eos_token in its configuration")
        return cls(source)

    def encode(self, text: str, *, special: Special = "none", bos: bool = False) -> list[int]:
        """Ids of a text.

        special: "none" for anything that a user wrote; "markup" for what a model wrote (tokens like
        <tool_call>, no control tokens); "template" for a prompt whose control tokens are meant.
        bos: put BOS first if the model wants one and the text does not begin with it.
        """
        ids = self.encode_runs(text, [(len(text), special)])
        if bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_runs(self, text: str, runs: Iterable[tuple[int, Special]]) -> list[int]:
        """Ids of a text whose parts mean different things. runs: lengths that cover the text, each with what
        that part may hold (see `encode`). A token that would reach from one part into another is plain text.
        Neighbouring plain text is tokenized as one."""
        patterns = ((self._patterns[special], length) for length, special in runs)
        return self._spelled(text, patterns, self._plain, begins=True)

    def _plain(self, text: str, begins: bool) -> list[int]:
        """Ids of text without control tokens. begins: whether it begins the prompt."""
        return self._spelled(text, [(self._everywhere, len(text))], self._words, begins)

    def _spelled(
        self,
        text: str,
        runs: Iterable[tuple[re.Pattern[str] | None, int]],
        between: Callable[[str, bool], list[int]],
        begins: bool,
    ) -> list[int]:
        """Ids of the tokens that the runs' patterns find, each within its run, and of the text between these
        tokens."""
        ids: list[int] = []
        done = 0
        for first, last, token in self._found(text, runs):
            ids += between(text[done:first], begins and done == 0)
            ids.append(token.id)
            done = last
        return ids + between(text[done:], begins and done == 0)

    def _found(
        self, text: str, runs: Iterable[tuple[re.Pattern[str] | None, int]]
    ) -> Iterator[tuple[int, int, AddedToken]]:
        """The tokens in a text and where they are. The blanks that a token takes along count as its own,
        whichever run they are in."""
        at = done = 0
        for pattern, length in runs:
            for match in pattern.finditer(text, at, at + length) if pattern else ():
                token = self._added[match[0]]
                first, last = match.span()
                if first < done:
                    continue
                if token.lstrip:
                    first = done + len(text[done:first].rstrip())
                if token.rstrip and (blanks := _BLANKS.match(text, last)):
                    last = blanks.end()
                yield first, last, token
                done = last
            at += length

    def _words(self, text: str, begins: bool) -> list[int]:
        if not text:
            return []
        bpe = self._bpe if begins else self._inner
        # A batch of one, because only this call lets other threads run meanwhile.
        return list(bpe.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids. Bytes that are not UTF-8 become U+FFFD. Ids that the tokenizer lacks have no text,
        because the model's vocabulary may be wider and only the model knows by how much. Raises InputError
        for a negative id."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        shown = [i for i in ids if i < self.size and i not in hidden]
        if min(shown, default=0) < 0:
            raise InputError(f"token id {min(shown)}: ids start at 0", param="tokens")
        text = b"".join(self.token_bytes[i] for i in shown).decode("utf-8", "replace")
        return text[1:] if self._strips_first and text.startswith(" ") else text

    @cached_property
    def _strips_first(self) -> bool:
        """Whether encoding puts a blank before the first word, which decoding has to remove."""
        ids = self._words("x", True)
        return bool(ids) and self.token_bytes[ids[0]].startswith(b" ")

    def token_id(self, content: str) -> int | None:
        """The id of the added token with this text."""
        token = self._added.get(content)
        return None if token is None else token.id

    @cached_property
    def continuation(self) -> Continuation:
        """Encodes what a grammar makes an output say. An added token that is no control token becomes that
        one token, as in what the model has learnt to say."""
        added = {text: token.id for text, token in self._added.items() if not token.special}
        return Continuation(self._inner, self.token_bytes, self.special_ids, added)

    def text_of(self, token_id: int | None) -> str:
        """A token's own text (what templates call bos_token and eos_token); "" for None."""
        return "" if token_id is None else self.token_bytes[token_id].decode("utf-8", "replace")


def _pattern(added: Sequence[AddedToken]) -> re.Pattern[str] | None:
    """Finds added tokens; if several start at one place, the longest. The blanks that they take along are not
    part of the pattern, because in a long run of blanks each would begin a search to the run's end."""
    longest_first = sorted((a.content for a in added), key=lambda content: -len(content))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _byte_table(source: TokenizerSource) -> tuple[bytes, ...]:
    vocab = source.bpe.get_vocab(with_added_tokens=False)
    size = 1 + max([*vocab.values(), *(a.id for a in source.added)])
    table = [b""] * size
    alphabet = {character: byte for byte, character in _byte_alphabet()}
    for text, i in vocab.items():
        table[i] = _bytes_of(text, alphabet if source.byte_level else None)
    for a in source.added:
        table[a.id] = a.content.encode()
    return tuple(table)


def _bytes_of(text: str, alphabet: dict[str, int] | None) -> bytes:
    if alphabet is None:
        byte = _FALLBACK_BYTE.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()
    try:
        return bytes([alphabet[c] for c in text])
    except KeyError:  # a token that is not written in the byte alphabet stands for itself
        return text.encode()


def _byte_alphabet() -> Iterator[tuple[int, str]]:
    """GPT-2's visible character for each byte: the byte's own if it is printable, otherwise one from U+0100
    on."""
    moved = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            yield byte, chr(byte)
        else:
            yield byte, chr(256 + moved)
            moved += 1
