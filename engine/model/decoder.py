"""The decoder of the Llama family: token ids and a paged KV cache in, logits out.

Every layer is `x += o(attention(norm(x)))` and `x += down(silu(gate) · up)` on `norm(x)`. In bf16,
values are rounded where Transformers rounds them, and sums are fp32. This file knows one model; it
refuses to know requests, block tables and image files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from loraplex.engine.images import PROJECTIONS
from loraplex.engine.model.config import ModelConfig
from loraplex.engine.model.projection import Projection, read_projection
from loraplex.engine.model.rotary import rotary_tables
from loraplex.engine.model.weights import Checkpoint
from loraplex.kernels.attention_plan import AttentionPlan
from loraplex.kernels.kv_cache import KVCache
from loraplex.kernels.linear import Linear, prepare_linear
from loraplex.kernels.paged_attention import paged_attention
from loraplex.kernels.rms_norm import add_rms_norm, rms_norm
from loraplex.kernels.rope import rope_, rotation
from loraplex.kernels.sgmv import Segment
from loraplex.kernels.silu_mul import silu_mul

Adapters = Callable[[int, str], Sequence[Segment]]  # of a layer and one of images.PROJECTIONS


@dataclass(frozen=True)
class Step:
    """What a forward pass needs besides weights. `plans` has a plan for each window in use."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64, `KVCache.slot_index` of the rows
    plans: Mapping[int | None, AttentionPlan]
    adapters: Adapters


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


class Decoder:
    """A loaded model that computes in `dtype`, on up to `positions` positions."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, positions: int
    ) -> None:
        self.config, self.dtype = config, dtype
        table = (config.vocab_size, config.hidden_size)
        self._embedding = checkpoint.read("model.embed_tokens.weight", table, dtype)
        self._layers = [_read_layer(checkpoint, config, n, dtype) for n in range(config.num_layers)]
        self._norm = checkpoint.read("model.norm.weight", (config.hidden_size,), dtype)
        self._head = self._read_head(checkpoint)
        checkpoint.skip("rotary_emb.inv_freq")
        checkpoint.close()
        self._cos, self._sin = rotary_tables(config.rope, config.head_dim, positions)

    def forward(self, step: Step, cache: KVCache) -> Tensor:
        """Hidden states `[T, hidden]` after the last layer; writes the rows' KV."""
        cos, sin = rotation(self._cos[step.positions], self._sin[step.positions])
        turn = cos.to(self.dtype), sin.to(self.dtype)
        x = self._embedding[step.token_ids]
        delta = torch.zeros_like(x)
        for number, layer in enumerate(self._layers):
            normed = add_rms_norm(delta, x, layer.attention_norm, self.config.norm_eps)
            delta = self._attend(normed, number, layer, turn, step, cache)
            normed = add_rms_norm(delta, x, layer.mlp_norm, self.config.norm_eps)
            hidden = silu_mul(layer.gate_up.apply(normed, step.adapters(number, "gate_up")))
            delta = layer.down.apply(hidden, step.adapters(number, "down"))
        return x.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[W, vocabulary]` fp32 of some rows of `forward`'s result."""
        return self._head.apply(rms_norm(hidden, self._norm, self.config.norm_eps))

    def _attend(
        self,
        x: Tensor,
        number: int,
        layer: _Layer,
        turn: tuple[Tensor, Tensor],
        step: Step,
        cache: KVCache,
    ) -> Tensor:
        config, rows = self.config, x.shape[0]
        heads = layer.qkv.apply(x, step.adapters(number, "qkv")).view(rows, -1, config.head_dim)
        q, keys_values = heads[:, : config.num_heads], heads[:, config.num_heads :]
        k = keys_values[:, : config.num_kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            q.copy_(rms_norm(q, layer.q_norm, config.norm_eps))
            k.copy_(rms_norm(k, layer.k_norm, config.norm_eps))
        rope_(heads[:, : -config.num_kv_heads], *turn)
        cache.write(number, step.slots, keys_values)
        plan = step.plans[config.windows[number]]
        out = paged_attention(q, cache, number, plan, config.head_dim**-0.5)
        return layer.o.apply(out.view(rows, -1), step.adapters(number, "o"))

    def _read_head(self, checkpoint: Checkpoint) -> Linear:
        if self.config.tied:
            checkpoint.skip("lm_head.weight")
            return prepare_linear(self._embedding.float())
        shape = self._embedding.shape
        return prepare_linear(checkpoint.read("lm_head.weight", tuple(shape), self.dtype).float())


def load_decoder(
    directory: Path, config: ModelConfig, dtype: torch.dtype, positions: int
) -> Decoder:
    """Read the weights of a model directory; raises `ModelError`."""
    return Decoder(config, Checkpoint(directory), dtype, positions)


def _read_layer(
    checkpoint: Checkpoint, config: ModelConfig, number: int, dtype: torch.dtype
) -> _Layer:
    name, hidden, inner = f"model.layers.{number}", config.hidden_size, config.intermediate_size
    qkv = (config.query_size, config.kv_size, config.kv_size)

    def norm(part: str, size: int) -> Tensor:
        return checkpoint.read(f"{name}.{part}.weight", (size,), dtype)

    def project(
        block: str, linears: Sequence[str], size: int, outs: Sequence[int], bias: bool
    ) -> Projection:
        names = [f"{name}.{block}.{linear}" for linear in linears]
        return read_projection(checkpoint, names, size, outs, bias=bias, dtype=dtype)

    return _Layer(
        attention_norm=norm("input_layernorm", hidden),
        qkv=project("self_attn", PROJECTIONS["qkv"], hidden, qkv, config.qkv_bias),
        q_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
        o=project("self_attn", PROJECTIONS["o"], config.query_size, (hidden,), config.o_bias),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=project("mlp", PROJECTIONS["gate_up"], hidden, (inner, inner), config.mlp_bias),
        down=project("mlp", PROJECTIONS["down"], inner, (hidden,), config.mlp_bias),
    )
