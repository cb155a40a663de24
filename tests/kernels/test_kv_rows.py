"""Rows of keys and values as int8: what is lost is bounded, and what is not a number shows."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loraplex.kernels.kv_cache import BlockLayout, KVCache
from loraplex.kernels.kv_rows import LEAST_SCALE, MOST, dequantise, quantise

LAYOUT = BlockLayout(2, 3, 4, 8, torch.int8)
ROUNDING = 2 * MOST * 2.0**-24  # of the division and of the product, in units of the scale


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=20),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_the_error_is_at_most_half_a_scale(row: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(row).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    codes, scale = quantise(x)
    assert (codes.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, ())
    error = (x.double() - codes.double() * scale.double()).abs().max()
    assert error <= float(scale) * (0.5 + ROUNDING) + (not scale) * MOST * LEAST_SCALE
    assert codes.abs().max() == (MOST if scale else 0)
    assert torch.equal(dequantise(codes, scale).sign(), codes.sign().float())


def test_each_row_has_its_own_scale() -> None:
    """An outlier costs its own row precision, and no other."""
    codes, scale = quantise(torch.tensor([[1.0, -0.5], [1e30, 1.0], [0.0, 0.0], [1e-40, 0.0]]))
    assert codes.tolist() == [[127, -64], [127, 0], [0, 0], [0, 0]]
    assert scale.tolist() == pytest.approx([1 / 127, 1e30 / 127, 0, 0])


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows(wrong: float) -> None:
    found = dequantise(*quantise(torch.tensor([[1.0, 2.0], [wrong, 2.0]])))
    assert found[0].isfinite().all() and found[1].isnan().all()


def test_a_block_holds_its_rows_and_then_their_scales() -> None:
    region = torch.arange(2 * LAYOUT.block_bytes, dtype=torch.int64).to(torch.uint8)
    blocks = region.view(2, LAYOUT.block_bytes)
    rows, scales = LAYOUT.split(blocks)
    assert rows.shape == (2, 2, 2, 3, 4, 8) and scales is not None
    assert scales.shape == rows.shape[:-1]
    assert LAYOUT.block_bytes == rows[0].numel() + 4 * scales[0].numel()
    rows.fill_(1)
    scales.fill_(2.0)
    assert (blocks[:, : LAYOUT.row_bytes] == 1).all()
    assert (blocks[:, LAYOUT.row_bytes :].view(torch.float32) == 2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_blocks_hold_rows_alone(dtype: torch.dtype) -> None:
    layout = BlockLayout(2, 3, 4, 8, dtype)
    rows, scales = layout.split(torch.zeros(5, layout.block_bytes, dtype=torch.uint8))
    assert (rows.dtype, rows.shape, scales) == (dtype, (5, *layout.shape), None)


def test_the_cache_quantises_what_is_written(randn: Callable[..., Tensor]) -> None:
    cache, x = KVCache(3, LAYOUT), randn(2, 2, 3, 8)
    index = cache.slot_index(np.array([2, 0]), np.array([3, 1]))
    cache.write(1, index, x)
    lines = cache.line_index(np.array([[2], [0]]))
    found = cache.read(1, torch.from_numpy(lines.ravel())).view(2, 2, 3, 4, 8)
    expected = dequantise(*quantise(x)).transpose(0, 1)
    assert torch.equal(found[:, 0, :, 3], expected[:, 0])
    assert torch.equal(found[:, 1, :, 1], expected[:, 1])
    assert int((cache.scales != 0).sum()) == 2 * 2 * 3


def test_scales_go_with_their_blocks(randn: Callable[..., Tensor]) -> None:
    cache, host = KVCache(4, LAYOUT), KVCache(2, LAYOUT)
    cache.write(0, cache.slot_index(np.array([1]), np.array([2])), randn(1, 2, 3, 8))
    rows, scales = cache.data[1].clone(), cache.scales[1].clone()
    cache.take(cache, [(1, 3)])
    host.take(cache, [(3, 0)])
    cache.clear(torch.tensor([1, 3]))
    assert not cache.data.any() and not cache.scales.any()
    cache.take(host, [(0, 2)])
    assert torch.equal(cache.data[2], rows) and torch.equal(cache.scales[2], scales)
    assert scales.any()
