"""Content behind placeholder ids (images, audio): equal ids are no hit, equal content is (rule 14)."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest

from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import KernelConfig
from hotprefix.kernel.kernel import Kernel
from hotprefix.kernel.plan import StepOutcome
from hotprefix.kernel.request import ContentSpan, Request, content_key

IMAGE = 99


def digest(n: int, same_bytes: int = 0) -> bytes:
    """Digest number n; its first `same_bytes` bytes are those of every other."""
    return bytes(same_bytes) + hashlib.sha256(str(n).encode()).digest()[same_bytes:]


class Runs:
    """Runs requests one by one; says how much each took from the cache."""

    def __init__(self, page_size: int) -> None:
        self.page = page_size
        self.kernel = Kernel(KernelConfig(total_pages=4000 // page_size, page_size=page_size))
        self.count = 0

    def __call__(self, ids: list[int], *spans: ContentSpan, outputs: int = 1) -> int:
        self.count += 1
        tokens = tk.encode(ids)
        key, limit = content_key(tokens, spans, self.page)
        name = str(self.count)
        self.kernel.submit(Request(name, tokens, outputs, cache_key=key, share_limit=limit), 0.0)
        cached = 0
        while self.kernel.has_work:
            plan = self.kernel.plan(0.0)
            outcome = StepOutcome(sampled={c.request: 7 for c in plan.chunks if c.samples})
            for progress in self.kernel.commit(plan, outcome, 0.0):
                cached = progress.cached
        self.kernel.check()
        return cached


@pytest.mark.parametrize("page", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("text", [0, 1, 15, 16, 20, 70])
@pytest.mark.parametrize("length", [1, 3, 8, 100])
def test_only_the_same_content_is_hit_and_the_text_before_it_is_always_shared(
    page: int, text: int, length: int
) -> None:
    """Digests here differ in their last byte alone, so a match of a part of them would show."""
    run = Runs(page)
    ids = [*range(text), *[IMAGE] * length, *range(40)]
    first = ContentSpan(text, text + length, digest(1, same_bytes=31))
    other = ContentSpan(text, text + length, digest(2, same_bytes=31))
    assert run(ids, first) == 0
    assert run(ids, other) == text // page * page
    assert run(ids) == text // page * page, "the same ids without any content"
    whole = (len(ids) - 1) // page * page
    again = run(ids, first)
    assert again == (whole if page >= 8 else text // page * page)
    assert run(ids, other) == again


def test_seventy_thousand_digests_never_meet() -> None:
    """Image hashes cut short met at this count. Every key differs from its page of the span on, also where
    the page has room for one placeholder only."""
    for text in (0, 15, 20):
        tokens = tk.encode([*range(text), *[IMAGE] * 50])
        at = text // 16 * 16 * tk.TOKEN_BYTES
        pages = set()
        for n in range(70_000):
            key, limit = content_key(tokens, [ContentSpan(text, text + 50, digest(n, same_bytes=24))], 16)
            assert limit is None
            pages.add(key[at : at + 16 * tk.TOKEN_BYTES])
        assert len(pages) == 70_000


def test_two_contents_in_one_page_are_told_apart_by_order_place_and_length() -> None:
    tokens = tk.encode([IMAGE] * 32)
    a, b = digest(1), digest(2)
    spans = [
        [ContentSpan(0, 4, a), ContentSpan(4, 8, b)],
        [ContentSpan(0, 4, b), ContentSpan(4, 8, a)],
        [ContentSpan(0, 4, a), ContentSpan(5, 8, b)],
        [ContentSpan(0, 3, a), ContentSpan(4, 8, b)],
        [ContentSpan(0, 4, a), ContentSpan(4, 9, b)],
        [ContentSpan(0, 4, a)],
        [],
    ]
    keys = sorted(content_key(tokens, s, 16)[0] for s in spans)
    assert all(x != y for x, y in pairwise(keys))
    assert content_key(tokens, spans[0][::-1], 16) == content_key(tokens, spans[0], 16)


def test_a_page_completed_by_outputs_is_hit_by_the_next_turn() -> None:
    """The digest covers only ids it replaces, so a page has one key however it came about."""
    run = Runs(16)
    span = ContentSpan(5, 9, digest(1))
    assert run([*range(5), *[IMAGE] * 4, *range(20, 23)], span, outputs=30) == 0
    turn2 = [*range(5), *[IMAGE] * 4, *range(20, 23), *[7] * 30, 50]
    assert run(turn2, span) == 32


@pytest.mark.parametrize("span", [(-1, 4), (4, 4), (5, 3), (60, 70)])
def test_a_span_outside_the_prompt_is_refused(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="content at"):
        content_key(tk.encode(range(64)), [ContentSpan(*span, digest(1))], 16)
    with pytest.raises(ValueError, match="4 bytes"):
        content_key(tk.encode(range(64)), [ContentSpan(0, 4, b"1234")], 16)
