"""Segmented gather matrix-vector product: each row's low-rank adapter, added to its projection.

The operator of Punica (Chen et al., 2023), for fused projections and true ranks.

*Semantics*, for rows t of a segment under adapter w and each slice s (columns `C_s` of the fused
projection, rows `R_s` of A): `H[t, r] = SCALE[r] · Σ_i X[t, i] · A[r, i]`, then
`Y[t, C_s] ← GAIN_s · (Y[t, C_s] + H[t, R_s] · B_s) + BIAS_s`, in place; X `[T, in]` of any float
dtype, Y `[T, out]` fp32, A `[Σ ranks, in]`, B_s `[rank_s, out_s]`, GAIN_s and BIAS_s `[out_s]`; all
sums in fp32. Of an int8 adapter A and B are whole numbers, exact in fp32, and SCALE has the rest.
An absent B, GAIN or BIAS costs nothing.

Rows of no segment are not touched, and a row's bits depend on no other row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from loraplex.kernels.rows import pad_columns, pad_rows, threads_for


@dataclass(frozen=True)
class LoraSlice:
    """One linear's part of a fused projection: columns `[start, stop)` of Y, rank rows of A."""

    start: int
    stop: int
    first_rank: int
    rank: int
    b: Tensor | None = None  # fp32 [rank, out_s], columns padded by `pad_columns`
    gain: Tensor | None = None  # fp32 [out_s]
    bias: Tensor | None = None  # fp32 [out_s]


@dataclass(frozen=True)
class LoraWeights:
    """One adapter's part in one projection; ranks are padded by `pad_columns`."""

    a: Tensor  # fp32 [in, Σ ranks]
    scale: Tensor  # fp32 [Σ ranks]
    slices: tuple[LoraSlice, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the weights take."""
        rows = (t for s in self.slices for t in (s.b, s.gain, s.bias) if t is not None)
        return sum(t.nbytes for t in (self.a, self.scale, *rows))

    @property
    def work(self) -> int:
        """Multiply-adds for one row."""
        return self.a.numel() + sum(s.b.numel() for s in self.slices if s.b is not None)


Segment = tuple[int, int, LoraWeights]  # rows [start, stop) and their adapter


def lora_weights(a: Tensor, scale: Tensor, slices: Sequence[LoraSlice]) -> LoraWeights:
    """Weights from A `[Σ ranks, in]`, SCALE `[Σ ranks]` and unpadded slices, all fp32."""
    padded = (
        LoraSlice(
            s.start, s.stop, s.first_rank, s.rank, s.b if s.b is None else pad_columns(s.b),
            s.gain, s.bias,
        )
        for s in slices
    )  # fmt: skip
    return LoraWeights(pad_columns(a.t()).contiguous(), pad_columns(scale), tuple(padded))


def sgmv_(y: Tensor, x: Tensor, segments: Sequence[Segment]) -> None:
    """Add to Y `[T, out]` what the adapter of each segment makes of X `[T, in]`."""
    with threads_for(sum((stop - start) * w.work for start, stop, w in segments)):
        for start, stop, weights in segments:
            _add(y[start:stop], x[start:stop], weights)


def _add(y: Tensor, x: Tensor, weights: LoraWeights) -> None:
    h = _shrink(x, weights) if weights.scale.numel() else None
    for part in weights.slices:
        columns = y[:, part.start : part.stop]
        if part.b is not None and h is not None:
            delta = h[:, part.first_rank : part.first_rank + part.rank] @ part.b
            columns += delta[: y.shape[0], : part.stop - part.start]
        if part.gain is not None:
            columns *= part.gain
        if part.bias is not None:
            columns += part.bias


def _shrink(x: Tensor, weights: LoraWeights) -> Tensor:
    """H, with rows and ranks padded."""
    return (pad_rows(x.float()) @ weights.a).mul_(weights.scale)
