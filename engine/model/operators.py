"""The operators of which the decoder is made, and the plain torch ones.

A backend's operators are made for one step and hold what the step needs besides weights: its rows,
their places in the KV cache, their adapters. `ReferenceOperators` are the functions of
`loraplex.kernels`: a row has the same bits whatever else is in the step. This file knows one step;
it refuses to know how layers are joined, block tables and image files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loraplex.engine.model.config import ModelConfig
from loraplex.engine.model.projection import Projection
from loraplex.kernels.attention_plan import AttentionPlan
from loraplex.kernels.kv_cache import KVCache
from loraplex.kernels.paged_attention import paged_attention
from loraplex.kernels.rms_norm import add_rms_norm, rms_norm
from loraplex.kernels.rope import rope_, rotation
from loraplex.kernels.sgmv import Segment
from loraplex.kernels.silu_mul import silu_mul

Norms = tuple[Tensor, Tensor] | None  # gains [D] of queries and keys
Adapters = Callable[[int, str], Sequence[Segment]]  # of a layer and a projection


class Operators(Protocol):
    """Operators on the T rows of one step.

    What `project` returns may be fp32 that waits to be rounded: the other operators take it so.
    """

    def embed(self, table: Tensor) -> Tensor:
        """The rows' embeddings `[T, hidden]`, out of `[vocabulary, hidden]`."""
        ...

    def add_norm(self, x: Tensor, residual: Tensor, gain: Tensor) -> Tensor:
        """Add X to the residual, in place, and return the norm of the sum; all `[T, hidden]`."""
        ...

    def project(self, x: Tensor, projection: Projection, layer: int, name: str) -> Tensor:
        """Y `[T, out]` of X `[T, in]` under the rows' adapters; a name of `PROJECTIONS`."""
        ...

    def attend(self, qkv: Tensor, norms: Norms, layer: int) -> Tensor:
        """O `[T, heads · D]` of `[T, (heads + 2 kv heads) · D]`; writes the rows' KV."""
        ...

    def silu_mul(self, x: Tensor) -> Tensor:
        """`silu(gate) · up` `[T, n]` of gate and up `[T, 2n]`."""
        ...

    def wanted(self, x: Tensor) -> Tensor:
        """The W rows `[W, n]` of X `[T, n]` whose logits are wanted."""
        ...


@dataclass(frozen=True)
class Step:
    """What a step needs besides weights. `plans` has a plan for each window in use."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64, `KVCache.slot_index` of the rows
    plans: Mapping[int | None, AttentionPlan]
    adapters: Adapters
    wanted: Tensor  # int64 [W]


class ReferenceOperators:
    """The operators of `loraplex.kernels`, for a step that reads and writes `cache`."""

    def __init__(
        self, config: ModelConfig, rotary: tuple[Tensor, Tensor], cache: KVCache, step: Step
    ) -> None:
        self._config, self._cache, self._step = config, cache, step
        cos, sin = (table[step.positions] for table in rotary)
        self._turn = rotation(cos, sin)

    def embed(self, table: Tensor) -> Tensor:
        """See `Operators`."""
        return table[self._step.token_ids]

    def add_norm(self, x: Tensor, residual: Tensor, gain: Tensor) -> Tensor:
        """See `Operators`."""
        return add_rms_norm(x, residual, gain, self._config.norm_eps)

    def project(self, x: Tensor, projection: Projection, layer: int, name: str) -> Tensor:
        """See `Operators`."""
        return projection.apply(x, self._step.adapters(layer, name))

    def attend(self, qkv: Tensor, norms: Norms, layer: int) -> Tensor:
        """See `Operators`."""
        config, rows = self._config, qkv.shape[0]
        heads = qkv.view(rows, -1, config.head_dim)
        q, keys_values = heads[:, : config.num_heads], heads[:, config.num_heads :]
        k = keys_values[:, : config.num_kv_heads]
        if norms is not None:
            for part, gain in zip((q, k), norms, strict=True):
                part.copy_(rms_norm(part, gain, config.norm_eps))
        turn = [part.to(qkv.dtype) for part in self._turn]
        rope_(heads[:, : -config.num_kv_heads, : config.rotary_dim], *turn)
        self._cache.write(layer, self._step.slots, keys_values)
        plan = self._step.plans[config.windows[layer]]
        out = paged_attention(q, self._cache, layer, plan, config.head_dim**-0.5)
        return out.view(rows, -1)

    def silu_mul(self, x: Tensor) -> Tensor:
        """See `Operators`."""
        return silu_mul(x)

    def wanted(self, x: Tensor) -> Tensor:
        """See `Operators`."""
        return torch.index_select(x, 0, self._step.wanted)
