"""Token ids of text that follows other text. Owns: `Continuation`, what grammars encode with.

Rules:
1. Nothing is put before the text. A SentencePiece vocabulary puts a blank before a prompt, but a grammar's
   forced text is no prompt.
2. The bytes of the ids are the bytes of the text. Whatever the tokenizer would change (by a normalizer, or as
   an unknown character) is cut into the longest tokens that fit instead.
3. It never raises, because the grammar library cannot take an exception.
4. It can be pickled, so that the process that checks grammars and the engine encode alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer


class Continuation:
    """Encodes text that follows other text.

    bpe: the model's tokenizer without added tokens.
    tokens: each id's bytes.
    hidden: ids that no text becomes (control tokens).
    added: texts that are found before the BPE runs, with their ids.
    """

    def __init__(
        self, bpe: Tokenizer, tokens: Sequence[bytes], hidden: frozenset[int], added: Mapping[str, int]
    ) -> None:
        self._bpe = without_prefix(bpe)
        self._tokens = tokens
        self._hidden = hidden
        self._added = {text: i for text, i in added.items() if tokens[i] == text.encode()}

    def __call__(self, text: str) -> list[int]:
        """Ids whose bytes are those of the text. They stop before a byte that no token has."""
        ids = self._encode(text)
        wanted = text.encode("utf-8", "replace")
        return ids if b"".join(self._tokens[i] for i in ids) == wanted else self._longest_first(wanted)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            ids += self._plain(text[start : match.start()])
            ids.append(self._added[match[0]])
            start = match.end()
        return ids + self._plain(text[start:])

    def _plain(self, text: str) -> list[int]:
        return list(self._bpe.encode(text, add_special_tokens=False).ids) if text else []

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        longest_first = sorted(self._added, key=lambda text: -len(text))
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {token: i for i, token in enumerate(self._tokens) if token and i not in self._hidden}

    def _longest_first(self, rest: bytes) -> list[int]:
        longest = max(map(len, self._ids), default=0)
        ids: list[int] = []
        while rest:
            fitting = (n for n in range(min(longest, len(rest)), 0, -1) if rest[:n] in self._ids)
            size = next(fitting, 0)
            if not size:
                break
            ids.append(self._ids[rest[:size]])
            rest = rest[size:]
        return ids


def without_prefix(bpe: Tokenizer) -> Tokenizer:
    """The same tokenizer, except that it puts nothing before a text: it has no `Prepend` normalizer, and no
    `Metaspace` or `ByteLevel` pre-tokenizer that adds a blank. If the given one adds nothing, it is returned
    as it is."""
    parts = {"normalizer": _state(bpe.normalizer), "pre_tokenizer": _state(bpe.pre_tokenizer)}
    bare = {name: _without_prefix(part) for name, part in parts.items()}
    if bare == parts:
        return bpe
    spec = json.loads(bpe.to_str()) | bare
    return Tokenizer.from_str(json.dumps(spec))


def _state(component: Any) -> Any:
    """A normalizer or pre-tokenizer in the form in which tokenizer.json holds it."""
    return None if component is None else json.loads(component.__getstate__())


def _without_prefix(part: Any) -> Any:
    match part:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return {k: v for k, v in part.items() if k != "add_prefix_space"} | {"prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return part | {"add_prefix_space": False}
        case {"type": "Sequence", "normalizers": list(inner)}:
            return part | {"normalizers": [p for p in map(_without_prefix, inner) if p is not None]}
        case {"type": "Sequence", "pretokenizers": list(inner)}:
            return part | {"pretokenizers": [_without_prefix(p) for p in inner]}
    return part
