"""Checks of what moves between tiers. Owns: `TierWatch`.

Rules: it sees what a driver sees (plans, their outcomes, which L2 pages got payloads) and keeps its own
account of which L2 page may be read; it asks the kernel for counters and page states only.
"""

from __future__ import annotations

from hotprefix.kernel.cache.pages import PageState
from hotprefix.kernel.plan import StepPlan
from tests.support.drive import Driver


class TierWatch:
    """One driver's plans, one after another."""

    def __init__(self, driver: Driver) -> None:
        self._d = driver
        self._readable: set[int] = set()
        self._first_stored: dict[bytes, bytes] = {}
        self.saved = self.restored = self.stored = self.landed = 0
        self.restarted: set[str] = set()

    def _forget_freed(self) -> None:
        host = self._d.kernel._s.host
        assert host is not None
        pool = host.tier.pool
        self._readable = {page for page in self._readable if pool.state(page) is not PageState.FREE}

    def planned(self, plan: StepPlan) -> None:
        """Call with every plan before it is executed."""
        self.restarted |= set(plan.retracted)
        if self._d.config.tiers is None:
            assert not (plan.stores)
            assert not (plan.saves)
            assert not (plan.restores)
            assert not (plan.fetches)
            assert not (plan.touches)
            return
        self._forget_freed()
        targets = [copy.target for copy in plan.saves]
        sources = {copy.source for copy in plan.restores}
        read_out = {store.page for store in plan.stores}
        assert len(targets) == len(set(targets)), "a page of L2 is written twice in one step"
        assert not set(targets) & sources, "a page of L2 is restored in the step that fills it"
        # A store is read out before the saves run, but its page must not be given away either.
        assert not set(targets) & read_out
        assert sources <= self._readable, "a page of L2 is read that was never filled"
        assert read_out <= self._readable
        self._readable -= set(targets)
        there = {*self._d.executor.stored, *self._first_stored}  # the store may have lost some since
        for store in plan.stores:
            assert store.parent is None or store.parent in there, "a page is stored before its parent"
            there.add(store.key)
        assert self._d.config.tiers.storage or not (plan.stores or plan.fetches or plan.touches)

    def executed(self, plan: StepPlan, ok: bool) -> None:
        """Call after every commit."""
        if not ok:
            self.restarted |= {chunk.request for chunk in plan.chunks}
            self.restarted |= {seq.request.id for seq in self._d.kernel._s.queue if seq.retractions}
            return
        self._readable |= {copy.target for copy in plan.saves}
        self.saved += len(plan.saves)
        self.restored += len(plan.restores)
        self.stored += len(plan.stores)

    def check_stored(self) -> None:
        """A key never names two contents."""
        for key, payload in self._d.executor.stored.items():
            assert self._first_stored.setdefault(key, payload) == payload, "two contents under one key"

    def protected(self) -> set[int]:
        """Pages of L2 that may not be given away now."""
        host = self._d.kernel._s.host
        assert host is not None
        return {page for node in host.tier.tree.walk_nodes() if node.pins for page in node.pages}

    def landed_on(self, pages: list[int], protected: set[int]) -> None:
        """Call with the L2 pages that fetched payloads were written to, and what was protected before."""
        assert len(set(pages)) == len(pages)
        assert not set(pages) & protected, "a payload lands on a page in use"
        self._readable |= set(pages)
        self.landed += len(pages)

    def check_counters(self) -> None:
        """Pages per link are the pages moved by steps that ran."""
        host, _ = self._d.kernel.tier_counters
        moved = (self.saved, self.restored, self.stored, self.landed)
        assert (host.saved, host.restored, host.stored, host.landed) == moved
