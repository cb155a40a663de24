"""The launches that `aot.py` compiles, and for what: every kernel, at an 8B Llama's shapes.

Tensors are on torch's device without memory. This file knows shapes; it refuses to know targets
beyond their names.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from loraplex.kernels.kv_cache import BlockLayout
from loraplex.kernels.triton.attention_work import AttentionLayout
from loraplex.kernels.triton.draw import FIELDS, draw_rows, feed
from loraplex.kernels.triton.paged_attention import (
    AttentionStep,
    attention_scratch,
    paged_attention,
)
from loraplex.kernels.triton.rms_norm import add_rms_norm
from loraplex.kernels.triton.rope_kv import rope_kv
from loraplex.kernels.triton.sampling import row_peaks
from loraplex.kernels.triton.sgmv import Arena, SgmvStep, sgmv_, sgmv_scratch
from loraplex.kernels.triton.sgmv_plan import RECORD, SgmvLayout
from loraplex.kernels.triton.silu_mul import silu_mul

META = "meta"
HIDDEN, INNER, HEADS, KV_HEADS = 4096, 14336, 32, 8
BF16 = torch.bfloat16


def new(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device=META)


def sgmv(rows: int, tile: int, inputs: int, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    """One projection."""
    layout = SgmvLayout(rows, 8, tile)
    scratch = sgmv_scratch(rows, 192, inputs, META)
    step = SgmvStep(layout, new(layout.size, dtype=torch.int32), scratch)
    arena = Arena.of(new(1 << 20, dtype=torch.uint8), dtype)
    table = new(64, RECORD, dtype=torch.int32)
    sgmv_(new(rows, sum(widths)), new(rows, inputs), arena, table, step, widths)


def kv_cache(dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The cache of two layers, and its scales."""
    layout = BlockLayout(2, KV_HEADS, 16, dim, dtype)
    return layout.split(new(4096, layout.block_bytes, dtype=torch.uint8))


def attention(
    dim: int, group: int, *, partial_rows: int = 0, kv: torch.dtype = BF16,
    dtype: torch.dtype = BF16, window: int | None = None, softcap: float | None = None,
) -> None:  # fmt: skip
    """One layer's attention; merges are launched where there are partial rows."""
    layout = AttentionLayout(group, 64, 2048, partial_rows, 4096)
    cache, scales = kv_cache(dim, kv)
    scratch = attention_scratch(layout, KV_HEADS, dim, META)
    step = AttentionStep(layout, new(layout.size, dtype=torch.int32), *scratch)
    q = new(64, KV_HEADS * group, dim, dtype=dtype)
    paged_attention(q, cache, 1, step, dim**-0.5, window=window, softcap=softcap, scales=scales)


def write(dim: int, kv: torch.dtype) -> None:
    """The rotary embedding and the KV of a decode of 64 rows."""
    rows, heads = 64, HEADS + 2 * KV_HEADS
    rotary = new(8192, dim // 2, dtype=torch.float32), new(8192, dim // 2, dtype=torch.float32)
    cache, scales = kv_cache(dim, kv)
    places = new(rows, dtype=torch.int32), new(rows, dtype=torch.int32)
    qkv, gains = new(rows, heads * dim, dtype=torch.float32), (new(dim), new(dim))
    rope_kv(qkv, cache, 1, rotary, gains, 1e-6, *places, dtype=BF16, scales=scales)


def elementwise() -> None:
    """The operators between projections, for a decode of 64 rows."""
    rows = 64
    x, residual = new(rows, HIDDEN, dtype=torch.float32), new(rows, HIDDEN)
    add_rms_norm(x, residual, new(HIDDEN), 1e-5)
    write(128, BF16)
    silu_mul(new(rows, 2 * INNER, dtype=torch.float32), BF16)
    logits, ids = new(rows, 128256, dtype=torch.float32), new(rows, dtype=torch.int32)
    draw_rows(logits, *row_peaks(logits), new(rows, FIELDS, dtype=torch.float32), ids)
    feed(ids, ids)


QKV = (HIDDEN, 1024, 1024)
ALL = ("sm_80", "sm_90", "gfx942")

CASES: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "sgmv": (lambda: sgmv(32, 16, HIDDEN, QKV, BF16), ALL),
    "sgmv, tiles of 32": (lambda: sgmv(2048, 32, HIDDEN, QKV, BF16), ALL[1:]),
    "sgmv, int8": (lambda: sgmv(32, 16, HIDDEN, QKV, torch.int8), ALL),
    "sgmv, fp8": (lambda: sgmv(32, 16, HIDDEN, QKV, torch.float8_e4m3fn), ALL[1:2]),
    "attention": (lambda: attention(128, 4, partial_rows=64), ALL),
    "attention, int8": (lambda: attention(128, 4, kv=torch.int8), ALL),
    "attention, fp32, 256 columns": (
        lambda: attention(256, 2, kv=torch.float32, dtype=torch.float32),
        ALL,
    ),
    "attention, 8 columns": (lambda: attention(8, 4), ALL[1:]),
    "write, int8": (lambda: write(128, torch.int8), ALL),
    "write, int8, 256 columns": (lambda: write(256, torch.int8), ALL[1:]),
    "attention, int8, 256 columns, softcap": (
        lambda: attention(256, 2, kv=torch.int8, softcap=50.0),
        ALL[1:],
    ),
    "attention, 256 columns, window, softcap": (
        lambda: attention(256, 2, window=4096, softcap=50.0),
        ALL,
    ),
    "elementwise": (elementwise, ALL),
}
