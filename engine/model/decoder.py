"""The decoder of the Llama family: one step's operators in, the logits of its wanted rows out.

Every layer is `x += o(attention(norm(x)))` and `x += down(silu(gate) · up)` on `norm(x)`. In bf16,
values are rounded where Transformers rounds them, and sums are fp32. This file knows one model and
holds its weights; it refuses to know how an operator is computed, requests and image files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from loraplex.engine.images import PROJECTIONS
from loraplex.engine.model.config import ModelConfig
from loraplex.engine.model.operators import Norms, Operators
from loraplex.engine.model.projection import Projection, read_projection
from loraplex.engine.model.rotary import rotary_tables
from loraplex.engine.model.weights import Checkpoint
from loraplex.kernels.kv_cache import BlockLayout
from loraplex.kernels.linear import Linear, prepare_linear

Prepare = Callable[[Tensor], Linear]  # makes a weight [out, in] ready


class Weights(Protocol):
    """Where a decoder's weights come from; see `weights.Checkpoint`."""

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor by name, on the device where it is to stay."""
        ...

    def skip(self, suffix: str) -> None:
        """Leave tensors with this ending unread."""
        ...

    def close(self) -> None:
        """Raise when a tensor was not read."""
        ...


@dataclass(frozen=True)
class Layer:
    """One layer's weights."""

    attention_norm: Tensor
    qkv: Projection
    norms: Norms
    o: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


def prepare_fp32(weight: Tensor) -> Linear:
    """A weight of any float dtype for products in fp32."""
    return prepare_linear(weight.float())


class Decoder:
    """A loaded model that computes in `dtype`, on up to `positions` positions.

    `rotary` is its cosines and sines, fp32 `[positions, rotary_dim / 2]`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        positions: int,
        prepare: Prepare = prepare_fp32,
    ) -> None:
        self.config, self.dtype = config, dtype
        reader = _Reader(config, weights, dtype, prepare)
        self._embedding = reader.embedding()
        self.layers = [reader.layer(number) for number in range(config.num_layers)]
        self._norm = weights.read("model.norm.weight", (config.hidden_size,), dtype)
        self._head = reader.head(self._embedding)
        weights.skip("rotary_emb.inv_freq")
        weights.close()
        self.device = self._embedding.device
        cos, sin = rotary_tables(config.rope, config.rotary_dim, positions)
        self.rotary = cos.to(self.device), sin.to(self.device)

    def kv_layout(self, block_size: int, dtype: torch.dtype | None = None) -> BlockLayout:
        """Of KV blocks of so many tokens; `dtype` is the computation's unless it is given."""
        config = self.config
        return BlockLayout(
            config.num_layers,
            config.num_kv_heads,
            block_size,
            config.head_dim,
            self.dtype if dtype is None else dtype,
        )

    def forward(self, ops: Operators) -> Tensor:
        """Logits `[W, vocabulary]` fp32 of the step's wanted rows; writes all rows' KV."""
        x = ops.embed(self._embedding)
        delta = torch.zeros_like(x)
        for number, layer in enumerate(self.layers):
            normed = ops.add_norm(delta, x, layer.attention_norm)
            qkv = ops.project(normed, layer.qkv, number, "qkv")
            heads = ops.attend(qkv, layer.norms, number)
            delta = ops.project(heads, layer.o, number, "o")
            normed = ops.add_norm(delta, x, layer.mlp_norm)
            hidden = ops.silu_mul(ops.project(normed, layer.gate_up, number, "gate_up"))
            delta = ops.project(hidden, layer.down, number, "down")
        last = ops.add_norm(ops.wanted(delta), ops.wanted(x), self._norm)
        return self._head.apply(last)


def load_decoder(
    directory: Path, config: ModelConfig, dtype: torch.dtype, positions: int
) -> Decoder:
    """Read the weights of a model directory, for a CPU; raises `ModelError`."""
    return Decoder(config, Checkpoint(directory), dtype, positions)


class _Reader:
    """Reads a decoder's parts."""

    def __init__(
        self, config: ModelConfig, weights: Weights, dtype: torch.dtype, prepare: Prepare
    ) -> None:
        self._config, self._weights, self._dtype, self._prepare = config, weights, dtype, prepare

    def embedding(self) -> Tensor:
        return self._weights.read("model.embed_tokens.weight", self._table, self._dtype)

    def head(self, embedding: Tensor) -> Linear:
        if self._config.tied:
            self._weights.skip("lm_head.weight")
            return self._prepare(embedding)
        return self._prepare(self._weights.read("lm_head.weight", self._table, self._dtype))

    def layer(self, number: int) -> Layer:
        config, hidden = self._config, self._config.hidden_size
        inner, name = config.intermediate_size, f"model.layers.{number}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        qkv = (config.query_size, config.kv_size, config.kv_size)
        return Layer(
            attention_norm=self._gain(f"{name}.input_layernorm", hidden),
            qkv=self._project(attention, "qkv", hidden, qkv, config.qkv_bias),
            norms=self._norms(attention),
            o=self._project(attention, "o", config.query_size, (hidden,), config.o_bias),
            mlp_norm=self._gain(f"{name}.post_attention_layernorm", hidden),
            gate_up=self._project(mlp, "gate_up", hidden, (inner, inner), config.mlp_bias),
            down=self._project(mlp, "down", inner, (hidden,), config.mlp_bias),
        )

    @property
    def _table(self) -> tuple[int, int]:
        return self._config.vocab_size, self._config.hidden_size

    def _norms(self, block: str) -> Norms:
        if not self._config.qk_norm:
            return None
        size = self._config.head_dim
        return self._gain(f"{block}.q_norm", size), self._gain(f"{block}.k_norm", size)

    def _gain(self, name: str, size: int) -> Tensor:
        return self._weights.read(f"{name}.weight", (size,), self._dtype)

    def _project(
        self, block: str, projection: str, size: int, outs: Sequence[int], bias: bool
    ) -> Projection:
        sizes = [
            (f"{block}.{linear}", out)
            for linear, out in zip(PROJECTIONS[projection], outs, strict=True)
        ]
        return read_projection(self._weights.read, sizes, size, bias, self._dtype, self._prepare)
