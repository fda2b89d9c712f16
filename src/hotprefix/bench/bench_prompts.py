"""The bench's prompt family. Owns: where a workload's token ids come from, with a tokenizer and without a
model.

Rules: prompts are deterministic (no randomness, no clock). A namespace's document is one endless stream of
ids, of which a prompt takes the first n, so a shorter document is a prefix of a longer one. Two namespaces
differ within their first tokens, so that neither warms the other. Lengths are always exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Protocol

Ids = tuple[int, ...]

_SITES = ("Brack Point", "Tarn Hollow", "Quill Bay", "Osier Flats", "Dun Ridge", "Marl Weir", "Ash Ferry")
_PARTS = ("wind vane", "rain gauge", "tide board", "signal lamp", "mooring chain", "fuel store", "slipway")
_CREWS = ("the day crew", "two keepers", "the harbour office", "a visiting fitter", "the night watch")
_FACTS = (
    "{site} stands {a} metres above the mean tide and sends {b} readings a day.",
    "The {part} at {site} was fitted in {year} and weighs {a} kilograms.",
    "{crew} at {site} checked the {part} {b} times in {year}.",
    "From {site} to the next station is a walk of {a} minutes; the path has {b} steps.",
    "In {year} the {part} of {site} was out of use for {b} days.",
    "{site} keeps {b} spare bulbs and {a} metres of rope beside the {part}.",
)
_FILLER = (
    " Name the paragraph by its number, keep to one short sentence and add nothing that is not written above."
)


class Material(Protocol):
    """Gives runs of token ids of an exact length."""

    def document(self, namespace: str, tokens: int) -> Ids:
        """The first `tokens` ids of the namespace's document."""
        ...

    def question(self, namespace: str, number: int, tokens: int) -> Ids:
        """Exactly `tokens` ids. Questions with different numbers differ within the first few ids."""
        ...


def _digest(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def _paragraph(namespace: str, number: int) -> str:
    pick = _digest(namespace, number)
    fact = _FACTS[pick % len(_FACTS)].format(
        site=_SITES[pick // 7 % len(_SITES)],
        part=_PARTS[pick // 51 % len(_PARTS)],
        crew=_CREWS[pick // 359 % len(_CREWS)],
        a=pick // 1801 % 180 + 3,
        b=pick // 324_001 % 60 + 2,
        year=1950 + pick // 20_000_003 % 70,
    )
    return f"{number}. {fact[0].upper()}{fact[1:]}\n"


class TextMaterial:
    """Numbered paragraphs of invented facts, and a question. encode: a tokenizer's (text -> ids, no special
    tokens). Paragraphs are encoded one by one, so that a document's prefix does not depend on its length."""

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        self._encode = encode

    def _stream(self, namespace: str) -> Iterator[int]:
        yield from self._encode(f"{namespace}: station book.\n")
        for number in count(1):
            yield from self._encode(_paragraph(namespace, number))

    def document(self, namespace: str, tokens: int) -> Ids:
        stream = self._stream(namespace)
        return tuple(next(stream) for _ in range(tokens))

    def question(self, namespace: str, number: int, tokens: int) -> Ids:
        part, site = _PARTS[number % len(_PARTS)], _SITES[number // len(_PARTS) % len(_SITES)]
        end = list(self._encode("\nAnswer:"))
        head = list(self._encode(f"\nQuestion {number}: what does the book say of the {part} of {site}?"))
        filler = list(self._encode(_FILLER))
        room = max(tokens - len(end), 0)
        while len(head) < room:
            head += filler
        return tuple((head[:room] + end)[:tokens])
