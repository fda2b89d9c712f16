"""L2's memory. Owns: `HostPool`, one contiguous run of bytes per page, and the copies to and from L1.

Rules: the kernel decides which page holds what. `carry` makes a plan's copies in the plan's order (stores are
read out first, then saves, then restores), so no page is overwritten before it was read. Copies move units
whose content does not matter, one layer's keys or values of one page: numpy moves each with one memory copy,
while torch's indexing looks at every number. A plan's pages cross to another device in one piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotprefix.engine.kvpool import KVPool
from hotprefix.engine.link_totals import Copied
from hotprefix.errors import ConfigError
from hotprefix.kernel.plan import Copy, StepPlan

Put = Callable[[bytes, bytes | None, bytes], object]
Units = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]


class HostPool:
    """`pages` pages beside an L1 pool. put(key, parent, payload): takes a copy of a page on its way to L3."""

    def __init__(self, pool: KVPool, pages: int, put: Put | None = None) -> None:
        """Raises ConfigError if there is not enough memory."""
        self._layers = [
            tensor.view(pool.pages, -1).view(torch.uint8)
            for pair in zip(pool.keys, pool.values, strict=True)
            for tensor in pair
        ]
        self._width = self._layers[0].shape[1]
        self._put = put
        self.pages = pages
        self.page_bytes = len(self._layers) * self._width
        self.links = Copied()
        try:
            self._memory: npt.NDArray[np.uint8] = np.empty((pages, self.page_bytes), dtype=np.uint8)
            self._memory.fill(0)  # the first touch costs many times a copy: not in a step
        except MemoryError as error:
            raise ConfigError(
                f"no host memory for {pages} KV pages: ask for fewer L2 tokens", param="l2_tokens"
            ) from error
        unit = np.dtype((np.void, self._width))
        self._units: Units = self._memory.view(unit)
        on_host = self._layers[0].device.type == "cpu"
        self._device_units = [layer.numpy().view(unit)[:, 0] for layer in self._layers] if on_host else None

    def carry(self, plan: StepPlan) -> float:
        """Make the plan's copies; returns the seconds its restores took."""
        for store in plan.stores:
            if self._put is not None:
                self._put(store.key, store.parent, self.read(store.page))
        if plan.saves:
            begun = time.perf_counter()
            self._save(*_indices(plan.saves))
            self.links.saved_bytes += len(plan.saves) * self.page_bytes
            self.links.saved_s += time.perf_counter() - begun
        if not plan.restores:
            return 0.0
        begun = time.perf_counter()
        self._restore(*_indices(plan.restores))
        took = time.perf_counter() - begun
        self.links.restored_bytes += len(plan.restores) * self.page_bytes
        self.links.restored_s += took
        return took

    @torch.inference_mode()
    def _save(self, sources: Indices, targets: Indices) -> None:
        if self._device_units is not None:
            for i, layer in enumerate(self._device_units):
                self._units[targets, i] = layer[sources]
            return
        index = self._on_device(sources)
        gathered = torch.stack([layer[index] for layer in self._layers], dim=1)
        self._memory[targets] = gathered.flatten(1).cpu().numpy()

    @torch.inference_mode()
    def _restore(self, sources: Indices, targets: Indices) -> None:
        if self._device_units is not None:
            for i, layer in enumerate(self._device_units):
                layer[targets] = self._units[sources, i]
            return
        index = self._on_device(targets)
        gathered = self._on_device(self._memory[sources]).view(-1, len(self._layers), self._width)
        for tensor, block in zip(self._layers, gathered.unbind(1), strict=True):
            tensor[index] = block

    def _on_device(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._layers[0].device)

    def read(self, page: int) -> bytes:
        """One page's bytes, copied."""
        payload: bytes = self._memory[page].tobytes()
        return payload

    def write(self, page: int, payload: bytes) -> None:
        """Fill a page that the kernel has just given to a fetched payload. payload: `page_bytes` bytes."""
        self._memory[page] = np.frombuffer(payload, dtype=np.uint8)


def _indices(copies: Sequence[Copy]) -> tuple[Indices, Indices]:
    """(sources, targets), [n]."""
    return np.array([copy.source for copy in copies]), np.array([copy.target for copy in copies])
