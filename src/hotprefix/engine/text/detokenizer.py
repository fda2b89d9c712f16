"""Token by token to text. Owns: `Detokenizer`, which never splits a character.

Rules: bytes that may still become a character are held. These are three at most, because no incomplete
character of UTF-8 is longer. Bytes that cannot become one are U+FFFD at once. The joined text equals
`Tokenizer.decode` of all ids, except that it keeps the blank that a SentencePiece vocabulary puts first,
because an output continues a prompt.
"""

from __future__ import annotations

import codecs

from hotprefix.engine.text.tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes one request's output. Ids that the tokenizer lacks (padding of the logits) have no text."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._table = tokenizer.token_bytes
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = _new_decoder(errors="replace")

    def push(self, token: int) -> str:
        """Characters that are complete with this token."""
        if token in self._hidden or token >= len(self._table):
            return ""
        return self._decoder.decode(self._table[token])

    def flush(self) -> str:
        """The bytes that were held, as U+FFFD. The decoder is empty afterwards."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
