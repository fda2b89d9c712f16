"""Device memory for keys and values. Owns: `KVPool`, one pair of tensors per layer.

Rules: the memory is allocated once and never grows. The kernel decides which request uses which page. The
content of a page means nothing until a forward pass has written it. Layers of a window group have that
group's frames in place of pages (kernel/cache/frames.py), and one frame more that is never written: its zeros
stand for what the window has passed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotprefix.engine.groups import pool_of_layers
from hotprefix.engine.model.config import ModelConfig
from hotprefix.errors import ConfigError
from hotprefix.kernel.config import LayerGroup


@dataclass(frozen=True, slots=True)
class KVPool:
    """The memory of one engine.

    keys[i], values[i]: of layer i, in the model's dtype: [pages * page_size, kv_heads, head_dim], or [(frames
    + 1) * page_size, kv_heads, head_dim] if its KV lies in a group's frames.
    group_of[i]: 0 if layer i's KV lies in pages, g + 1 if it lies in group g's frames; empty without groups.
    """

    pages: int
    page_size: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    groups: tuple[LayerGroup, ...] = ()
    group_of: tuple[int, ...] = ()

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        groups: tuple[LayerGroup, ...] = (),
    ) -> KVPool:
        """A zeroed pool. Raises ConfigError if there is not enough memory, or if a group is not a
        window's."""
        if any(group.window is None for group in groups):
            raise ConfigError("groups: the models here have windows and no recurrent state", param="groups")
        group_of = pool_of_layers(config, groups)
        sizes = [(pages, *(group.frames + 1 for group in groups))[place] for place in group_of]

        def layers() -> tuple[Tensor, ...]:
            row = (config.kv_heads, config.head_dim)
            return tuple(torch.zeros((n * page_size, *row), dtype=dtype, device=device) for n in sizes)

        try:
            return cls(pages, page_size, layers(), layers(), groups, group_of if groups else ())
        except RuntimeError as error:
            need = sum(sizes) * page_bytes(config, page_size, dtype) // config.layers
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
