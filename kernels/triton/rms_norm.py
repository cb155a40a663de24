"""Root mean square norm of a sum (Zhang and Sennrich, 2019), one row a program.

*Semantics*: `R[t, i] ← R[t, i] + round(X[t, i])`, then
`Y[t, i] = round(R[t, i] / sqrt(mean_j R[t, j]² + eps)) · G[i]`; R and Y `[T, n]` and G `[n]` of one
float dtype, X `[T, n]` of any. Sums are fp32, in an order that depends on n only; `round` is to R's
dtype, as in `kernels/rms_norm.py`, so X may be a product that nobody has rounded yet.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_rms_norm_kernel(x_ptr, residual_ptr, gain_ptr, y_ptr, size, eps, BLOCK: tl.constexpr):
    """One row of the *Semantics* above; BLOCK is the least power of two from `size` on."""
    start = tl.program_id(0).to(tl.int64) * size
    i = tl.arange(0, BLOCK)
    inside = i < size
    dtype = residual_ptr.dtype.element_ty
    x = tl.load(x_ptr + start + i, mask=inside, other=0.0).to(dtype).to(tl.float32)
    old = tl.load(residual_ptr + start + i, mask=inside, other=0.0).to(tl.float32)
    rounded = (old + x).to(dtype)
    tl.store(residual_ptr + start + i, rounded, mask=inside)
    total = rounded.to(tl.float32)
    normed = total / tl.sqrt(tl.sum(total * total, 0) / size + eps)
    gain = tl.load(gain_ptr + i, mask=inside, other=0.0).to(tl.float32)
    y = normed.to(dtype).to(tl.float32) * gain
    tl.store(y_ptr + start + i, y.to(dtype), mask=inside)


def add_rms_norm(x: Tensor, residual: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Add X to the residual, in place, and return the norm of the sum; all contiguous `[T, n]`."""
    rows, size = residual.shape
    y = residual.new_empty(rows, size)
    block = triton.next_power_of_2(size)
    add_rms_norm_kernel[(rows,)](
        x, residual, gain, y, size, eps, BLOCK=block, num_warps=4 if block <= 4096 else 8
    )
    return y
