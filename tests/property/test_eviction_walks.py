"""Long random walks of the prefix tree beside the dictionary of pages, one policy at a time.

The state machine's short examples seldom reach a second round of the hand or a lapsed expectation; these
walks do.
"""

from __future__ import annotations

import random

import pytest

from hotprefix.kernel.config import Eviction
from tests.property.test_tree_machine import BY_CREATION, SPACES, TreeMachine

WALKS = 12
STEPS = 150
RUNNING = 3
CAPACITY = 16


def walk(eviction: Eviction, seed: int) -> None:
    """Requests come, use what they find, publish, end with or without an expectation; pages are evicted."""
    rng = random.Random(seed)
    m = TreeMachine()
    m.build(page_size=4, eviction=eviction)
    for _ in range(STEPS):
        pages = [rng.choice([0, 0, 1, 2]) for _ in range(rng.randint(1, 5))]
        begin(m, pages, rng)
        if rng.random() < 0.3:
            m.time_goes_by(seconds=rng.choice([1.0, 8.0, 30.0]))
        while len(m.pins) > rng.randint(0, RUNNING):
            end(m, rng)
        if rng.random() < 0.4:
            m.use(pages=[*pages, 0, 1][: rng.randint(1, 7)], space=SPACES[0], priority=0)
        if m.tree.total_pages > CAPACITY:
            m.evict(count=rng.randint(1, 6), waiting=[pages] if rng.random() < 0.2 else [])
    m.same_pages_and_counts()
    m.teardown()


def begin(m: TreeMachine, pages: list[int], rng: random.Random) -> None:
    """Take the pages that are there, and publish the rest in one piece, or in two if the oracle can follow
    that."""
    m.pin(wanted=[], space=SPACES[0])
    last = len(m.pins) - 1
    if m.eviction not in BY_CREATION:
        m.adopt(pick=last, pages=pages, priority=0)
    found = len(m.pins[last].key) // m.oracle.width
    planned = rng.random() < 0.1
    m.insert(pick=last, pages=pages[found:], priority=rng.randint(0, 2), planned=planned)
    if rng.random() < 0.3:
        m.insert(pick=last, pages=[rng.choice([0, 1])], priority=0, planned=False)
    m.step_fails() if planned and rng.random() < 0.5 else m.settle()


def end(m: TreeMachine, rng: random.Random) -> None:
    pick = rng.randrange(len(m.pins))
    if rng.random() < 0.6:
        m.ends_and_will_be_back(pick=pick, wait=rng.choice([0.0, 1.0, 3.0, 9.0]))
    else:
        m.unpin(pick=pick)


@pytest.mark.parametrize("eviction", Eviction)
def test_a_long_walk_loses_the_same_pages_in_the_same_order(eviction: Eviction) -> None:
    for seed in range(WALKS):
        walk(eviction, seed)
