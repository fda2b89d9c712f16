"""Text to token ids and back. Owns: `Tokenizer`, and the rule of where added tokens apply.

Rules: plain text never becomes a control token, whatever it holds (handed case 17); only text that is
said to be a template's does. BOS is put first at most once (handed case 16). A token is a fixed string
of bytes, so decoding is joining: nothing depends on neighbours, and streaming equals decoding at once.
Immutable and safe to use from several threads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal

from hotprefix.engine.text.continuation import Continuation
from hotprefix.engine.text.source import AddedToken, TokenizerSource, from_directory, from_gguf
from hotprefix.engine.text.turns import with_turn_ends
from hotprefix.errors import InputError, ModelLoadError

Special = Literal["none", "template"]

_MARKUP = re.compile(r"<[^\s<>]+>|\[[A-Z_/]+\]")
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """One model's tokenizer.

    size: ids are 0 to size - 1 (the model's logits may be wider). special_ids: control tokens, hidden
    by skip_special_tokens. control: texts that plain input never turns into their token: the control
    tokens, and added ones that look like markup (<tool_call>, [INST]). templates: chat templates by
    name.
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
        self._everywhere = _pattern(a for a in source.added if a.content not in self.control)
        self._in_template = _pattern(source.added)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """From a Hugging Face directory or a GGUF file. Raises ModelLoadError."""
        source = with_turn_ends(from_directory(path) if path.is_dir() else from_gguf(path))
        if not source.eos_ids:
            raise ModelLoadError(f"{path} names no end-of-sequence token: set eos_token in its configuration")
        return cls(source)

    def encode(
        self, text: str, *, special: Special = "none", bos: bool = False, guard: str = ""
    ) -> list[int]:
        """Ids of a text. special: "none" for anything a user wrote, "template" for a prompt whose
        control tokens are meant. bos: put BOS first where the model wants one and the text has none.
        guard: a character that is dropped after the control tokens have been found (template.py)."""
        pattern = self._in_template if special == "template" else self._everywhere
        ids: list[int] = []
        start = 0
        for match in pattern.finditer(text) if pattern else ():
            added = self._added[match[0].strip() if match[0] not in self._added else match[0]]
            before = text[start : match.start()]
            ids += self._plain(before.rstrip() if added.lstrip else before, start == 0, guard)
            ids.append(added.id)
            start = match.end()
        ids += self._plain(text[start:], start == 0, guard)
        if bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def _plain(self, text: str, first: bool, guard: str) -> list[int]:
        text = text.replace(guard, "") if guard else text
        if not text:
            return []
        bpe = self._bpe if first else self._inner
        # A batch of one: only this call lets other threads run meanwhile.
        return list(bpe.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD. Raises InputError for an unknown id."""
        ids = list(ids)
        wrong = next((i for i in ids if not 0 <= i < self.size), None)
        if wrong is not None:
            raise InputError(f"token id {wrong}: the tokenizer has ids 0 to {self.size - 1}", param="tokens")
        hidden = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes[i] for i in ids if i not in hidden).decode("utf-8", "replace")
        return text[1:] if self._strips_first and text.startswith(" ") else text

    @cached_property
    def _strips_first(self) -> bool:
        """Whether encoding puts a blank before the first word, which decoding takes off again."""
        ids = self._plain("x", True, "")
        return bool(ids) and self.token_bytes[ids[0]].startswith(b" ")

    def token_id(self, content: str) -> int | None:
        """Id of an added token by its text."""
        token = self._added.get(content)
        return None if token is None else token.id

    @cached_property
    def continuation(self) -> Continuation:
        """Encodes what an output must say. An added token that is no control token is one token there,
        as it is in what the model has learnt to say."""
        added = {text: token.id for text, token in self._added.items() if not token.special}
        return Continuation(self._inner, self.token_bytes, self.special_ids, added)

    def text_of(self, token_id: int | None) -> str:
        """A token's own text, "" for None (what templates call bos_token and eos_token)."""
        return "" if token_id is None else self.token_bytes[token_id].decode("utf-8", "replace")


def _pattern(added: Iterable[AddedToken]) -> re.Pattern[str] | None:
    """Finds added tokens, the longest where several start at one place. Blanks that a token takes along
    before it are not searched for: each blank of a long run would begin a search to the run's end."""
    parts = [
        re.escape(a.content) + (r"\s*" if a.rstrip else "")
        for a in sorted(added, key=lambda a: -len(a.content))
    ]
    return re.compile("|".join(parts)) if parts else None


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
    """GPT-2's visible character for each byte: itself where printable, else from U+0100 on."""
    moved = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            yield byte, chr(byte)
        else:
            yield byte, chr(256 + moved)
            moved += 1
