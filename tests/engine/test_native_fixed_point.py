"""Base matrices and rows in fixed point: nearly what they stand for, and never past int32.

The native step multiplies bf16 weights so where int16 products are faster than widened ones.
"""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from loraplex.kernels.cpu.library import ACT_BF16, ACT_INT16, FIXED16, load_library

GROUP, MOST, SUM = 64, 16383, 1 << 17  # kGroup, kMostFixed, kFixedSum of panels.h


def unpack(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Codes `[n, k]` and scales `[n]` of a packed matrix, n being one panel's outputs."""
    n, k = weights.shape
    library, source = load_library("scalar"), weights.bfloat16().contiguous()
    assert library.packed_bytes(FIXED16, n, k) == n * 4 + n * (k + k % 2) * 2
    space = np.zeros(library.packed_bytes(FIXED16, n, k) + 64, np.uint8)
    packed = space[-space.ctypes.data % 64 :]
    library.pack(FIXED16, source.data_ptr(), (n, k), (k, 1), packed.ctypes.data)
    scales = torch.from_numpy(packed[: n * 4].view(np.float32).copy())
    codes = packed[n * 4 : n * 4 + n * (k + k % 2) * 2].view(np.int16).reshape(-1, n, 2)
    return torch.from_numpy(codes.transpose(1, 0, 2).reshape(n, -1)[:, :k].astype(np.int64)), scales


def matrix(kind: str, k: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(16, k, generator=generator)
    if kind == "one large":
        weights[:, k // 2] *= 1000
    elif kind == "alike":
        weights = torch.full((16, k), 0.75)
    elif kind == "many sizes":
        weights *= 2.0 ** torch.randint(-20, 20, (16, k), generator=generator)
    elif kind == "tiny":
        weights *= 2.0**-70
    elif kind == "huge":
        weights *= 2.0**100
    return weights.bfloat16().float()


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["plain", "one large", "alike", "many sizes", "tiny", "huge"]),
    k=st.integers(1, 300),
    seed=st.integers(0, 2**31),
)
def test_codes(kind: str, k: int, seed: int) -> None:
    """Powers of two as scales, no code past int16, no group past the sum, all of size exact."""
    weights = matrix(kind, k, seed)
    codes, scales = unpack(weights)
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
    assert codes.abs().max() <= 32767
    groups = torch.nn.functional.pad(codes.abs(), (0, -k % GROUP)).unflatten(1, (-1, GROUP))
    assert groups.sum(-1).max() <= SUM
    steps = weights.double() / scales.double()[:, None]
    assert (codes - steps).abs().max() <= 0.5
    large = steps.abs() >= 128
    assert torch.equal(codes[large].double(), steps[large])
    # No scale is larger than it must be: with half of it, a code or a sum would be too large.
    doubled = torch.nn.functional.pad(2 * steps.abs(), (0, -k % GROUP)).unflatten(1, (-1, GROUP))
    over = (doubled.amax((1, 2)) > 32767) | (doubled.sum(-1).amax(1) > SUM - GROUP)
    assert over.all()


def test_zeroes_and_what_is_not_finite() -> None:
    weights = torch.zeros(16, 70)
    weights[1, 65], weights[2, 3], weights[3, 0] = torch.inf, torch.nan, -torch.inf
    weights[3, 69] = torch.inf
    codes, scales = unpack(weights)
    assert torch.equal(codes, torch.zeros_like(codes))
    assert torch.equal(scales.isnan(), torch.tensor([False, True, True, True] + [False] * 12))


def error(kit: ModuleType, torch_kit: ModuleType, model: Any, **options: Any) -> float:
    """Of logits, root mean square; keys and values are kept as they are."""
    options = {"dtype": "bfloat16", "kv_dtype": torch.float32, **options}
    ids = kit.tokens(150)
    found = torch_kit.Runner(kit.executor(model, **options)).logits(ids)
    assert found.isfinite().all()
    return float((found.double() - kit.dense_logits(model, ids)).pow(2).mean().sqrt())


@pytest.mark.parametrize("shape", [{}, {"hidden_size": 260, "intermediate_size": 700}])
def test_nearer_than_bf16(
    shape: dict[str, int], isa: str, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    """Than rows that are rounded to bf16, which is what machines that multiply bf16 do."""
    model = native_kit.tiny(**shape)
    fixed = error(native_kit, torch_kit, model, isa=isa, activations=ACT_INT16)
    bf16 = error(native_kit, torch_kit, model, isa=isa, activations=ACT_BF16)
    assert 0 < fixed < bf16 / 6


def test_columns_that_are_much_larger(
    isa: str, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    """One in a hundred, as trained models have them: their own group only is coarser."""
    model = native_kit.tiny(hidden_size=200)
    for name, tensor in model.tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[7::100] *= 64
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) or "mlp.up" in name:
            tensor[:, 7::100] /= 64
    fixed = error(native_kit, torch_kit, model, isa=isa, activations=ACT_INT16)
    bf16 = error(native_kit, torch_kit, model, isa=isa, activations=ACT_BF16)
    assert fixed < bf16


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_at_their_limit(
    sign: int, isa: str, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    """All weights alike and all of a row alike: each group's sum is as large as one can be."""
    model = native_kit.tiny(hidden_size=256, intermediate_size=256, num_layers=1)
    for name, tensor in model.tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight", "lm_head.weight")):
            tensor.fill_(sign * 255 * 2.0**-16)  # 255 steps of 8: 64 of them are 99.6% of SUM
        elif "embed" in name or "norm" in name:
            tensor.fill_(1)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.fill_(2.0**-10)
        else:
            tensor.fill_(0)
    ids = native_kit.tokens(5)
    executor = native_kit.executor(model, isa=isa, dtype="bfloat16", activations=ACT_INT16)
    found = torch_kit.Runner(executor).logits(ids)
    torch.testing.assert_close(
        found.double(), native_kit.dense_logits(model, ids), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_weight_that_is_not_finite_shows(
    bad: float, isa: str, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    model = native_kit.tiny()
    model.tensors["model.layers.1.mlp.down_proj.weight"][3, 70] = bad
    executor = native_kit.executor(model, isa=isa, dtype="bfloat16", activations=ACT_INT16)
    assert torch_kit.Runner(executor).logits(native_kit.tokens(4)).isnan().all()


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(size=st.sampled_from([1e-44, 1e-39, 1e-30, 1e30]))
def test_rows_of_any_size(
    size: float, isa: str, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    """The smallest pass for zeroes; nothing overflows."""
    model = native_kit.tiny(num_layers=1)
    model.tensors["model.layers.0.input_layernorm.weight"].fill_(size)
    executor = native_kit.executor(model, isa=isa, dtype="bfloat16", activations=ACT_INT16)
    logits = torch_kit.Runner(executor).logits(native_kit.tokens(4))
    assert logits.isfinite().all() or size > 1
