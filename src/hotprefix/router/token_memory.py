"""A tokenizer that remembers. Owns: `RememberingTokenizer`, the model's own that tokenizes only what is new.

Rules:
1. Its ids are those of `Tokenizer`, always. Control tokens are hard borders there: the text between two of
   them is tokenized by itself. So what is remembered is such a text and its ids, and no neighbour matters.
2. A long text between two control tokens is cut further, about every `PIECE` characters from its beginning,
   so that texts with equal beginnings have equal pieces. It is cut only where no token and no word of the
   pre-tokenizer can lie across, whatever stands around: before a blank behind a letter, or before a letter
   behind a line feed that no blank precedes. That holds for the pre-tokenizers that are known (`SPLITS`),
   which look no character back, and for vocabularies without a pre-tokenizer none of whose tokens goes
   across. With any other, nothing is cut.
3. Within `in_short` a thread refuses to tokenize more than a little that is new, so that the caller can do it
   where it holds up nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

from hotprefix.engine.text.source import SPLITS, TokenizerSource
from hotprefix.engine.text.tokenizer import Special, Tokenizer
from hotprefix.router.remembered import Remembered

PIECE = 512
LIMIT = 256 * 1024 * 1024
ID_BYTES, ENTRY_BYTES = 8, 300

_LETTER = "A-Za-z\u4e00-\u9fff"
_BEFORE_BLANK = re.compile(f"(?<=[{_LETTER}])(?= )")
_CUT = re.compile(f"(?<=[{_LETTER}])(?= )|(?<=\\S\n)(?=[{_LETTER}])")
_ACROSS = re.compile(f"[{_LETTER}]▁")


class TooMuchIsNew(Exception):
    """More than `in_short` allows would have to be tokenized."""


class RememberingTokenizer(Tokenizer):
    """See the module's rules. limit: bytes of all that is remembered."""

    def __init__(self, source: TokenizerSource, limit: int = LIMIT) -> None:
        super().__init__(source)
        self._known: Remembered[tuple[str, bool], list[int]] = Remembered(limit, _weight)
        self._numbers = list(range(self.size))  # one object for each id, however often it is remembered
        self._cut = cut_of(source, self.control)
        self._short = local()

    @contextmanager
    def in_short(self, characters: int) -> Iterator[None]:
        """In this thread at most so many characters that are new are tokenized. Raises TooMuchIsNew."""
        self._short.left = characters
        try:
            yield
        finally:
            self._short.left = None

    def encode_runs(self, text: str, runs: Iterable[tuple[int, Special]]) -> list[int]:
        plain = "".join(
            (text,)
        )  # pieces of a traced text are slow to make, and their origins stand in `runs`
        return super().encode_runs(plain, runs)

    def _plain(self, text: str, begins: bool) -> list[int]:
        if self._cut is None or len(text) <= PIECE:
            return self._once(text, begins)
        ids: list[int] = []
        for at, end in _pieces(text, self._cut):
            ids += self._once(text[at:end], begins and at == 0)
        return ids

    def _once(self, text: str, begins: bool) -> list[int]:
        if not text:
            return []
        found = self._known.get((text, begins))
        if found is None:
            left = getattr(self._short, "left", None)
            if left is not None:
                if len(text) > left:
                    raise TooMuchIsNew
                self._short.left = left - len(text)
            numbers = self._numbers
            found = [numbers[each] for each in super()._plain(text, begins)]
            self._known.put((text, begins), found)
        return found


def _weight(key: tuple[str, bool], ids: list[int]) -> int:
    return 4 * len(key[0]) + ID_BYTES * len(ids) + ENTRY_BYTES


def _pieces(text: str, cut: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Where the pieces begin and end. Each is as long as it must be, from `PIECE` characters on."""
    at = 0
    while True:
        found = cut.search(text, at + PIECE) if len(text) - at > PIECE else None
        if found is None:
            yield at, len(text)
            return
        yield at, found.start()
        at = found.start()


def cut_of(source: TokenizerSource, control: frozenset[str]) -> re.Pattern[str] | None:
    """Where a text may be cut (rule 2); None: nowhere. control: tokens that plain text never becomes."""
    spec: dict[str, Any] = json.loads(source.inner.to_str())
    if not _keeps_borders(spec.get("normalizer")):
        return None
    pre = spec.get("pre_tokenizer")
    cut: re.Pattern[str] | None = None
    if pre is not None and _splits(pre):
        cut = _CUT
    elif pre is None and not any(map(_ACROSS.search, spec["model"]["vocab"])):
        cut = _BEFORE_BLANK
    everywhere = [token for token in source.added if token.content not in control]
    if cut is None or any(t.lstrip or t.rstrip or _inside(cut, t.content) for t in everywhere):
        return None
    return cut


def _inside(cut: re.Pattern[str], content: str) -> bool:
    return any(0 < found.start() < len(content) for found in cut.finditer(content))


def _splits(pre: dict[str, Any]) -> bool:
    """Whether this pre-tokenizer always splits where `_CUT` cuts, and puts nothing before a text."""
    match pre:
        case {"type": "Sequence", "pretokenizers": list(parts)}:
            return any(map(_splits, parts)) and all(map(_is_harmless, parts))
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"}:
            return pattern in SPLITS and not pre.get("invert")
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return True
    return False


def _is_harmless(part: dict[str, Any]) -> bool:
    """Whether it splits only, and looks at nothing but single characters if it is none of the known ones."""
    match part:
        case {"type": "Digits"} | {"type": "ByteLevel", "add_prefix_space": False}:
            return True
    return _splits(part)


def _keeps_borders(normalizer: Any) -> bool:
    """Whether normalizing pieces is normalizing the whole. NFC is: neither a blank nor a letter of `_LETTER`
    is ever joined to what stands before it."""
    match normalizer:
        case None | {"type": "NFC"} | {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
            return True
        case {"type": "Sequence", "normalizers": list(parts)}:
            return all(map(_keeps_borders, parts))
    return False
