"""What tests of the Triton kernels share; they run in its interpreter, see `tests/conftest.py`."""

import numpy as np
import pytest
from numpy.typing import NDArray


@pytest.fixture
def even_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of tiles that treat every row alike.

    A matrix instruction does, while the BLAS that the interpreter calls gives a row last bits that
    depend on its place in the tile.
    """

    def matmul(a: NDArray, b: NDArray, dtype: type) -> NDArray:
        return (a[:, :, None] * b[None]).sum(1, dtype=dtype)

    monkeypatch.setattr(np, "matmul", matmul)
