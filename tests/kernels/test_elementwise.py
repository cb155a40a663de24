"""`rms_norm`, `rope` and `silu_mul` against loops."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loraplex.kernels.rms_norm import add_rms_norm, rms_norm
from loraplex.kernels.rope import rope_, rotation
from loraplex.kernels.silu_mul import silu_mul

Randn = Callable[..., Tensor]
Check = Callable[..., None]

SIZES = [2, 33, 64, 100, 576, 1001, 1536]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 3, 17])
def test_rms_norm(randn: Randn, size: int, count: int) -> None:
    x, gain = randn(count, size), randn(size)
    expected = torch.empty(count, size, dtype=torch.float64)
    for t, row in enumerate(x.double()):
        expected[t] = (
            gain.double() * row / math.sqrt(sum(v * v for v in row.tolist()) / size + 1e-5)
        )
    torch.testing.assert_close(rms_norm(x, gain, 1e-5).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_rows_are_alike(randn: Randn, same_rows: Check, size: int) -> None:
    gain = randn(size)
    same_rows(lambda x: rms_norm(x, gain, 1e-5), randn(67, size))
    same_rows(lambda x: rms_norm(x, gain.bfloat16(), 1e-5), randn(67, size).bfloat16())


def test_rms_norm_rounds_before_the_gain(randn: Randn) -> None:
    x, gain = randn(9, 64).bfloat16(), randn(64).bfloat16()
    normed = rms_norm(x.float(), torch.ones(64), 1e-5).bfloat16()
    assert torch.equal(rms_norm(x, gain, 1e-5), normed * gain)


def test_add_rms_norm_adds_in_place(randn: Randn) -> None:
    x, residual, gain = randn(5, 64), randn(5, 64), randn(64)
    total = x + residual
    assert torch.equal(add_rms_norm(x, residual, gain, 1e-6), rms_norm(total, gain, 1e-6))
    assert torch.equal(residual, total)


@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 5, 64), (7, 2, 20)])
def test_rope(randn: Randn, shape: tuple[int, int, int]) -> None:
    count, heads, dim = shape
    x, angles = randn(*shape), randn(count, dim // 2)
    expected = torch.empty_like(x)
    for t in range(count):
        for h in range(heads):
            for i in range(dim // 2):
                a, b = x[t, h, i].item(), x[t, h, i + dim // 2].item()
                cos, sin = math.cos(angles[t, i]), math.sin(angles[t, i])
                expected[t, h, i] = a * cos - b * sin
                expected[t, h, i + dim // 2] = b * cos + a * sin
    rope_(x, *rotation(angles.cos(), angles.sin()))
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


def test_rope_rows_are_alike(randn: Randn, same_rows: Check) -> None:
    angles = randn(67, 10)

    def rotate(rows: Tensor) -> Tensor:
        x, angle = rows[:, :60].reshape(-1, 3, 20).clone(), rows[:, 60:]
        rope_(x, *rotation(angle, angle))
        return x

    same_rows(rotate, torch.cat((randn(67, 60), angles), 1))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 3, 17])
def test_silu_mul(randn: Randn, size: int, count: int) -> None:
    x = randn(count, 2 * size) * 10
    expected = torch.tensor(
        [[g / (1 + math.exp(-g)) * u for g, u in zip(r[:size], r[size:], strict=True)]
         for r in x.tolist()]
    )  # fmt: skip
    torch.testing.assert_close(silu_mul(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_silu_mul_rows_are_alike(randn: Randn, same_rows: Check, size: int) -> None:
    same_rows(silu_mul, randn(67, 2 * size))
    same_rows(silu_mul, randn(67, 2 * size).bfloat16())


def test_silu_mul_of_extremes() -> None:
    x = torch.tensor([[-1e4, 1e4, 0.0, 1.0, 1.0, 1.0]])
    assert silu_mul(x).tolist() == [[0.0, 1e4, 0.0]]
