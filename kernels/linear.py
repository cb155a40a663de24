"""Matrix product with a constant weight.

*Semantics*: `Y[t, o] = Σ_i X[t, i] · W[o, i]`; X `[T, in]` of any float dtype, W `[out, in]` fp32,
Y `[T, out]` fp32, sums in fp32.

A row of Y has the same bits whatever the other rows and their number. On a CPU the weight is packed
once by oneDNN, which is also the fastest at few rows; where that operator is missing, or is found
not to treat rows alike, rows are padded as `rows.py` says.

oneDNN keeps one running sum per output, whose rounding error grows with its length. So long sums
are cut into parts that are added in order: parts as long as those of MKL, from which Transformers'
results on a CPU come, and which on AVX2 gives the same bits.
"""

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from loraplex.kernels.rows import pad_columns, pad_rows, rows_agree

PROBE_ROWS = 37
LONGEST_SUM = 192
PACKED_FOR_ROWS = 8  # oneDNN lays the weight out for about this many rows


class Linear(Protocol):
    """A weight, ready to be applied."""

    def apply(self, x: Tensor) -> Tensor:
        """Y `[T, out]` fp32 of X `[T, in]`."""
        ...


class PackedLinear:
    """The weight in oneDNN's own layout, cut along the sum."""

    def __init__(self, weight: Tensor) -> None:
        self._weights = [
            torch.ops.mkldnn._reorder_linear_weight(part.contiguous(), PACKED_FOR_ROWS)
            for part in _parts(weight)
        ]

    def apply(self, x: Tensor) -> Tensor:
        """Y `[T, out]` fp32 of X `[T, in]`."""
        product = torch.ops.mkldnn._linear_pointwise
        first, *parts = _parts(x.float())
        y: Tensor = product(first, self._weights[0], None, "none", [], "")
        for part, weight in zip(parts, self._weights[1:], strict=True):
            y = product.binary(part, y, weight, None, "add")
        return y


def _parts(x: Tensor) -> Sequence[Tensor]:
    """X `[n, in]` cut along `in`, each part contiguous."""
    rows, columns = x.shape
    if columns % LONGEST_SUM == 0:  # one copy instead of one a part
        return x.reshape(rows, -1, LONGEST_SUM).transpose(0, 1).contiguous().unbind(0)
    starts = range(0, columns, LONGEST_SUM)
    return [x[:, start : start + LONGEST_SUM].contiguous() for start in starts]


class PaddedLinear:
    """The weight as it is, for any device."""

    def __init__(self, weight: Tensor) -> None:
        self._out = weight.shape[0]
        self._weight = pad_columns(weight.t()).contiguous()

    def apply(self, x: Tensor) -> Tensor:
        """Y `[T, out]` fp32 of X `[T, in]`."""
        return (pad_rows(x.float()) @ self._weight)[: x.shape[0], : self._out]


def prepare_linear(weight: Tensor) -> Linear:
    """Make W `[out, in]` fp32 ready; the caller need not keep it."""
    if weight.device.type == "cpu" and packed_rows_agree(*weight.shape):
        return PackedLinear(weight)
    return PaddedLinear(weight)


@functools.cache
def packed_rows_agree(out_features: int, in_features: int) -> bool:
    """Whether oneDNN is there and treats each row of a product of this shape alike."""
    if not (torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    generator = torch.Generator().manual_seed(0)
    linear = PackedLinear(torch.randn(out_features, in_features, generator=generator))
    x = torch.randn(PROBE_ROWS, in_features, generator=generator)
    return rows_agree(linear.apply, x, [1, 2, 3, 4, 7, 8, 16])
