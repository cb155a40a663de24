"""Casts of a compiled image's numbers: they round as torch does."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.float_arrays import cast, widen


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_casts_round_as_torch_does(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    wanted = torch.from_numpy(values.copy()).to(torch.bfloat16)
    found = cast(values, "bf16")
    assert np.array_equal(found, wanted.view(torch.uint16).numpy())
    assert np.array_equal(widen(found), wanted.float().numpy())
    assert cast(values, "fp32").tobytes() == values.tobytes()


@given(st.lists(st.integers(0, 0x7F7F), min_size=1))
def test_numbers_of_the_dtype_keep_their_bits(bits: list[int]) -> None:
    stored = np.array(bits, np.uint16)
    assert np.array_equal(cast(widen(stored), "bf16"), stored)
