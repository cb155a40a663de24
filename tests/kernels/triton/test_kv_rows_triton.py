"""KV as int8 in Triton: what is written is what plain functions write, and reading it loses little.

The bound of what attention loses is derived, not measured. A key's entries are off by at most half
its scale `s`, so a score is off by at most `ε = scale · Σ|q| · max s / 2`, and weights by a factor
within `e^±2ε`. An output is then off by at most `(e^2ε - 1) · max|v|`, and by half a value's scale.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from loraplex.kernels.kv_cache import BlockLayout
from loraplex.kernels.kv_rows import quantise
from loraplex.kernels.triton.attention_work import AttentionLayout
from loraplex.kernels.triton.paged_attention import (
    AttentionStep,
    attention_scratch,
    paged_attention,
)
from loraplex.kernels.triton.rope_kv import rope_kv

Randn = Callable[..., Tensor]
LAYERS, LAYER, BLOCKS, POISON = 3, 1, 3, 0xFF  # bytes of POISON are NaN in all float dtypes
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class Written:
    """A cache of poison to which rows were written, by slot, and their queries."""

    def __init__(
        self, x: Tensor, slots: Tensor, kv: BlockLayout, dtype: torch.dtype, *, normed: bool = False
    ) -> None:
        dim, rows = kv.head_dim, len(x)
        region = torch.full((BLOCKS, kv.block_bytes), POISON, dtype=torch.uint8)
        self.rows, self.scales = kv.split(region)
        angles = torch.randn(50, dim // 2, generator=torch.Generator().manual_seed(3))
        gain = torch.linspace(0.5, 2, dim).to(dtype)
        self.q = rope_kv(
            x, self.rows, LAYER, (angles.cos(), angles.sin()), (gain, gain) if normed else None,
            1e-5, torch.arange(rows).int(), slots.int(), dtype=dtype, scales=self.scales,
        )  # fmt: skip

    def at(self, slots: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows `[slots, 2, kv heads, D]` and scales."""
        size = self.rows.shape[4]
        place = (slots // size, LAYER, slice(None), slice(None), slots % size)
        return self.rows[place], None if self.scales is None else self.scales[place]


@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "normed"),
    [(4, 2, 64, False), (3, 3, 80, True), (6, 1, 96, False), (9, 3, 128, True), (2, 1, 256, False)],
)
def test_codes_are_those_of_what_else_were_kept(
    randn: Randn, heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype
) -> None:
    """Rows at scattered slots of the middle layer, one of them inert; all else stays poison."""
    x = randn(4, (heads + 2 * kv_heads) * dim) * 10
    slots = torch.tensor([5, 14, -1, 0])
    plain, found = (
        Written(x, slots, BlockLayout(LAYERS, kv_heads, 5, dim, d), dtype, normed=normed)
        for d in (dtype, torch.int8)
    )
    live = slots[slots >= 0]
    codes, scales = found.at(live)
    assert scales is not None and found.scales is not None
    expected = quantise(plain.at(live)[0])
    assert torch.equal(codes, expected[0]) and torch.equal(scales, expected[1])
    assert torch.equal(found.q, plain.q)
    assert int(found.scales.isfinite().sum()) == scales.numel()
    untouched = found.scales.isnan()
    assert (found.rows[untouched] == -1).all()


def test_zeros_outliers_and_what_is_not_finite(randn: Randn) -> None:
    """A head of each, among heads that they do not change."""
    kv_heads, dim, slots = 5, 64, torch.tensor([7])
    x = randn(1, (1 + 2 * kv_heads) * dim)
    values = x.view(1 + 2 * kv_heads, dim)[-kv_heads:]
    values[0] = 0.0
    values[1, 3] = 1e30
    values[2, 4], values[3, 5] = torch.nan, -torch.inf
    codes, scales = Written(
        x, slots, BlockLayout(LAYERS, kv_heads, 16, dim, torch.int8), torch.float32
    ).at(slots)
    assert scales is not None
    found = codes[0, 1].float() * scales[0, 1][:, None]
    assert not found[0].any() and scales[0, 1, 0] == 0
    assert found[1].count_nonzero() == 1 and found[1, 3] == pytest.approx(1e30)
    assert found[2:4].isnan().all()
    assert (found[4] - values[4]).abs().max() <= scales[0, 1, 4] * 0.501
    assert scales[0, 0].isfinite().all()


def attend(written: Written) -> Tensor:
    """Attention of all rows of one sequence, which lies in the blocks in order."""
    (tokens, heads, dim), kv_heads = written.q.shape, written.rows.shape[3]
    layout = AttentionLayout(heads // kv_heads, 1, tokens, 0, BLOCKS)
    work = torch.full((layout.size,), 1 << 30, dtype=torch.int32)
    layout.write(work.numpy(), [(0, tokens, tokens)], [torch.arange(BLOCKS).int().numpy()])
    step = AttentionStep(layout, work, *attention_scratch(layout, kv_heads, dim, "cpu"))
    return paged_attention(written.q, written.rows, LAYER, step, dim**-0.5, scales=written.scales)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("head", [2, 3], ids=["key", "value"])
def test_attention_shows_what_is_not_finite(randn: Randn, wrong: float, head: int) -> None:
    """In all rows that see it."""
    x = randn(6, 4 * 16)
    x.view(6, 4, 16)[3, head, 5] = wrong
    kv = BlockLayout(LAYERS, 1, 16, 16, torch.int8)
    with np.errstate(invalid="ignore"):
        out = attend(Written(x, torch.arange(6), kv, torch.float32))
    assert out[3:].isnan().all()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 1, 128)])
def test_attention_loses_no_more_than_the_bound(
    randn: Randn, heads: int, kv_heads: int, dim: int
) -> None:
    tokens, slots = 24, torch.arange(24)
    x = randn(tokens, (heads + 2 * kv_heads) * dim)
    plain, found = (
        Written(x, slots, BlockLayout(LAYERS, kv_heads, 16, dim, d), torch.float32)
        for d in (torch.float32, torch.int8)
    )
    expected, out = attend(plain), attend(found)
    scales = found.at(slots)[1]
    assert scales is not None
    largest = scales.amax(0).repeat_interleave(heads // kv_heads, 1)  # [2, heads]
    epsilon = dim**-0.5 * plain.q.abs().sum(-1) * largest[0] / 2
    most = plain.at(slots)[0][:, 1].abs().amax((0, 2)).repeat_interleave(heads // kv_heads)
    bound = (2 * epsilon).expm1() * most + largest[1] / 2
    error = (out - expected).abs().amax(-1)
    assert (error <= bound).all() and error.max() > 0
    assert math.sqrt((out - expected).square().mean()) < 0.01 * expected.std()
