"""A small model with layer groups. Owns: `GroupExecutor` and its oracle.

Rules: as `fake.FakeExecutor`, with, beside (or instead of) full attention, two layers per sliding window
whose KV really lies in frames, and a recurrent state that really lies in slots and checkpoints. Each layer
reads only what such a layer may read, through the page tables and frames the kernel named, so a frame
that is missing, stale or somebody else's changes the text. A frame given anew is no longer the page's
that had it before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import LayerGroup
from hotprefix.kernel.plan import Chunk, StepOutcome, StepPlan
from tests.support.fake import U64, VOCAB, FakeExecutor, _choose, _layer0, _layer1, _mix, _weights

_SEED = 0x5EED
_MASK = (1 << 64) - 1


def _window_sums(values: np.ndarray, first: int, window: int) -> np.ndarray:
    """For positions first.., the weighted sum over the last `window` of values [0, n)."""
    weighted = np.concatenate([[U64(0)], np.cumsum(values * _weights(len(values)), dtype=U64)])
    stops = np.arange(first + 1, len(values) + 1)
    return weighted[stops] - weighted[np.maximum(stops - window, 0)]


def _upper(lower: np.ndarray, first: int, window: int) -> np.ndarray:
    return _mix(_window_sums(lower, first, window) + U64(11))


def _advance(state: int, ids: Sequence[int]) -> int:
    for token in ids:
        state = ((state ^ int(token)) * 0x9E3779B97F4A7C15 + 0x1234567) & _MASK
        state ^= state >> 29
    return state


def _say(parts: Sequence[int]) -> int:
    return _advance(_SEED, [part & 0xFFFFFFFF for part in parts]) % VOCAB


def cold_run(prompt: list[int], outputs: int, groups: Sequence[LayerGroup], full: bool) -> list[int]:
    """The uncached output."""
    known = list(prompt)
    with np.errstate(over="ignore"):
        for _ in range(outputs):
            ids, positions = np.array(known), np.arange(len(known))
            parts = [_choose(_layer1(_layer0(ids, positions), 0))] if full else []
            for group in groups:
                if group.window is None:
                    parts.append(_advance(_SEED, known))
                    continue
                assert group.window is not None
                upper = _upper(_layer0(ids, positions), 0, group.window)
                parts.append(int(_window_sums(upper, len(known) - 1, group.window)[0]))
            known.append(_say(parts))
    return known[len(prompt) :]


class GroupExecutor(FakeExecutor):
    """full: whether there is full attention beside the groups."""

    def __init__(
        self, total_pages: int, page_size: int, max_running: int, groups: Sequence[LayerGroup], full: bool
    ) -> None:
        super().__init__(total_pages, page_size, max_running)
        self.groups, self.full = groups, full
        self.frame_of = [np.full(total_pages, -1, dtype=np.int64) for _ in groups]
        # One more frame, never given: what a page without one reads.
        self.pools = [np.full((2, (g.frames + 1) * page_size), 0xDEAD, dtype=U64) for g in groups]
        self.checkpoints = [[-1] * g.frames for g in groups]
        self.states: dict[str, tuple[int, int]] = {}

    def _run(self, plan: StepPlan, stop_at: frozenset[int]) -> StepOutcome:
        for given in plan.frames:
            of = self.frame_of[given.group]
            of[of == given.frame] = -1
            of[given.page] = given.frame
        fails, self.fail_next = self.fail_next, 0
        outcome = super()._run(plan, stop_at)
        self.fail_next = fails
        parts = [[outcome.sampled.get(c.request, 0)] if self.full else [] for c in plan.chunks]
        for i, group in enumerate(self.groups):
            run = self._recurrent if group.window is None else self._window
            for part, value in zip(parts, run(i, group, plan.chunks), strict=True):
                part.append(value)
        if self.fail_next:
            self.fail_next -= 1
            self._spoil(plan.chunks)
            return StepOutcome(ok=False, error="planned failure")
        sampled = {c.request: _say(p) for c, p in zip(plan.chunks, parts, strict=True) if c.samples}
        return StepOutcome(sampled=sampled, stopped=frozenset(r for r, t in sampled.items() if t in stop_at))

    def _spoil(self, chunks: Sequence[Chunk]) -> None:
        """A failed step leaves nothing of worth where it wrote."""
        for chunk in chunks:
            self.states.pop(chunk.request, None)
            for i, group in enumerate(self.groups):
                if group.window is not None:
                    self.pools[i][:, self._where(i, chunk)[chunk.start :]] = 0xBAD
                else:
                    self._keep(i, chunk, -1)

    def _keep(self, i: int, chunk: Chunk, state: int) -> None:
        """Write a checkpoint where the chunk stops at a page's end that has a frame."""
        frame = self.frame_of[i][self.tables[chunk.row][chunk.stop // self.page - 1]]
        if chunk.stop % self.page == 0 and frame >= 0:
            self.checkpoints[i][frame] = state

    def _where(self, i: int, chunk: Chunk) -> np.ndarray:
        pages = np.array(self.tables[chunk.row], dtype=np.int64)
        return self._slots(self.frame_of[i][pages].tolist(), chunk.stop)

    def _window(self, i: int, group: LayerGroup, chunks: Sequence[Chunk]) -> list[int]:
        pool, window = self.pools[i], group.window
        assert window is not None
        where = [self._where(i, chunk) for chunk in chunks]
        for chunk, slots in zip(chunks, where, strict=True):
            assert (slots[chunk.start :] >= 0).all(), "every position that is computed has a frame"
            ids = tk.view(chunk.tokens)
            pool[0, slots[chunk.start :]] = _layer0(ids, np.arange(chunk.start, chunk.stop))
        for chunk, slots in zip(chunks, where, strict=True):
            pool[1, slots[chunk.start :]] = _upper(pool[0, slots], chunk.start, window)
        return [
            int(_window_sums(pool[1, slots], chunk.stop - 1, window)[0])
            for chunk, slots in zip(chunks, where, strict=True)
        ]

    def _recurrent(self, i: int, group: LayerGroup, chunks: Sequence[Chunk]) -> list[int]:
        states = [self._resume(i, chunk) for chunk in chunks]  # read all before any is written
        found = []
        for chunk, before in zip(chunks, states, strict=True):
            state = _advance(before, tk.view(chunk.tokens).tolist())
            self.states[chunk.request] = (chunk.stop, state)
            self._keep(i, chunk, state)
            found.append(state)
        return found

    def _resume(self, i: int, chunk: Chunk) -> int:
        """The state before a chunk: the request's own, or the checkpoint at the page boundary."""
        at, state = self.states.get(chunk.request, (-1, 0))
        if at == chunk.start:
            return state
        if chunk.start == 0:
            return _SEED
        assert chunk.start % self.page == 0
        frame = self.frame_of[i][self.tables[chunk.row][chunk.start // self.page - 1]]
        return self.checkpoints[i][frame] if frame >= 0 else -1
