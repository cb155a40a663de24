"""Norms of queries and keys, rotary embedding (Su et al., 2021) and the write of KV, in one launch.

*Semantics*, for row t at position p(t) and each head h of X, `x_i = round(X[t, h, i])`:
queries and keys are normed where the model has such norms (as in `rms_norm.py`, over D), then
`x'_i = x_i · COS[p, i mod P] ∓ x_{i ± P} · SIN[p, i mod P]` for i < 2P, minus for i < P, and
`x'_i = x_i` from 2P on; values stay as they are. Queries go to `Q[t, h, :]`, keys and values to
`CACHE[S[t] / B, layer, s, h, S[t] mod B, :]`, keys with s = 0, values with s = 1; where CACHE is
int8 as codes, their scale going to SCALES, both as in `kernels/kv_rows.py`. A row whose slot S[t]
is negative is inert: its query is written, its KV is not.

X `[T, heads + 2 · kv heads, D]` of any float dtype, Q `[T, heads, D]`; COS and SIN fp32
`[positions, P]`; p and S int32 `[T]`; CACHE `[blocks, layers, 2, kv heads, B, D]` of Q's dtype or
int8, SCALES fp32 `[blocks, layers, 2, kv heads, B]`. `round` is to Q's dtype. Computed in fp32 and
rounded once, cosines and sines too, as Transformers does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex.kernels import kv_rows

MAX_TILE = 16  # heads a program
MOST = tl.constexpr(kv_rows.MOST)
LEAST_SCALE = tl.constexpr(kv_rows.LEAST_SCALE)
TO_WHOLE = tl.constexpr(1.5 * 2.0**23)  # no fp32 beside it is half: adding it rounds to even


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """`round(X)`, as fp32."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def _quantised(y):
    """Codes int8 `[N, D]` and scales `[N, 1]` of Y, fp32 `[N, D]`, as `kv_rows.quantise`.

    As integers, the bits of magnitudes are in order, and NaN above all.
    """
    bits = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    peak = tl.max(bits, 1).to(tl.float32, bitcast=True)[:, None]
    scale = tl.div_rn(peak, tl.full(peak.shape, MOST, tl.float32))
    scale = tl.where(scale < LEAST_SCALE, 0.0, scale)
    divides = (scale > 0.0) & (scale < float("inf"))
    divisor = tl.broadcast_to(tl.where(divides, scale, 1.0), y.shape)
    whole = (tl.div_rn(tl.where(divides, y, 0.0), divisor) + TO_WHOLE) - TO_WHOLE
    return whole.to(tl.int8), scale


@triton.jit(do_not_specialize=["positions_ptr", "slots_ptr"])
def rope_kv_kernel(
    x_ptr, q_ptr, cache_ptr, scale_ptr, cos_ptr, sin_ptr, q_gain_ptr, k_gain_ptr, positions_ptr,
    slots_ptr, stride_block, stride_scale_block, eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, PAIRS: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr,
    SCALED: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """TILE heads of one row; WIDTH is the least power of two from D on."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
    i = tl.arange(0, WIDTH)[None, :]
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    inside = (i < D) & (head < HEADS + 2 * KV_HEADS)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    at = x_ptr + (row * (HEADS + 2 * KV_HEADS) + head) * D
    x = _rounded(tl.load(at + i, mask=inside, other=0.0), dtype)
    pair = tl.where(i < PAIRS, i + PAIRS, tl.where(i < 2 * PAIRS, i - PAIRS, i))
    left, right = x, _rounded(tl.load(at + pair, mask=inside, other=0.0), dtype)
    if NORM:
        scale = tl.sqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        q_gain = tl.load(q_gain_ptr + i, mask=i < D, other=0.0).to(tl.float32)
        k_gain = tl.load(k_gain_ptr + i, mask=i < D, other=0.0).to(tl.float32)
        left = _rounded(_rounded(x / scale, dtype) * tl.where(is_query, q_gain, k_gain), dtype)
        q_gain = tl.load(q_gain_ptr + pair, mask=i < D, other=0.0).to(tl.float32)
        k_gain = tl.load(k_gain_ptr + pair, mask=i < D, other=0.0).to(tl.float32)
        right = _rounded(_rounded(right / scale, dtype) * tl.where(is_query, q_gain, k_gain), dtype)
    turn = tl.load(positions_ptr + row).to(tl.int64) * PAIRS + i % PAIRS
    cos = _rounded(tl.load(cos_ptr + turn, mask=i < 2 * PAIRS, other=1.0), dtype)
    sin = _rounded(tl.load(sin_ptr + turn, mask=i < 2 * PAIRS, other=0.0), dtype)
    turned = left * cos + right * tl.where(i < PAIRS, -sin, sin)
    y = tl.where(is_value, x, turned).to(dtype)
    tl.store(q_ptr + (row * HEADS + head) * D + i, y, mask=inside & is_query)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        block, line = (slot // BLOCK_SIZE).to(tl.int64), (head - HEADS) * BLOCK_SIZE
        line += slot % BLOCK_SIZE
        place, held = cache_ptr + block * stride_block + line * D + i, inside & (head >= HEADS)
        if SCALED:
            codes, scales = _quantised(y.to(tl.float32))
            scaled = (head >= HEADS) & (head < HEADS + 2 * KV_HEADS)
            tl.store(scale_ptr + block * stride_scale_block + line, scales, mask=scaled)
            tl.store(place, codes, mask=held)
        else:
            tl.store(place, y, mask=held)


def rope_kv(
    x: Tensor,
    cache: Tensor,
    layer: int,
    rotary: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    positions: Tensor,
    slots: Tensor,
    *,
    dtype: torch.dtype,
    scales: Tensor | None = None,
) -> Tensor:
    """Q `[T, heads, D]` of contiguous X `[T, (heads + 2 · kv heads) · D]`; writes the rows' KV.

    `rotary` is COS and SIN, `norms` the gains `[D]` of queries and keys, or None; `dtype` is Q's;
    `scales` are SCALES where the cache is int8.
    """
    kv_heads, block_size, dim = cache.shape[3:]
    rows, heads = x.shape[0], x.shape[1] // dim - 2 * kv_heads
    q = x.new_empty(rows, heads, dim, dtype=dtype)
    q_gain, k_gain = norms or (x, x)
    cos, sin = rotary
    layer_scales = cache if scales is None else scales[:, layer]
    all_heads = heads + 2 * kv_heads
    tile = min(MAX_TILE, triton.next_power_of_2(all_heads))
    rope_kv_kernel[(rows, triton.cdiv(all_heads, tile))](
        x, q, cache[:, layer], layer_scales, cos, sin, q_gain, k_gain, positions, slots,
        cache.stride(0), layer_scales.stride(0), eps, HEADS=heads, KV_HEADS=kv_heads, D=dim,
        PAIRS=cos.shape[-1], BLOCK_SIZE=block_size, NORM=norms is not None,
        SCALED=scales is not None, TILE=tile, WIDTH=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
    return q
