"""A linear of the decoder: weight, bias, and the adapters of a step's rows.

*Semantics*: `Y = round(adapted(X Wᵀ) + bias)`, where `adapted` is `kernels.sgmv`; sums in fp32,
rounded once to X's dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.engine.model.weights import Checkpoint
from loraplex.kernels.linear import Linear, prepare_linear
from loraplex.kernels.sgmv import Segment, sgmv_


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
    checkpoint: Checkpoint,
    names: Sequence[str],
    in_features: int,
    out_features: Sequence[int],
    *,
    bias: bool,
    dtype: torch.dtype,
) -> Projection:
    """Fuse the linears `names`, their values rounded to `dtype`; raises `ModelError`."""
    sizes = list(zip(names, out_features, strict=True))
    parts = [checkpoint.read(f"{n}.weight", (out, in_features), dtype).float() for n, out in sizes]
    rows = [checkpoint.read(f"{n}.bias", (out,), dtype).float() for n, out in sizes if bias]
    return Projection(prepare_linear(torch.cat(parts)), torch.cat(rows) if rows else None)
