"""Checks that hold for every plan. Owns: `PlanWatch` (limits, order) and `OnceWatch` (single flight).

Rules: both see only what a driver sees (plans, progress) and, for residence, the kernel's page states; so
neither repeats the kernel's own reasoning.
"""

from __future__ import annotations

from hotprefix.kernel import tokens as tk
from hotprefix.kernel.cache.pages import PageState
from hotprefix.kernel.config import Capabilities, Publication
from hotprefix.kernel.plan import Chunk, StepPlan
from tests.support.drive import Driver

PageKey = tuple[str | None, bytes]


class PlanWatch:
    """One driver's plans, one after another."""

    def __init__(self, driver: Driver, capabilities: Capabilities | None = None) -> None:
        self._d = driver
        able = (capabilities or Capabilities()).same_step_reads
        self._reads_planned = able and driver.config.publication is Publication.SCHEDULE
        self._tables: dict[int, list[int]] = {}
        self._next: dict[str, int] = {}
        self._rows: dict[int, str] = {}
        self._unsure: set[str] = set()  # retracted with a failed step if they read its pages

    def planned(self, plan: StepPlan) -> None:
        """Call with every plan before it is executed."""
        config = self._d.config
        orderly = not config.preemption and not self._d.kernel.counters.failed_steps
        if orderly and plan.retracted:
            assert self._first() not in plan.retracted, "somebody always finishes"
        for name in plan.retracted:
            self._leave(name)
        for admission in plan.admissions:
            if self._rows.get(admission.row) in self._unsure or admission.request in self._unsure:
                self._leave(admission.request)
                self._leave(self._rows.get(admission.row))
            assert admission.row not in self._rows, "a row is given twice"
            assert 0 <= admission.row < config.max_running
            assert admission.cached < len(self._known(admission.request))
            self._rows[admission.row] = admission.request
            self._next[admission.request] = admission.cached
        assert len(self._rows) <= config.max_running
        assert sum(c.stop - c.start for c in plan.chunks) <= config.max_batched_tokens
        assert len({c.request for c in plan.chunks}) == len(plan.chunks)
        assert bool(plan.chunks) or not self._d.kernel.has_work, f"nothing planned: {plan.stall}"
        long_seen = False
        for chunk in plan.chunks:
            self._chunk(chunk)
            assert not (long_seen and not chunk.prefill), "decodes come first"
            long_seen |= len(chunk.tokens) > tk.TOKEN_BYTES
        self._reads(plan)
        if orderly:
            idle = set(self._rows.values()) - {c.request for c in plan.chunks}
            assert all(len(self._known(r)) - self._next[r] != 1 for r in idle), "no decode is left out"

    def _first(self) -> str:
        """The oldest of the most important running requests."""
        known, arrived = self._d.kernel._s.sequences, list(self._d.prompts)
        return min(self._rows.values(), key=lambda r: (known[r].request.priority, arrived.index(r)))

    def _reads(self, plan: StepPlan) -> None:
        """Pages that this very step computes are read by others only where that is sound and allowed."""
        page = self._d.config.page_size
        written: dict[int, str] = {}
        for chunk in plan.chunks:
            table = self._tables.setdefault(chunk.row, [])
            table[chunk.table_from :] = chunk.table
            written |= dict.fromkeys(table[chunk.start // page :], chunk.request)
        for chunk in plan.chunks:
            for physical in self._tables[chunk.row][: chunk.start // page]:
                assert self._reads_planned or physical not in written, "read in the step that computes it"

    def _chunk(self, chunk: Chunk) -> None:
        known, page = self._known(chunk.request), self._d.config.page_size
        assert self._rows[chunk.row] == chunk.request
        self._unsure.discard(chunk.request)
        assert chunk.start >= self._next[chunk.request], "positions are computed once"
        assert chunk.start < chunk.stop <= len(known)
        assert list(tk.view(chunk.tokens)) == known[chunk.start : chunk.stop]
        assert chunk.samples == (chunk.stop == len(known))
        assert chunk.table_from + len(chunk.table) == -(-chunk.stop // page)
        self._next[chunk.request] = chunk.stop

    def committed(self, plan: StepPlan, ok: bool) -> None:
        """Call after every commit."""
        if not ok:
            for chunk in plan.chunks:
                self._leave(chunk.request)
            self._unsure |= set(self._rows.values())
        for name in list(self._rows.values()):
            if name in self._d.finish:
                self._leave(name)

    def aborted(self, name: str) -> None:
        if name in self._d.finish:
            self._leave(name)

    def _known(self, name: str) -> list[int]:
        return self._d.prompts[name] + self._d.outputs[name]

    def _leave(self, name: str | None) -> None:
        for slot, holder in list(self._rows.items()):
            if holder == name:
                del self._rows[slot]
                self._unsure.discard(holder)


class OnceWatch:
    """No prompt page that a request could take from the cache is computed while a copy of it exists.

    A copy is a physical page that some request has computed in part or in full for the same tokens in the
    same namespace, and that has not become free since. salts, limits (reuse, share) by request as submitted.
    """

    def __init__(self, driver: Driver) -> None:
        self._d = driver
        self.salts: dict[str, str | None] = {}
        self.limits: dict[str, tuple[int | None, int | None]] = {}
        self._copies: dict[int, PageKey] = {}
        self._tables: dict[int, list[int]] = {}
        self.computed: dict[PageKey, int] = {}
        self._private: set[str] = set()

    def flushed(self) -> None:
        """Call before a flush: what was computed, and what those compute that run now, is for nobody else."""
        self._copies = {}
        self._private = {seq.request.id for seq in self._d.kernel._s.running}

    def planned(self, plan: StepPlan, resident_only: bool = False) -> None:
        """Call with every plan before it is executed. resident_only: ignore copies that are not published."""
        pool, page = self._d.kernel._s.l1.pool, self._d.config.page_size
        self._copies = {p: key for p, key in self._copies.items() if pool.state(p) is not PageState.FREE}
        mine: set[int] = set()
        self._private.difference_update(a.request for a in plan.admissions)
        for chunk in plan.chunks:
            table = self._tables.setdefault(chunk.row, [])
            table[chunk.table_from :] = chunk.table
            for physical in table[-(-chunk.start // page) :]:
                self._copies.pop(physical, None)  # evicted and given out again while this step was planned
        for chunk in plan.chunks:
            table = self._tables[chunk.row]
            known = self._d.prompts[chunk.request] + self._d.outputs[chunk.request]
            reuse, share = self.limits.get(chunk.request, (None, None))
            shareable = len(known) if share is None else share
            reusable = min(len(known) - 1, len(known) if reuse is None else reuse, shareable)
            for index in range(chunk.start // page, -(-chunk.stop // page)):
                physical = table[index]
                mine.add(physical)
                if (
                    chunk.request in self._private
                    or not chunk.prefill
                    or (index + 1) * page > min(shareable, len(known))
                ):
                    self._copies.pop(physical, None)
                    continue
                key = (self.salts.get(chunk.request), tk.encode(known[: (index + 1) * page]))
                for other, held in self._copies.items():
                    published = pool.state(other) is PageState.INDEXED or other in mine
                    if held == key and other != physical and (published or not resident_only):
                        again = f"{chunk.request} computes page {index}, a copy is page {other}"
                        assert (index + 1) * page > reusable, again
                self._copies[physical] = key
                fresh = min(chunk.stop, (index + 1) * page) - max(chunk.start, index * page)
                self.computed[key] = self.computed.get(key, 0) + fresh


class FlushWatch:
    """Nobody reads what was computed before a flush but those who were running then. A page is as old as the
    admission of the request that computed it, a copy as old as what it was copied from; what came from L3 has
    no age, because a flush leaves L3 alone."""

    def __init__(self, driver: Driver) -> None:
        self._d = driver
        self._flushes = 0
        self._since: dict[str, float] = {}
        self._pages: dict[int, float] = {}
        self._copies: dict[int, float] = {}
        self._tables: dict[int, list[int]] = {}
        land = driver.executor.land

        def landed(page: int, payload: object) -> None:
            self._copies.pop(page, None)
            land(page, payload)  # type: ignore[arg-type]

        driver.executor.land = landed  # type: ignore[method-assign]

    def flushed(self) -> None:
        self._flushes += 1

    def planned(self, plan: StepPlan) -> None:
        """Call with every plan before it is executed."""
        page = self._d.config.page_size
        self._since |= dict.fromkeys((a.request for a in plan.admissions), self._flushes)
        for copy in plan.saves:
            self._copies[copy.target] = self._pages[copy.source]
        for copy in plan.restores:
            self._pages[copy.target] = self._copies.get(copy.source, float("inf"))
        for chunk in plan.chunks:
            table = self._tables.setdefault(chunk.row, [])
            table[chunk.table_from :] = chunk.table
            written = table[chunk.start // page : -(-chunk.stop // page)]
            if chunk.start % page:
                written = written[1:]  # its first part is as old as it was
            self._pages |= dict.fromkeys(written, self._since[chunk.request])
        for chunk in plan.chunks:
            for physical in self._tables[chunk.row][: -(-chunk.start // page)]:
                assert self._pages[physical] >= self._since[chunk.request], "found after the flush"
