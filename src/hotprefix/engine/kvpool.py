"""Device memory for keys and values. Owns: `KVPool`, one pair of tensors per layer.

Rules: allocated once, never grown; who uses which page is the kernel's business. Contents of a page
mean nothing until a forward pass has written them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotprefix.engine.model.config import ModelConfig
from hotprefix.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVPool:
    """keys[i], values[i]: layer i's [pages * page_size, kv_heads, head_dim] in the model's dtype."""

    pages: int
    page_size: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls, config: ModelConfig, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVPool:
        """Zeroed pool. Raises ConfigError where the memory is not there."""

        def layers() -> tuple[Tensor, ...]:
            shape = (pages * page_size, config.kv_heads, config.head_dim)
            return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers))

        try:
            return cls(pages, page_size, layers(), layers())
        except RuntimeError as error:
            need = pages * page_bytes(config, page_size, dtype)
            raise ConfigError(
                f"no memory for {pages} KV pages of {page_size} tokens ({need} bytes): ask for fewer tokens",
                param="kv_tokens",
            ) from error

    @property
    def page_bytes(self) -> int:
        """Size of one page over all tensors."""
        return self.bytes() // self.pages

    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes one page takes over all layers, keys and values."""
    return 2 * config.layers * page_size * config.kv_heads * config.head_dim * dtype.itemsize
