"""The decoder's forward pass. Owns: `Decoder`, the one computation all supported families share.

Rules: in each layer all new KV is written before attention reads any, so a request may read pages that
another request computes in the same step. Nothing here loops over tokens, requests or pages. Q, K and V are
one matrix, and so are gate and up. Activations have the model's dtype; logits are float32.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from torch import Tensor

from hotprefix.engine.batch import Batch
from hotprefix.engine.kvpool import KVPool
from hotprefix.engine.model.config import ModelConfig
from hotprefix.engine.model.gguf_weights import ROPE_DIVISORS
from hotprefix.engine.model.ops import BlockOps, LayerHandles, Ops, StackOps
from hotprefix.engine.model.rope import RopeTable
from hotprefix.engine.model.weights import Blocks, BlockSource, Weights
from hotprefix.errors import ModelLoadError

log = logging.getLogger(__name__)
_PARTS = ("weight", "bias")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_HARMLESS = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")  # computed from the config


class Decoder:
    """A loaded model. Several threads may run passes at once, if each has a KV pool of its own."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        blocks: BlockSource | None = None,
    ) -> None:
        """blocks: the source of quantised copies for small steps; they are kept if `ops` can read their
        form."""
        self.config, self.dtype, self.device = config, dtype, device
        self._ops = ops
        take = _Taker(weights, ops, dtype, device, blocks)
        self._layers = [_load_layer(config, take, i) for i in range(config.layers)]
        self._final_norm = take.vector("model.norm.weight", config.hidden_size)
        self._embedding = take.matrix(_EMBEDDING, config.vocab_size, config.hidden_size)
        head = _head_name(config, weights)
        self._head = take.linear([(head, config.vocab_size)], config.hidden_size, [])
        self.quantised_linears = take.quantised
        divisors = take.vector(ROPE_DIVISORS, config.head_dim // 2) if ROPE_DIVISORS in weights else None
        self._rope = RopeTable(config.rope, config.head_dim, device, divisors)
        take.all_taken()
        self._scale = config.head_dim**-0.5
        self._stack = None
        if isinstance(ops, StackOps):
            shape, eps = config.shape, config.norm_eps
            self._stack = ops.prepare_layers(self._layers, self._final_norm, shape, eps, self._scale)

    def forward(self, batch: Batch, pool: KVPool) -> Tensor:
        """Write the batch's KV and return float32[L, V] logits of `batch.logit_rows`."""
        return self.logits(self.hidden(batch, pool, batch.logit_rows))

    @torch.inference_mode()
    def hidden(self, batch: Batch, pool: KVPool, keep: Tensor | None = None) -> Tensor:
        """Write the batch's KV and return the states after the final norm, [K, hidden].

        keep: int64[K], ascending: the rows whose states are wanted; None: all T. Of the other rows nothing is
        computed after the last layer's keys and values.
        """
        cos, sin = self._rope(batch.positions)
        residual = self._embedding.index_select(0, batch.token_ids)
        if self._stack is not None:
            return self._stack.run(residual, cos, sin, batch, pool.keys, pool.values, keep, pool.group_of)
        return self._layer_by_layer(residual, cos, sin, batch, pool, keep)

    def _layer_by_layer(
        self, residual: Tensor, cos: Tensor, sin: Tensor, batch: Batch, pool: KVPool, keep: Tensor | None
    ) -> Tensor:
        ops, config, eps = self._ops, self.config, self.config.norm_eps
        shape = config.shape
        still = (torch.ones_like(cos), torch.zeros_like(sin))
        x = ops.norm(residual, self._layers[0].input_norm, eps)
        for i, layer in enumerate(self._layers):
            keys, values, seen = pool.keys[i], pool.values[i], batch.of_layer(pool.group_of, i)
            turn = (cos, sin) if layer.rotates else still
            q = ops.rope_write(
                ops.linear(x, layer.qkv), shape, *turn, layer.q_norm, layer.k_norm, eps,
                keys, values, seen.slots,
            )  # fmt: skip
            attended = ops.attention(q, keys, values, seen, self._scale, layer.window).view(batch.tokens, -1)
            if keep is not None and i + 1 == config.layers:
                attended, residual = attended[keep], residual[keep]
            x = ops.linear(attended, layer.output)
            x = ops.add_norm(x, residual, layer.middle_norm, eps)
            x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
            after = self._layers[i + 1].input_norm if i + 1 < config.layers else self._final_norm
            x = ops.add_norm(x, residual, after, eps)
        return x

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """Rows of `hidden` [L, hidden] -> float32[L, V]."""
        return self._ops.linear(states, self._head, torch.float32)


def _head_name(config: ModelConfig, weights: Weights) -> str:
    """The name of the output head's tensor. If the weights hold a head it is used, whatever the config
    says."""
    if _HEAD not in weights:
        if not config.tied_embeddings:
            log.warning(
                "the config does not tie the output head to the embedding (tie_word_embeddings), but "
                "the weights lack %s: using the embedding",
                _HEAD,
            )
        return _EMBEDDING
    if not config.tied_embeddings:
        return _HEAD
    head, embedding = weights.get(_HEAD), weights.get(_EMBEDDING)
    if head.dtype == embedding.dtype and torch.equal(head, embedding):
        return _EMBEDDING  # so that there is one copy in memory
    log.warning(
        "the config ties the output head to the embedding (tie_word_embeddings), but the weights "
        "have a different %s: using it",
        _HEAD,
    )
    return _HEAD


class _Taker:
    """Takes tensors out of `weights`: checks their shapes, and converts them to the wanted precision and
    device.

    quantised: how many linear layers got a quantised copy.
    """

    def __init__(
        self, weights: Weights, ops: Ops, dtype: torch.dtype, device: torch.device, blocks: BlockSource | None
    ) -> None:
        self._weights, self._ops, self._dtype, self._device = weights, ops, dtype, device
        self._blocks, self.quantised = blocks, 0
        self._taken = {_HEAD}  # a head that is not taken was compared with the embedding

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self._take(name, (rows, columns), self._dtype)

    def vector(self, name: str, size: int) -> Tensor:
        """A norm's weights [size], always float32."""
        return self._take(name, (size,), torch.float32)

    def linear(self, weights: list[tuple[str, int]], columns: int, biases: list[tuple[str, int]]) -> Any:
        """The handle of one linear layer, made of the named matrices [rows, columns], one below the other,
        and the named biases [rows]."""
        parts = [self.matrix(name, rows, columns) for name, rows in weights]
        weight = torch.cat(parts) if len(parts) > 1 else parts[0]  # a tied head shares the embedding
        bias = (
            torch.cat([self._take(name, (rows,), self._dtype) for name, rows in biases]) if biases else None
        )
        if self._blocks is not None and isinstance(self._ops, BlockOps):
            blocks = Blocks.join([self._blocks.blocks(name) for name, _ in weights])
            if blocks is not None and self._ops.reads_blocks(blocks.form, self._dtype):
                self.quantised += 1
                try:
                    return self._ops.prepare_quantised(weight, bias, blocks)
                except ValueError as error:
                    raise ModelLoadError(f"{weights[0][0]}: {error}; try decode_weights='dense'") from error
        return self._ops.prepare_linear(weight, bias)

    def all_taken(self) -> None:
        """Raises ModelLoadError if the weights hold a tensor that was not taken: it would not be computed."""
        left = [n for n in self._weights.names() if n not in self._taken and not _HARMLESS.search(n)]
        if left:
            raise ModelLoadError(
                f"the weights hold {len(left)} tensors that the config has no place for "
                f"({', '.join(left[:3])}): hotprefix would compute another model; check that config "
                "and weights belong together"
            )

    def _take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = self._weights.get(name)
        self._taken.add(name)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the config says {shape}")
        return tensor.to(device=self._device, dtype=dtype).contiguous()


def _load_layer(config: ModelConfig, take: _Taker, i: int) -> LayerHandles:
    base = f"model.layers.{i}"
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size

    def linear(names: list[tuple[str, int]], columns: int, bias: bool) -> Any:
        weights, biases = ([(f"{base}.{name}.{part}", rows) for name, rows in names] for part in _PARTS)
        return take.linear(weights, columns, biases if bias else [])

    def head_norm(name: str) -> Tensor | None:
        return take.vector(f"{base}.self_attn.{name}.weight", config.head_dim) if config.qk_norm else None

    attention = [("self_attn.q_proj", wide), ("self_attn.k_proj", narrow), ("self_attn.v_proj", narrow)]
    return LayerHandles(
        qkv=linear(attention, hidden, config.qkv_bias),
        output=linear([("self_attn.o_proj", hidden)], wide, config.output_bias),
        gate_up=linear([("mlp.gate_proj", inner), ("mlp.up_proj", inner)], hidden, config.mlp_bias),
        down=linear([("mlp.down_proj", hidden)], inner, config.mlp_bias),
        input_norm=take.vector(f"{base}.input_layernorm.weight", hidden),
        middle_norm=take.vector(f"{base}.post_attention_layernorm.weight", hidden),
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
        window=config.windows[i],
        rotates=config.rope_layers[i],
    )
