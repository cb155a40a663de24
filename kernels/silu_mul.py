"""The gate of a SwiGLU feed-forward (Shazeer, 2020).

*Semantics*: `Y[t, i] = silu(X[t, i]) · X[t, n + i]` with `silu(x) = x / (1 + exp(-x))`; X `[T, 2n]`
and Y `[T, n]` of one float dtype. The gate is computed in fp32 and rounded to that dtype before the
product, as Transformers does.

Spelt with `exp`, whose bits do not depend on where in a vector an element lies; those of torch's
own `silu` do.
"""

import torch
from torch import Tensor


def silu_mul(x: Tensor) -> Tensor:
    """Y `[T, n]` of X `[T, 2n]`."""
    columns = x.shape[-1] // 2
    gate = x[:, :columns].float()
    return torch.div(gate, torch.neg(gate).exp_().add_(1.0)).to(x.dtype).mul_(x[:, columns:])
