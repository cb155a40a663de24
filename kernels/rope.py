"""Rotary position embedding (Su et al., 2021), in the half-split form of Llama checkpoints.

*Semantics*: `X[t, h, i] ← X[t, h, i] · COS[t, i] + X[t, h, (i + D/2) mod D] · SIN[t, i]`, in place;
X `[T, heads, D]`, COS and SIN `[T, 1, D]`, of one float dtype. The first half of SIN carries the
minus sign of the rotation.
"""

import torch
from torch import Tensor


def rotation(angles_cos: Tensor, angles_sin: Tensor) -> tuple[Tensor, Tensor]:
    """COS and SIN `[T, 1, D]` from the cosines and sines `[T, D/2]` of each row's angles."""
    cos = torch.cat((angles_cos, angles_cos), -1).unsqueeze(1)
    sin = torch.cat((-angles_sin, angles_sin), -1).unsqueeze(1)
    return cos, sin


def rope_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate X `[T, heads, D]` in place."""
    swapped = torch.roll(x, x.shape[-1] // 2, -1).mul_(sin)
    x.mul_(cos).add_(swapped)
