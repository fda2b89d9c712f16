"""L2's memory. Owns: `HostPool`, one contiguous run of bytes per page, and the copies to and from L1.

Rules: which page holds what is the kernel's business; `carry` makes a plan's copies in the plan's
order (stores are read out first, then saves, then restores), so no page is overwritten before it was
read. On CUDA the memory is pinned and copies are queued on the stream the forward pass uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotprefix.engine.kvpool import KVPool
from hotprefix.errors import ConfigError
from hotprefix.kernel.plan import Copy, StepPlan

Put = Callable[[bytes, bytes], object]


@dataclass(slots=True)
class LinkCounters:
    """Bytes and seconds per physical link of the host."""

    saved_bytes: int = 0
    saved_s: float = 0.0
    restored_bytes: int = 0
    restored_s: float = 0.0


class HostPool:
    """`pages` pages beside an L1 pool. put(key, payload): takes pages on their way to L3, copied."""

    def __init__(self, pool: KVPool, pages: int, put: Put | None = None) -> None:
        """Raises ConfigError where the memory is not there."""
        self._layers = [
            tensor.view(pool.pages, -1)
            for pair in zip(pool.keys, pool.values, strict=True)
            for tensor in pair
        ]
        self._width = self._layers[0].shape[1]
        self._put = put
        self.pages = pages
        self.links = LinkCounters()
        device = self._layers[0].device
        try:
            self._memory = torch.empty(
                (pages, len(self._layers) * self._width),
                dtype=self._layers[0].dtype,
                pin_memory=device.type == "cuda",
            )
        except RuntimeError as error:
            raise ConfigError(
                f"no host memory for {pages} KV pages: ask for fewer L2 tokens", param="l2_tokens"
            ) from error
        self.page_bytes = self._memory[0].nbytes

    def carry(self, plan: StepPlan) -> float:
        """Make the plan's copies; returns the seconds its restores took."""
        for store in plan.stores:
            if self._put is not None:
                self._put(store.key, self.read(store.page))
        if plan.saves:
            begun = time.perf_counter()
            self._save(plan.saves)
            self.links.saved_bytes += len(plan.saves) * self.page_bytes
            self.links.saved_s += time.perf_counter() - begun
        if not plan.restores:
            return 0.0
        begun = time.perf_counter()
        self._restore(plan.restores)
        took = time.perf_counter() - begun
        self.links.restored_bytes += len(plan.restores) * self.page_bytes
        self.links.restored_s += took
        return took

    @torch.inference_mode()
    def _save(self, copies: Sequence[Copy]) -> None:
        source, target = self._indices(copies)
        on_device = source.to(self._layers[0].device)
        for i, layer in enumerate(self._layers):
            block = self._memory[:, i * self._width : (i + 1) * self._width]
            block[target] = layer[on_device].to(self._memory.device)

    @torch.inference_mode()
    def _restore(self, copies: Sequence[Copy]) -> None:
        source, target = self._indices(copies)
        on_device = target.to(self._layers[0].device)
        gathered = self._memory[source].to(self._layers[0].device)
        for i, layer in enumerate(self._layers):
            layer[on_device] = gathered[:, i * self._width : (i + 1) * self._width]

    @staticmethod
    def _indices(copies: Sequence[Copy]) -> tuple[Tensor, Tensor]:
        """(sources, targets), int64[n]."""
        return torch.tensor([copy.source for copy in copies]), torch.tensor([copy.target for copy in copies])

    def read(self, page: int) -> bytes:
        """One page's bytes, copied."""
        return self._memory[page].view(torch.uint8).numpy().tobytes()

    def write(self, page: int, payload: bytes) -> None:
        """Fill a page that the kernel has just given to a fetched payload."""
        self._memory[page].view(torch.uint8).copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
