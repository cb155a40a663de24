"""Root mean square norm (Zhang and Sennrich, 2019).

*Semantics*: `Y[t, i] = G[i] · X[t, i] / sqrt(mean_j X[t, j]² + eps)`; X and Y `[…, n]` and G `[n]`
of one float dtype. The norm is taken in fp32 and rounded to that dtype before it is multiplied by
G, as Transformers does.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Y `[…, n]` of X `[…, n]`."""
    if x.dtype is torch.float32:
        return torch.rms_norm(x, (x.shape[-1],), gain, eps)
    return torch.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype).mul_(gain)


def add_rms_norm(x: Tensor, residual: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Add X to the residual, in place, and return the norm of the sum; all are `[T, n]`."""
    return rms_norm(residual.add_(x), gain, eps)
