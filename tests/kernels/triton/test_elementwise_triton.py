"""Norm, rotary embedding with KV write, gate and row maxima against the functions they replace."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loraplex.engine.outcome import outcome_of
from loraplex.kernels import rms_norm as plain_norm
from loraplex.kernels import silu_mul as plain_silu
from loraplex.kernels.kv_cache import BlockLayout, KVCache
from loraplex.kernels.rope import rope_, rotation
from loraplex.kernels.triton.rms_norm import add_rms_norm
from loraplex.kernels.triton.rope_kv import rope_kv
from loraplex.kernels.triton.sampling import PART, row_peaks
from loraplex.kernels.triton.silu_mul import silu_mul

Randn = Callable[..., Tensor]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2}  # the interpreter truncates to bf16
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 33), (2, 576), (1, 1001)])
def test_add_rms_norm(randn: Randn, rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual, gain = (randn(*s).to(dtype) for s in ((rows, size), (rows, size), (size,)))
    expected_residual = residual.clone()
    expected = plain_norm.add_rms_norm(x, expected_residual, gain, 1e-5)
    close(add_rms_norm(x.float(), residual, gain, 1e-5), expected)
    close(residual, expected_residual)


def test_add_rms_norm_rows_are_alike(randn: Randn) -> None:
    x, residual, gain = randn(5, 100), randn(5, 100), randn(100)
    whole = add_rms_norm(x, residual.clone(), gain, 1e-5)
    for row in range(5):
        one = slice(row, row + 1)
        assert torch.equal(add_rms_norm(x[one], residual[one].clone(), gain, 1e-5), whole[one])


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 80), (2, 1500)])
def test_silu_mul(randn: Randn, rows: int, size: int, dtype: torch.dtype) -> None:
    x = (randn(rows, 2 * size) * 10).to(dtype)
    close(silu_mul(x.float(), dtype), plain_silu.silu_mul(x))


def test_silu_mul_of_extremes() -> None:
    x = torch.tensor([[-1e4, 1e4, 0.0, 1.0, 1.0, 1.0]])
    assert silu_mul(x, torch.float32).tolist() == [[0.0, 1e4, 0.0]]


@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "normed"),
    [(4, 2, 16, 16, False), (3, 1, 20, 20, True), (2, 2, 80, 32, True), (1, 1, 8, 2, False)],
)
def test_rope_kv(
    randn: Randn, heads: int, kv_heads: int, dim: int, rotary: int, normed: bool, dtype: torch.dtype
) -> None:
    """Rows at scattered slots of the middle layer; one of them is inert."""
    x = randn(4, (heads + 2 * kv_heads) * dim).to(dtype)
    angles = randn(50, rotary // 2)
    positions, slots = torch.tensor([3, 49, 0, 7]), torch.tensor([5, 11, -1, 0])
    norms = (randn(dim).to(dtype), randn(dim).to(dtype)) if normed else None
    cache, expected_cache = (KVCache(3, BlockLayout(3, kv_heads, 4, dim, dtype)) for _ in range(2))
    expected = plain(x, heads, (angles.cos(), angles.sin()), norms, positions, expected_cache)
    found = rope_kv(
        x.float(), cache.data, 1, (angles.cos(), angles.sin()), norms, 1e-5,
        positions.int(), slots.int(), dtype=dtype,
    )  # fmt: skip
    close(found, expected)
    close(cache.data, expected_cache.data)


def plain(
    x: Tensor,
    heads: int,
    tables: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    positions: Tensor,
    cache: KVCache,
) -> Tensor:
    """What the plain functions make of the test's rows."""
    all_heads = x.clone().view(4, -1, cache.data.shape[-1])
    q, keys_values = all_heads[:, :heads], all_heads[:, heads:]
    for part, gain in zip((q, keys_values[:, : cache.kv_heads]), norms or (), strict=False):
        part.copy_(plain_norm.rms_norm(part, gain, 1e-5))
    turn = [t.to(x.dtype) for t in rotation(*(table[positions] for table in tables))]
    rope_(all_heads[:, : -cache.kv_heads, : 2 * tables[0].shape[1]], *turn)
    live = torch.tensor([0, 1, 3])
    blocks, offsets = torch.tensor([1, 2, 0]).numpy(), torch.tensor([1, 3, 0]).numpy()
    cache.write(1, cache.slot_index(blocks, offsets), keys_values[live])
    return q


@pytest.mark.parametrize("size", [1, 100, PART, 2 * PART + 77])
def test_row_peaks(randn: Randn, size: int) -> None:
    logits = randn(3, size)
    logits[1] = logits[1].round()  # several tokens share the peak
    likeliest, peak = row_peaks(logits)
    expected = outcome_of(logits)
    assert torch.equal(peak, expected.peak)
    first = [row.tolist().index(row.max()) for row in logits]
    assert likeliest.tolist() == first
    assert (likeliest.dtype, peak.dtype) == (torch.int64, torch.float32)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [0, PART, PART + 9])
def test_rows_that_are_not_finite_have_no_peak(randn: Randn, wrong: float, column: int) -> None:
    logits = randn(2, PART + 10)
    logits[1, column] = wrong
    likeliest, peak = row_peaks(logits)
    assert peak.isnan().tolist() == [False, True]
    assert 0 <= likeliest[1] < PART + 10
