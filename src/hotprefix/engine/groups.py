"""Which pool each layer's KV lies in. Owns: a model's layer groups and the sizes of their pools.

Rules (docs/decisions/0014-layer-groups.md):
1. A layer with an attention window keeps its KV in its window's pool, if there is one, otherwise with the
   full-attention layers.
2. A model that has window layers only gets such pools without being asked, because it loses nothing by them;
   `kv_tokens` is then the size of each.
3. A model that mixes both kinds gets them if `window_tokens` says how large.
4. A window as long as the context counts as full attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hotprefix.engine.config import EngineConfig
from hotprefix.engine.model.config import ModelConfig
from hotprefix.errors import ConfigError
from hotprefix.kernel.config import KernelConfig, LayerGroup

NAMES_PER_FRAME = 4


def kernel_config(config: EngineConfig, model: ModelConfig) -> KernelConfig:
    """The kernel's settings for this model. Raises ConfigError if the model cannot have the pools that
    `window_tokens` asks for."""
    kernel, page = config.kernel(), config.page_size
    windows = sorted({w for w in model.windows if w is not None and w < model.max_positions})
    tokens = _window_tokens(config, model, windows)
    if not tokens:
        return kernel
    groups = tuple(LayerGroup(tokens // page, window) for window in windows)
    if 0 in pool_of_layers(model, groups):
        return replace(kernel, groups=groups)
    # Every layer keeps its KV in frames, so a page holds nothing: it is a name, and costs next to nothing.
    names = max(NAMES_PER_FRAME * (tokens // page), -(-model.max_positions // page))
    return replace(kernel, total_pages=names, groups=groups)


def _window_tokens(config: EngineConfig, model: ModelConfig, windows: Sequence[int]) -> int:
    """Size of each window's pool; 0 = there are none. Raises ConfigError."""
    asked = config.window_tokens
    if asked == 0:
        return 0
    why = None
    if not windows:
        why = "no layer of this model has an attention window"
    elif config.l2_tokens:
        why = "L2 and L3 hold whole pages and know no windows; leave out l2_tokens"
    elif config.kv_events:
        why = "KV events tell of whole pages and know no windows; leave out kv_events"
    if why is not None:
        if asked:
            raise ConfigError(f"window_tokens={asked}: {why}, or give 0", param="window_tokens")
        return 0
    tokens = asked or (config.kv_tokens if None not in model.windows else 0)
    least = max(windows) + config.page_size
    if tokens >= least:
        return tokens
    if asked:
        raise ConfigError(
            f"window_tokens={asked}: a window of {max(windows)} tokens needs {least} at least",
            param="window_tokens",
        )
    return 0


def pool_of_layers(model: ModelConfig, groups: Sequence[LayerGroup]) -> tuple[int, ...]:
    """For each layer, 0 if its KV lies in the kernel's pages, i + 1 if it lies in group i's frames."""
    place = {group.window: i for i, group in enumerate(groups, 1)}
    return tuple(0 if window is None else place.get(window, 0) for window in model.windows)
