"""Causal attention of a step's rows over the paged KV cache, from a list of work items.

*Semantics*, as in `kernels/paged_attention.py`:
`O[t, h] = Σ_j softmax_j(cap(scale · Q[t, h] · K[j, g(h)])) · V[j, g(h)]` over the keys j of t's own
sequence with `p(t) - window < j ≤ p(t)`; p being positions, g mapping heads to KV heads, and
`cap(s) = softcap · tanh(s / softcap)` where there is one. K and V are entries of the cache, times
their scale where it is int8 or fp8 with one fp32 scale per token and KV head.

Prefill, decode and both in one batch go through the same kernel. Softmax is kept online (Milakov
and Gimelshein, 2018) over tiles of keys at fixed places, afresh in each SPLIT of the sequence, and
splits are merged in order: within a program, or by `merge_kernel` where a long context was cut
into several programs (as in Flash-Decoding, Dao et al., 2023). Both take the same sums in the same
order, and every row of every step goes through the same program (which is why places in the work
list specialise nothing): neither a row's neighbours, nor how its prefill was cut, nor how its keys
were, changes its bits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex.kernels.triton import attention_work
from loraplex.kernels.triton.attention_work import SPLIT_KEYS, AttentionLayout
from loraplex.kernels.triton.operands import dot, operand_dtype

HEAD = tl.constexpr(attention_work.WORK_HEAD)
ITEM = tl.constexpr(attention_work.ITEM)
MERGE = tl.constexpr(attention_work.MERGE)

TILE_KEYS = 64
SCALED_TILE_KEYS = 32  # widened codes take registers, which leave few blocks a multiprocessor
FP32_TILE = 1 << 12  # keys times their width: no matrix instruction, so a thread holds whole rows
LEAST_WIDTH = 16  # of a matrix instruction
LOG2_E = 1.4426950408889634


@triton.jit
def _no_keys(HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Softmax state of no keys: maximum, Σ weights, Σ weights · V."""
    top, mass = tl.full((HEIGHT,), float("-inf"), tl.float32), tl.zeros((HEIGHT,), tl.float32)
    return top, mass, tl.zeros((HEIGHT, WIDTH), tl.float32)


@triton.jit
def _merge(top, mass, sums, new_top, new_mass, new_sums):
    """The state of what came before and of a split.

    Fused multiply-adds are spelt out, so that a compiler cannot choose them differently.
    """
    highest = tl.maximum(top, new_top)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    kept, added = tl.exp2(top - finite), tl.exp2(new_top - finite)
    mass = tl.fma(mass, kept, new_mass * added)
    wide = tl.broadcast_to(kept[:, None], sums.shape)
    return highest, mass, tl.fma(sums, wide, new_sums * added[:, None])


@triton.jit
def _quotient(sums, mass):
    """`SUMS / MASS`; a row that saw no key is zero."""
    return sums / tl.where(mass == 0.0, 1.0, mass)[:, None]


@triton.jit
def _capped(scores, softcap):
    """`softcap · tanh(scores / softcap)` of scores in units of log2 e, without overflow."""
    small = tl.exp2(tl.abs(scores) * (-2.0 / softcap))
    size = softcap * 1.4426950408889634 * (1.0 - small) / (1.0 + small)
    return tl.where(scores < 0.0, -size, size)


@triton.jit(do_not_specialize=["work_ptr", "tables_at"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr, state_ptr, partial_ptr, work_ptr,
    tables_at, scale, softcap,
    stride_q, stride_block, stride_head, stride_scale_block, stride_scale_head,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEIGHT: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SCALED: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """The *Semantics* above for one item and KV head, `scale` being in units of log2 e.

    HEIGHT rows of the product are the item's rows times the GROUP heads of the KV head; WIDTH is
    the least power of two from D and 16 on; WINDOW is 0 where there is none.
    """
    item, head = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(work_ptr):
        return
    line = work_ptr + HEAD + item * ITEM
    table, first, rows = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    begin, end = tl.load(line + 3), tl.load(line + 4)
    position, partial = tl.load(line + 5), tl.load(line + 6)

    m, d, n = tl.arange(0, HEIGHT), tl.arange(0, WIDTH), tl.arange(0, KEYS)
    heads = tl.num_programs(1) * GROUP
    row, query_head = m // GROUP, head * GROUP + m % GROUP
    inside, columns = row < rows, d[None, :] < D
    wanted = inside[:, None] & columns
    q_at = (first + row).to(tl.int64) * stride_q + query_head * D
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=wanted, other=0.0)

    if WINDOW > 0:
        begin = tl.maximum(begin, (position - WINDOW + 1) // KEYS * KEYS)
    top, mass, sums = _no_keys(HEIGHT, WIDTH)
    for cut in range(begin // SPLIT * SPLIT, end, SPLIT):
        peak, total, part = _no_keys(HEIGHT, WIDTH)
        for start in range(tl.maximum(cut, begin), tl.minimum(cut + SPLIT, end), KEYS):
            key = start + n
            known = key < end
            block = tl.load(work_ptr + tables_at + table + key // BLOCK_SIZE, mask=known, other=0)
            place = block.to(tl.int64) * stride_block + head * stride_head + key % BLOCK_SIZE * D
            held = known[:, None] & columns
            k = tl.load(k_ptr + place[:, None] + d[None, :], mask=held, other=0.0)
            scores = dot(q, tl.trans(k.to(OPERAND)), tl.zeros((HEIGHT, KEYS), tl.float32), OPERAND)
            scores *= scale
            if SCALED:
                scale_at = block.to(tl.int64) * stride_scale_block + key % BLOCK_SIZE
                scale_at += head * stride_scale_head
                scores *= tl.load(k_scale_ptr + scale_at, mask=known, other=0.0)[None, :]
            if CAPPED:
                scores = _capped(scores, softcap)
            seen = (key[None, :] <= (position + row)[:, None]) & known[None, :]
            if WINDOW > 0:
                seen &= key[None, :] > (position + row)[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
            highest = tl.maximum(peak, tl.max(scores, 1))
            finite = tl.where(highest == float("-inf"), 0.0, highest)
            weights, kept = tl.exp2(scores - finite[:, None]), tl.exp2(peak - finite)
            total, peak = total * kept + tl.sum(weights, 1), highest
            if SCALED:
                weights *= tl.load(v_scale_ptr + scale_at, mask=known, other=0.0)[None, :]
            v = tl.load(v_ptr + place[:, None] + d[None, :], mask=held, other=0.0)
            part = dot(weights, v, part * kept[:, None], OPERAND)
        top, mass, sums = _merge(top, mass, sums, peak, total, part)

    if partial < 0:
        out_at = ((first + row).to(tl.int64) * heads + query_head) * D
        out = _quotient(sums, mass).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_at[:, None] + d[None, :], out, mask=wanted)
    else:
        state_at = (partial + row).to(tl.int64) * heads + query_head
        tl.store(state_ptr + state_at * 2, top, mask=inside)
        tl.store(state_ptr + state_at * 2 + 1, mass, mask=inside)
        tl.store(partial_ptr + state_at[:, None] * D + d[None, :], sums, mask=wanted)


@triton.jit(do_not_specialize=["work_ptr", "merges_at"])
def merge_kernel(
    state_ptr, partial_ptr, out_ptr, work_ptr, merges_at,
    GROUP: tl.constexpr, HEIGHT: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """*Semantics*: `O[t, h] = Σ_p w[p] · SUMS[p, h] / Σ_p w[p] · MASS[p, h]` over a row's partial
    results p in order, with `w[p] = exp2(TOP[p, h] - max_p TOP[p, h])`.

    One row and KV head a program; HEIGHT is the least power of two from GROUP on.
    """
    merge, head = tl.program_id(0), tl.program_id(1)
    if merge >= tl.load(work_ptr + 1):
        return
    line = work_ptr + merges_at + merge * MERGE
    row, partial = tl.load(line), tl.load(line + 1)
    count, distance = tl.load(line + 2), tl.load(line + 3)
    m, d = tl.arange(0, HEIGHT), tl.arange(0, WIDTH)
    heads = tl.num_programs(1) * GROUP
    query_head, inside = head * GROUP + m, m < GROUP
    wanted = inside[:, None] & (d[None, :] < D)
    top, mass, sums = _no_keys(HEIGHT, WIDTH)
    for number in range(count):
        state_at = (partial + number * distance).to(tl.int64) * heads + query_head
        new_top = tl.load(state_ptr + state_at * 2, mask=inside, other=float("-inf"))
        new_mass = tl.load(state_ptr + state_at * 2 + 1, mask=inside, other=0.0)
        new = tl.load(partial_ptr + state_at[:, None] * D + d[None, :], mask=wanted, other=0.0)
        top, mass, sums = _merge(top, mass, sums, new_top, new_mass, new)
    out_at = (row.to(tl.int64) * heads + query_head) * D
    out = _quotient(sums, mass).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at[:, None] + d[None, :], out, mask=wanted)


@dataclass(frozen=True)
class AttentionStep:
    """A step's work list on the device, and the scratch for partial results."""

    layout: AttentionLayout
    work: Tensor  # int32 [layout.size]
    state: Tensor  # fp32 [partial rows, heads, 2], of any content
    partial: Tensor  # fp32 [partial rows, heads, D], of any content


def attention_scratch(
    layout: AttentionLayout, kv_heads: int, dim: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """`state` and `partial` of an `AttentionStep`."""
    rows, heads = max(1, layout.partial_rows), kv_heads * layout.group
    state = torch.empty(rows, heads, 2, dtype=torch.float32, device=device)
    return state, torch.empty(rows, heads, dim, dtype=torch.float32, device=device)


def paged_attention(
    q: Tensor,
    cache: Tensor,
    layer: int,
    step: AttentionStep,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """O `[T, heads, D]` of Q `[T, heads, D]`, of its dtype; the step's own KV is in the cache.

    CACHE is `[blocks, layers, 2, kv heads, block size, D]`; `scales` fp32
    `[blocks, layers, 2, kv heads, block size]` where it is int8 or fp8. A row's heads lie side by
    side in Q, its rows anywhere.
    """
    layout, work = step.layout, step.work
    kv_heads, block_size, dim = cache.shape[3:]
    width = max(LEAST_WIDTH, triton.next_power_of_2(dim))
    keys, values = cache[:, layer, 0], cache[:, layer, 1]
    key_scales, value_scales = (keys, values) if scales is None else scales[:, layer].unbind(1)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    attention_kernel[(layout.items, kv_heads)](
        q, keys, values, key_scales, value_scales, out, step.state, step.partial, work,
        layout.tables_at, scale * LOG2_E, softcap or 0.0,
        q.stride(0), keys.stride(0), keys.stride(1), *key_scales.stride()[:2],
        GROUP=layout.group, D=dim, WIDTH=width, BLOCK_SIZE=block_size, HEIGHT=layout.height,
        KEYS=_tile_keys(q.dtype, width, scales is not None), SPLIT=SPLIT_KEYS,
        WINDOW=window or 0, CAPPED=softcap is not None, SCALED=scales is not None,
        OPERAND=operand_dtype(q),
        **_options(q.dtype, layout.height * width, width, scales is not None),
    )  # fmt: skip
    if layout.merges:
        merge_kernel[(layout.merges, kv_heads)](
            step.state, step.partial, out, work, layout.merges_at,
            GROUP=layout.group, HEIGHT=triton.next_power_of_2(layout.group), D=dim, WIDTH=width,
            num_warps=4,
        )  # fmt: skip
    return out


def _tile_keys(dtype: torch.dtype, width: int, scaled: bool) -> int:
    most = SCALED_TILE_KEYS if scaled else TILE_KEYS
    return min(most, max(16, FP32_TILE // width)) if dtype is torch.float32 else most


def _options(dtype: torch.dtype, tile: int, width: int, scaled: bool) -> dict[str, int]:
    """Threads enough for two fp32 tiles and widened keys: in bf16 none spill, says `aot.py`."""
    if torch.version.hip:
        return {"num_warps": 4, "num_stages": 1 if width > 128 else 2}
    if dtype is torch.float32:
        return {"num_warps": 8, "num_stages": 2}
    return {"num_warps": 8 if tile >= 64 * 128 else 4, "num_stages": 3 if scaled else 2}
