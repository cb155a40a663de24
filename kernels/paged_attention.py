"""Causal attention of a step's rows over the paged KV cache, prefill and decode alike.

*Semantics*: `O[t, h] = Σ_j softmax_j(scale · Q[t, h] · K[j, g(h)]) · V[j, g(h)]` over the keys j of
t's own sequence with `p(t) - window < j ≤ p(t)`, p being positions and g mapping heads to KV heads;
Q and O `[T, heads, D]` of one float dtype, the cache of that or int8, all between in fp32.

Keys are taken in tiles at fixed places of the sequence and softmax is kept online over them
(Milakov and Gimelshein, 2018), so a row's bits depend on its own context only: not on its
neighbours, on how its prefill was cut, or on the number of threads. The heads of one KV head are
rows of the same product, and a tile's keys are read once for all rows of a sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.kernels.attention_plan import AttentionPlan, Group, Tile
from loraplex.kernels.kv_cache import KVCache
from loraplex.kernels.rows import COLUMNS, batched, pad_columns

LEAST = -1e30  # below any score, yet finite: a tile that hides all keys changes nothing


@dataclass(frozen=True)
class _State:
    """Online softmax of a group's rows `[sequences, kv heads, rows, …]`."""

    highest: Tensor  # […, 1]
    total: Tensor  # […, 1]
    output: Tensor  # […, D], columns padded


def paged_attention(
    q: Tensor, cache: KVCache, layer: int, plan: AttentionPlan, scale: float
) -> Tensor:
    """O `[T, heads, D]` of Q `[T, heads, D]`; the step's own keys and values are in the cache."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in plan.groups:
        queries = _gather_queries(q, group, cache.kv_heads, scale)
        state = _start(queries)
        for tile in group.tiles:
            _add_tile(state, queries, cache, layer, tile)
        _scatter(out, state, group)
    return out


def _gather_queries(q: Tensor, group: Group, kv_heads: int, scale: float) -> Tensor:
    """The group's queries, scaled, as fp32 `[sequences, kv heads, rows, D]`; padding is zero."""
    heads, dim = q.shape[1:]
    shape = (group.sequences, group.count, kv_heads, heads // kv_heads, dim)
    taken = q.index_select(0, group.rows).view(shape).transpose(1, 2)
    queries = q.new_zeros((group.sequences, kv_heads, group.padded_rows, dim), dtype=torch.float32)
    used = group.count * shape[3]
    torch.mul(taken.float(), scale, out=queries[:, :, :used].view(taken.shape))
    return queries


def _start(queries: Tensor) -> _State:
    *shape, dim = queries.shape
    width = dim + -dim % COLUMNS
    highest = queries.new_full((*shape, 1), LEAST)
    return _State(highest, queries.new_zeros(*shape, 1), queries.new_zeros(*shape, width))


def _add_tile(state: _State, queries: Tensor, cache: KVCache, layer: int, tile: Tile) -> None:
    """Take one tile of keys into the softmax of the rows that may see some of them."""
    rows = (slice(tile.sequences), slice(None), slice(tile.first_row, None))
    keys, values = _gather_keys(cache, layer, tile)
    highest, total, output = state.highest[rows], state.total[rows], state.output[rows]
    scores = batched(queries[rows].flatten(0, 1), keys.transpose(1, 2))
    scores = scores.view(*output.shape[:3], -1)
    if tile.hidden is not None:
        scores.add_(tile.hidden)
    new = torch.maximum(highest, scores.amax(-1, keepdim=True))
    weights = scores.sub_(new).exp_()
    kept = (highest - new).exp_()
    highest.copy_(new)
    total.mul_(kept).add_(weights.sum(-1, keepdim=True))
    output.mul_(kept).add_(batched(weights.flatten(0, 1), values).view(output.shape))


def _gather_keys(cache: KVCache, layer: int, tile: Tile) -> tuple[Tensor, Tensor]:
    """Keys `[sequences · kv heads, tile, D]` and values, in fp32, columns of values padded."""
    lines = cache.read(layer, tile.index)
    shape = (2, tile.sequences * cache.kv_heads, -1, lines.shape[-1])
    keys, values = lines.view(shape).unbind(0)
    return keys, pad_columns(values)


def _scatter(out: Tensor, state: _State, group: Group) -> None:
    sequences, kv_heads = state.output.shape[:2]
    heads, dim = out.shape[1:]
    used = group.count * (heads // kv_heads)
    result = state.output[:, :, :used, :dim] / state.total[:, :, :used]
    per_row = result.view(sequences, kv_heads, group.count, -1, dim).transpose(1, 2)
    out.index_copy_(0, group.rows, per_row.to(out.dtype).reshape(-1, heads, dim))
