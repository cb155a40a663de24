"""Rows of keys and values as int8, each with a scale of its own.

*Semantics*, for a row x `[D]` of one token and KV head: `scale = max_i |x_i| / 127`,
`code_i = round(x_i / scale)`, halves to even; `code_i · scale` stands for x_i. A scale below
`LEAST_SCALE` is 0, and so are its codes. Then `|x_i - code_i · scale| ≤ scale / 2` up to rounding,
or `≤ 127 · LEAST_SCALE` where the scale is 0: a row's largest entry sets its scale, so nothing is
clamped. The scale of a row that is not finite is not either, and its codes are 0: all that such a
row stands for is NaN, and stays visible.

This file knows rows; it refuses to know where they are kept.
"""

import torch
from torch import Tensor

MOST = 127  # the largest code
LEAST_SCALE = 2.0**-126  # the least normal fp32 number: devices may take less for 0


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 `[…, D]` and scales fp32 `[…]` of X `[…, D]`, of any float dtype."""
    x = x.float()
    scale = x.abs().amax(-1) / MOST
    scale = torch.where(scale < LEAST_SCALE, 0.0, scale)
    divides = (scale > 0) & (scale < torch.inf)
    steps = torch.where(divides[..., None], x / scale[..., None], 0.0)
    return steps.round().to(torch.int8), scale


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """What CODES int8 `[…, D]` with SCALE `[…]` stand for, fp32."""
    return codes.float() * scale[..., None]
