"""Products of tiles: what their operands are rounded to, on a device and in the interpreter.

On a device operands have the activations' dtype. Triton's interpreter multiplies the bit patterns
of bf16 numbers, but widens them exactly: there operands are fp32. Sums are always fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def interpreted() -> bool:
    """Whether kernels run in the interpreter; settled when they are decorated."""
    return bool(triton.knobs.runtime.interpret)


def operand_dtype(x: Tensor) -> tl.dtype:
    """The dtype of both operands of a product with the activations X."""
    return tl.float32 if interpreted() else _DTYPES[x.dtype]


@triton.jit
def dot(a, b, total, OPERAND: tl.constexpr):
    """*Semantics*: `TOTAL[m, n] + Σ_k A[m, k] · B[k, n]`, fp32; A and B rounded to OPERAND."""
    return tl.dot(a.to(OPERAND), b.to(OPERAND), total, input_precision="ieee")
