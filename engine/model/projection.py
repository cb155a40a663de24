"""A linear of the decoder: weight, bias, and the adapters of a step's rows.

*Semantics*: `Y = round(adapted(X Wᵀ) + bias)`, where `adapted` is `kernels.sgmv`; sums in fp32,
rounded once to X's dtype.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.kernels.linear import Linear
from loraplex.kernels.sgmv import Segment, sgmv_

Read = Callable[[str, tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True)
class Projection:
    """One or several linears on the same input, fused: their outputs are columns side by side."""

    linear: Linear
    bias: Tensor | None  # fp32 [out]

    def apply(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Y `[T, out]` of X `[T, in]`, both of the decoder's dtype."""
        y = self.linear.apply(x)
        if segments:
            sgmv_(y, x, segments)
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype)


def read_projection(
    read: Read,
    linears: Sequence[tuple[str, int]],
    in_features: int,
    bias: bool,
    dtype: torch.dtype,
    prepare: Callable[[Tensor], Linear],
) -> Projection:
    """Fuse linears, given by name and outputs, their values rounded to `dtype`.

    Raises what `read` raises.
    """
    parts = [read(f"{name}.weight", (out, in_features), dtype) for name, out in linears]
    rows = [read(f"{name}.bias", (out,), dtype).float() for name, out in linears if bias]
    return Projection(prepare(torch.cat(parts)), torch.cat(rows) if rows else None)
