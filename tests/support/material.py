"""Prompts for benches without a tokenizer."""

from __future__ import annotations

from hotprefix.bench.bench_prompts import Ids, _digest


class SyntheticMaterial:
    """Ids without a tokenizer: a function of (namespace, position), in [0, vocab)."""

    def __init__(self, vocab: int = 50_000) -> None:
        self._vocab = vocab

    def _ids(self, tokens: int, *key: object) -> Ids:
        return tuple(_digest(*key, at) % self._vocab for at in range(tokens))

    def document(self, namespace: str, tokens: int) -> Ids:
        return self._ids(tokens, "document", namespace)

    def question(self, namespace: str, number: int, tokens: int) -> Ids:
        return self._ids(tokens, "question", namespace, number)
