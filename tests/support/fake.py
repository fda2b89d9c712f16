"""A model small enough to check every page. Owns: `FakeExecutor` and its oracle.

Rules: KV is really written to slots and really read through the page tables the kernel hands out. It
has two layers: layer 0 depends on token and position, layer 1 on everything layer 0 holds before it,
and the next token on everything in layer 1. So one wrong, stale, missing or foreign page anywhere
changes the text, and what a request must say is a pure function of its tokens (`next_token`).
"""

from __future__ import annotations

import numpy as np

from hotprefix.kernel import tokens as tk
from hotprefix.kernel.plan import Chunks, StepOutcome, StepPlan

U64 = np.uint64
VOCAB = 97


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> U64(31))) * U64(0x9E3779B97F4A7C15)
    return x ^ (x >> U64(29))


def _weights(n: int) -> np.ndarray:
    return _mix(np.arange(1, n + 1, dtype=U64)) | U64(1)


def _layer0(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return _mix(tokens.astype(U64) * U64(1_000_003) + positions.astype(U64) + U64(7))


def _layer1(layer0: np.ndarray, start: int) -> np.ndarray:
    """Layer-1 values of positions start.. given layer 0 of positions 0.. (as read)."""
    sums = np.cumsum(layer0 * _weights(len(layer0)), dtype=U64)
    return _mix(sums[start:])


def _choose(layer1: np.ndarray) -> int:
    return int(_mix(np.sum(layer1 * _weights(len(layer1)), dtype=U64).reshape(1))[0] % U64(VOCAB))


def next_token(tokens: list[int]) -> int:
    """What the fake model says after these tokens, with no cache at all."""
    with np.errstate(over="ignore"):
        layer0 = _layer0(np.array(tokens), np.arange(len(tokens)))
        return _choose(_layer1(layer0, 0))


def cold_run(prompt: list[int], outputs: int) -> list[int]:
    """The uncached output."""
    known = list(prompt)
    for _ in range(outputs):
        known.append(next_token(known))
    return known[len(prompt) :]


class FakeExecutor:
    """Executes plans over slots of two 64-bit layers. fail_next makes that many steps fail after
    having written half of their KV. unsampled: requests that no token can be sampled for."""

    def __init__(self, total_pages: int, page_size: int, max_running: int, host_pages: int = 0) -> None:
        self.page = page_size
        self.kv = np.full((2, total_pages * page_size), 0xDEAD, dtype=U64)
        self.tables: list[list[int]] = [[] for _ in range(max_running)]
        self.host = np.full((2, host_pages * page_size), 0xBEEF, dtype=U64)
        self.fail_next = 0
        self.unsampled: set[str] = set()
        self.computed = 0
        self.stored: dict[bytes, bytes] = {}

    def run(self, plan: StepPlan, stop_at: frozenset[int] = frozenset(), repeats: int = 1) -> StepOutcome:
        """stop_at: token ids that end a request. repeats: how often to run the plan's decodes, the tables
        as the plan gave them."""
        with np.errstate(over="ignore"):
            outcome = self._run(plan, stop_at)
            if repeats == 1 or not outcome.ok:
                return self._without(outcome)
            known = {r: tk.encode([t]) for r, t in outcome.sampled.items()}
            for i in range(1, repeats):
                chunks = tuple(
                    c._replace(start=c.start + i, tokens=known[c.request][-4:], table_from=len(t), table=())
                    for c in plan.chunks
                    for t in [self.tables[c.row]]
                )
                outcome = self._run(plan._replace(chunks=Chunks(chunks)), stop_at)
                known = {r: known[r] + tk.encode([t]) for r, t in outcome.sampled.items()}
            return StepOutcome(sampled=known, repeats=repeats)

    def _without(self, outcome: StepOutcome) -> StepOutcome:
        failed = {r: f"nothing can be said for {r}" for r in outcome.sampled if r in self.unsampled}
        sampled = {r: token for r, token in outcome.sampled.items() if r not in failed}
        return outcome._replace(sampled=sampled, stopped=outcome.stopped - failed.keys(), failed=failed)

    def _slots(self, table: list[int], stop: int) -> np.ndarray:
        positions = np.arange(stop)
        pages = np.array(table, dtype=np.int64)
        return pages[positions // self.page] * self.page + positions % self.page

    def _rows(self, page: int) -> slice:
        return slice(page * self.page, (page + 1) * self.page)

    def carry(self, plan: StepPlan) -> None:
        """The plan's moves between tiers, in the plan's order."""
        for store in plan.stores:
            self.stored[store.key] = self.host[:, self._rows(store.page)].tobytes()
        for copy in plan.saves:
            self.host[:, self._rows(copy.target)] = self.kv[:, self._rows(copy.source)]
        for copy in plan.restores:
            self.kv[:, self._rows(copy.target)] = self.host[:, self._rows(copy.source)]

    def land(self, page: int, payload: bytes) -> None:
        """Write a fetched payload to its L2 page."""
        self.host[:, self._rows(page)] = np.frombuffer(payload, dtype=U64).reshape(2, self.page)

    def _run(self, plan: StepPlan, stop_at: frozenset[int]) -> StepOutcome:
        self.carry(plan)
        slots = []
        for chunk in plan.chunks:
            table = self.tables[chunk.row]
            assert chunk.table_from <= len(table)
            table[chunk.table_from :] = chunk.table
            assert len(table) == -(-chunk.stop // self.page), "the table covers the chunk's end exactly"
            slots.append(self._slots(table, chunk.stop))
        for chunk, where in zip(plan.chunks, slots, strict=True):
            ids = tk.view(chunk.tokens)
            self.kv[0, where[chunk.start :]] = _layer0(ids, np.arange(chunk.start, chunk.stop))
        if self.fail_next:
            self.fail_next -= 1
            return StepOutcome(ok=False, error="planned failure")
        for chunk, where in zip(plan.chunks, slots, strict=True):
            self.kv[1, where[chunk.start :]] = _layer1(self.kv[0, where], chunk.start)
            self.computed += len(chunk.tokens) // 4
        sampled = {}
        for chunk, where in zip(plan.chunks, slots, strict=True):
            if chunk.samples:
                sampled[chunk.request] = _choose(self.kv[1, where])
        stopped = frozenset(r for r, t in sampled.items() if t in stop_at)
        return StepOutcome(sampled=sampled, stopped=stopped)
