"""The gate of a SwiGLU feed-forward (Shazeer, 2020).

*Semantics*: `Y[t, i] = round(silu(round(X[t, i]))) · round(X[t, n + i])` with
`silu(x) = x / (1 + exp(-x))`; X `[T, 2n]` of any float dtype, Y `[T, n]`. Computed in fp32; `round`
is to Y's dtype, as in `kernels/silu_mul.py`, so X may be a product that nobody has rounded yet.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def silu_mul_kernel(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    """BLOCK columns of one row of the *Semantics* above."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    dtype = y_ptr.dtype.element_ty
    x = x_ptr + row * 2 * size + i
    gate = tl.load(x, mask=inside, other=0.0).to(dtype).to(tl.float32)
    up = tl.load(x + size, mask=inside, other=0.0).to(dtype).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # never overflows
    activated = gate * tl.where(gate < 0.0, small, 1.0) / (1.0 + small)
    activated = activated.to(dtype).to(tl.float32)
    tl.store(y_ptr + row * size + i, (activated * up).to(dtype), mask=inside)


def silu_mul(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Y `[T, n]` of dtype `dtype` from contiguous X `[T, 2n]`."""
    rows, size = x.shape[0], x.shape[1] // 2
    y = x.new_empty(rows, size, dtype=dtype)
    silu_mul_kernel[(rows, triton.cdiv(size, BLOCK))](x, y, size, BLOCK=BLOCK)
    return y
