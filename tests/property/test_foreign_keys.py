"""Whatever another engine stores, copies and removes, in blocks of any size and several groups of layers: the
pages that count are those that brute force finds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hotprefix.records.kvwire import Cleared, PageEvent
from hotprefix.router.foreign_keys import ForeignKeys
from tests.support.feeds import MODEL
from tests.support.foreign_engine import Blocks, Naive, applied

A = tuple(range(1, 14))
PROMPTS = st.sampled_from([A, A[:8], (*A[:5], *A), (*A[:3], *A), (9, *A)])
ANY_PROMPTS = st.lists(st.integers(0, 9), min_size=1, max_size=12).map(lambda end: (*A[:3], *end))
SALTS = st.sampled_from([None, None, None, "x"])
PICKED = st.sampled_from(
    [*map(frozenset, ([], [0], [1], [2, 3], [0, 1, 2], range(2, 14)))] + [frozenset(range(14))] * 4
)
NOW = st.integers(0, 3).map(lambda n: n > 0)
MEDIA = st.sampled_from(["GPU", "GPU", "GPU", "CPU", "STORAGE", None])


class ForeignMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([2, 4]), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=2),
        as_bytes=st.booleans(),
    )  # fmt: skip
    def build(self, page_size: int, sizes: list[int], as_bytes: bool) -> None:
        self.groups = [Blocks(size, group, 7, as_bytes) for group, size in enumerate(sizes)]
        self.keys = ForeignKeys(MODEL, page_size, limit=10_000)
        self.naive = Naive(page_size, dict(enumerate(self.groups)))
        self.prompts: list[tuple[tuple[int, ...], str | None]] = []
        self.pages = set()  # type: ignore[var-annotated]
        self.batch: list[PageEvent] = []

    def told(self, event: PageEvent, now: bool = False) -> None:
        """An event of the batch. now: the batch is complete."""
        self.batch.append(event)
        if now:
            self.naive.apply(self.batch)
            self.pages = applied(self.pages, self.keys.apply(tuple(self.batch)))
            self.batch = []

    @rule(
        prompt=PROMPTS, salt=SALTS, medium=MEDIA, everywhere=st.booleans(),
        skip=st.sampled_from([0, 0, 0, 1, 2]), now=NOW,
    )  # fmt: skip
    def store(
        self, prompt: tuple[int, ...], salt: str | None, medium: str | None, everywhere: bool, skip: int,
        now: bool,
    ) -> None:  # fmt: skip
        """A prompt's blocks, the first ones left out if they were told before; in all groups or in one."""
        self.prompts.append((prompt, salt))
        for blocks in self.groups[: None if everywhere else 1]:
            if skip < len(blocks.names(prompt, salt)):
                self.told(blocks.stored(prompt, salt, medium, first=skip), now)

    @rule(
        which=st.integers(0, 9), group=st.integers(0, 1), medium=MEDIA, picked=PICKED,
        now=NOW,
    )  # fmt: skip
    def remove(self, which: int, group: int, medium: str | None, picked: frozenset[int], now: bool) -> None:
        if self.prompts:
            prompt, salt = self.prompts[which % len(self.prompts)]
            blocks = self.groups[group % len(self.groups)]
            names = [each for at, each in enumerate(blocks.names(prompt, salt)) if at in picked]
            self.told(blocks.removed(names, medium), now)

    @rule(which=st.integers(0, 9), group=st.integers(0, 1), picked=PICKED)
    def copy(self, which: int, group: int, picked: frozenset[int]) -> None:
        """Blocks go to another medium, perhaps after they have left the first."""
        if self.prompts:
            prompt, salt = self.prompts[which % len(self.prompts)]
            blocks = self.groups[group % len(self.groups)]
            names = [each for at, each in enumerate(blocks.names(prompt, salt)) if at in picked]
            self.told(blocks.copied(names, "CPU"), True)

    @rule(really=st.integers(0, 4).map(lambda n: n == 0))
    def clear(self, really: bool) -> None:
        if really:
            self.told(Cleared())

    @rule(really=st.integers(0, 4).map(lambda n: n == 0))
    def lose(self, really: bool) -> None:
        """What is there is not known any more, and what blocks hold is."""
        if really:
            self.batch = []
            self.keys.lose()
            self.naive.here, self.pages = set(), set()

    @invariant()
    def the_pages_are_those_that_brute_force_finds(self) -> None:
        if not self.batch:
            assert self.pages == self.naive.pages()
            assert self.pages == applied(set(), self.keys.everything())


TestForeignKeys = pytest.mark.timeout(200)(ForeignMachine.TestCase)
TestForeignKeys.settings = settings(max_examples=250, stateful_step_count=30, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    limit=st.integers(1, 12), size=st.integers(1, 6),
    steps=st.lists(st.tuples(ANY_PROMPTS, st.integers(0, 3)), min_size=1, max_size=40),
)  # fmt: skip
def test_within_its_limit_it_may_forget_and_never_says_what_is_not_there(
    limit: int, size: int, steps: list[tuple[tuple[int, ...], int]]
) -> None:
    blocks, keys = Blocks(size), ForeignKeys(MODEL, 2, limit)
    naive, pages = Naive(2, {0: blocks}), set()  # type: ignore[var-annotated]
    told: list[tuple[int, ...]] = []
    for prompt, what in steps:
        if not blocks.names(prompt):
            continue
        if what and told:  # an earlier prompt loses its tail
            event: PageEvent = blocks.removed(blocks.names(told[sum(prompt) % len(told)])[what - 1 :])
        else:
            told.append(prompt)
            event = blocks.stored(prompt)
        naive.apply([event])
        pages = applied(pages, keys.apply((event,)))
        assert pages <= naive.pages()
        assert len(keys._live) <= limit
        assert len(keys._past) <= limit // 4
        known = {id(block): block for block in (*keys._live.values(), *keys._past.values())}
        ends = [id(page.parts[-1]) for block in known.values() for page in block.pages or ()]
        assert set(ends) <= set(known), "a page is remembered whose last block is forgotten"
