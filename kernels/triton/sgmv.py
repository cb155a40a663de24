"""Segmented gather matrix-vector product: each row's low-rank adapter, added to its projection.

The operator of Punica (Chen et al., 2023), for fused projections, true ranks and any mix of images
in two launches. *Semantics*, as in `kernels/sgmv.py`, for rows t under an image and each slice s
(columns `C_s` of Y, rows `R_s` of A): `H[t, r] = SCALE[r] · Σ_i X[t, i] · A[r, i]`, then
`Y[t, C_s] ← GAIN_s · (Y[t, C_s] + Σ_{r in R_s} H[t, r] · B_s[r, :]) + BIAS_s`, in place.

`[r, in]` and `[r, out]` are how an image stores A and B: no rank is padded, and loads of weights
are as wide as they can be. A and B are bf16, fp16, fp32, or int8 or fp8 whose scales SCALE holds; X
is bf16, fp16 or fp32. The sum over the inputs is cut into planes whose number depends on the inputs
alone, and the planes are added in order: no atomics, nothing to zero, and a row's bits depend on no
other row. Tiles of 16 and of 32 rows agree on every bit, as both take the same matrix instruction.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex.kernels.triton import sgmv_plan
from loraplex.kernels.triton.operands import dot, operand_dtype
from loraplex.kernels.triton.sgmv_plan import MAX_SLICES, SgmvLayout

UNIT_BITS = tl.constexpr(sgmv_plan.ALIGNMENT * 8)
HEAD = tl.constexpr(sgmv_plan.PLAN_HEAD)
TILE = tl.constexpr(sgmv_plan.TILE)
RECORD_HEAD = tl.constexpr(sgmv_plan.RECORD_HEAD)
RECORD_SLICE = tl.constexpr(sgmv_plan.RECORD_SLICE)

RANK_TILE = 16
INPUT_TILE = 128
MAX_PLANES = 8
PLANE_INPUTS = 512


@triton.jit
def _array(arena_ptr, place):
    """Pointer to an array of the arena, known to be aligned."""
    unit: tl.constexpr = UNIT_BITS // arena_ptr.dtype.element_ty.primitive_bitwidth
    return arena_ptr + tl.multiple_of(place.to(tl.int64) * unit, unit)


@triton.jit(do_not_specialize=["plan_ptr", "permutation"])
def shrink_kernel(
    x_ptr, weights_ptr, fp32_ptr, h_ptr, plan_ptr, table_ptr, inputs, permutation,
    stride_x, stride_h, stride_plane, stride_table,
    PLANES: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr,
    EVEN: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """*Semantics*: `H[p, n, r] = SCALE[r] · Σ_{i in plane p} X[PERM[n], i] · A[r, i]`.

    A tile of rows, RANKS ranks and one plane a program; H fp32 `[PLANES, rows, ranks]`. EVEN says
    that planes are whole tiles of INPUTS.
    """
    tile, block, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tile >= tl.load(plan_ptr):
        return
    at = plan_ptr + HEAD + tile * TILE
    first, rows, slot = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    line = table_ptr + slot.to(tl.int64) * stride_table
    ranks = tl.load(line + 2)
    if block * RANKS >= ranks:
        return
    n, r, i = tl.arange(0, ROWS), block * RANKS + tl.arange(0, RANKS), tl.arange(0, INPUTS)
    row = tl.load(plan_ptr + permutation + first + n, mask=n < rows, other=0).to(tl.int64)
    x = x_ptr + row[:, None] * stride_x + i[None, :]
    a = _array(weights_ptr, tl.load(line)) + r[None, :] * inputs + i[:, None]
    x_inside, a_inside = (n < rows)[:, None], (r < ranks)[None, :]
    part = tl.cdiv(tl.cdiv(inputs, PLANES), INPUTS) * INPUTS
    total = tl.zeros((ROWS, RANKS), tl.float32)
    for start in range(plane * part, tl.minimum((plane + 1) * part, inputs), INPUTS):
        if EVEN:
            x_tile = tl.load(x + start, mask=x_inside, other=0.0)
            a_tile = tl.load(a + start, mask=a_inside, other=0.0)
        else:
            left = i < inputs - start
            x_tile = tl.load(x + start, mask=x_inside & left[None, :], other=0.0)
            a_tile = tl.load(a + start, mask=a_inside & left[:, None], other=0.0)
        total = dot(x_tile, a_tile, total, OPERAND)
    scale = tl.load(_array(fp32_ptr, tl.load(line + 1)) + r, mask=r < ranks, other=0.0)
    h = h_ptr + plane * stride_plane + (first + n).to(tl.int64)[:, None] * stride_h + r[None, :]
    tl.store(h, total * scale[None, :], mask=x_inside & a_inside)


@triton.jit(do_not_specialize=["plan_ptr", "permutation"])
def expand_kernel(
    h_ptr, weights_ptr, fp32_ptr, y_ptr, plan_ptr, table_ptr, permutation,
    stride_h, stride_plane, stride_y, stride_table,
    WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr, ALIGNED: tl.constexpr,
    PLANES: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """*Semantics*: `Y[t, c] ← GAIN[c] · (Y[t, c] + Σ_r Σ_p H[p, n, r] · B[r, c]) + BIAS[c]`.

    t is `PERM[n]`; a tile of rows and COLUMNS columns of one slice a program. Slices have WIDTH0,
    WIDTH1 and WIDTH2 columns, all multiples of ALIGNED.
    """
    tile, block = tl.program_id(0), tl.program_id(1)
    if tile >= tl.load(plan_ptr):
        return
    second: tl.constexpr = tl.cdiv(WIDTH0, COLUMNS)
    third: tl.constexpr = second + tl.cdiv(WIDTH1, COLUMNS)
    number = (block >= second).to(tl.int32) + (block >= third).to(tl.int32)
    width = tl.where(number == 0, WIDTH0, tl.where(number == 1, WIDTH1, WIDTH2))
    start = tl.where(number == 0, 0, tl.where(number == 1, WIDTH0, WIDTH0 + WIDTH1))
    skipped = tl.where(number == 0, 0, tl.where(number == 1, second, third))
    width, start = tl.multiple_of(width, ALIGNED), tl.multiple_of(start, ALIGNED)

    at = plan_ptr + HEAD + tile * TILE
    first, rows, slot = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    line = table_ptr + slot.to(tl.int64) * stride_table + RECORD_HEAD + number * RECORD_SLICE
    rank, gain, bias = tl.load(line + 1), tl.load(line + 3), tl.load(line + 4)
    if (rank == 0) & (gain < 0) & (bias < 0):
        return
    n, r = tl.arange(0, ROWS), tl.arange(0, RANKS)
    c = (block - skipped) * COLUMNS + tl.arange(0, COLUMNS)
    inside, wanted = (n < rows)[:, None], (c < width)[None, :]
    h = h_ptr + (first + n).to(tl.int64)[:, None] * stride_h + (tl.load(line) + r)[None, :]
    b = _array(weights_ptr, tl.load(line + 2)) + r[:, None] * width + c[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for done in range(0, rank, RANKS):
        left = r < rank - done
        h_tile = tl.load(h + done, mask=inside & left[None, :], other=0.0)
        for plane in tl.static_range(1, PLANES):
            part = tl.load(h + done + plane * stride_plane, mask=inside & left[None, :], other=0.0)
            h_tile += part
        b_tile = tl.load(b + done * width, mask=left[:, None] & wanted, other=0.0)
        total = dot(h_tile, b_tile, total, OPERAND)

    row = tl.load(plan_ptr + permutation + first + n, mask=n < rows, other=0).to(tl.int64)
    y = y_ptr + row[:, None] * stride_y + (start + c)[None, :]
    total += tl.load(y, mask=inside & wanted, other=0.0).to(tl.float32)
    if gain >= 0:
        total *= tl.load(_array(fp32_ptr, gain) + c, mask=c < width, other=1.0)[None, :]
    if bias >= 0:
        total += tl.load(_array(fp32_ptr, bias) + c, mask=c < width, other=0.0)[None, :]
    tl.store(y, total.to(y_ptr.dtype.element_ty), mask=inside & wanted)


@dataclass(frozen=True)
class Arena:
    """The images of one dtype on the device: the same bytes as their dtype, and as fp32."""

    weights: Tensor
    fp32: Tensor

    @classmethod
    def of(cls, data: Tensor, dtype: torch.dtype) -> Self:
        """View bytes, uint8 `[n]` with n a multiple of 4, whose start is aligned to 128."""
        return cls(data.view(dtype), data.view(torch.float32))


@dataclass(frozen=True)
class SgmvStep:
    """A step's plan on the device, and the scratch that holds H."""

    layout: SgmvLayout
    plan: Tensor  # int32 [layout.size]
    scratch: Tensor  # fp32 [planes, rows, ranks], of any content


def planes(inputs: int) -> int:
    """Into how many parts the sum over `inputs` is cut."""
    return max(1, min(MAX_PLANES, inputs // PLANE_INPUTS))


def sgmv_scratch(rows: int, ranks: int, inputs: int, device: torch.device | str) -> Tensor:
    """Scratch for projections of up to `inputs` inputs, images' ranks adding up to `ranks`."""
    padded = triton.cdiv(ranks, RANK_TILE) * RANK_TILE
    return torch.empty(planes(inputs), rows, padded, dtype=torch.float32, device=device)


def sgmv_(
    y: Tensor, x: Tensor, arena: Arena, table: Tensor, step: SgmvStep, widths: tuple[int, ...]
) -> None:
    """Add to Y `[T, Σ widths]` what the image of each row makes of X `[T, in]`.

    Rows of X and Y are contiguous. TABLE int32 `[slots, RECORD]` holds the lines of this
    projection; Y is bf16, fp16 or fp32.
    """
    layout, scratch = step.layout, step.scratch
    parts, inputs = planes(x.shape[1]), x.shape[1]
    common = (step.plan, table)
    strides = (scratch.stride(1), scratch.stride(0))
    blocks = triton.cdiv(scratch.shape[2], RANK_TILE)
    shrink_kernel[(layout.tiles, blocks, parts)](
        x, arena.weights, arena.fp32, scratch, *common, inputs, layout.permutation,
        x.stride(0), *strides, table.stride(0),
        PLANES=parts, ROWS=layout.tile_rows, RANKS=RANK_TILE, INPUTS=INPUT_TILE,
        EVEN=inputs % (parts * INPUT_TILE) == 0, OPERAND=operand_dtype(x), **_options(stages=3),
    )  # fmt: skip
    columns = 128 if min(widths) >= 1024 else 64
    width0, width1, width2 = (*widths, *(0,) * (MAX_SLICES - len(widths)))
    expand_kernel[(layout.tiles, sum(triton.cdiv(width, columns) for width in widths))](
        scratch, arena.weights, arena.fp32, y, *common, layout.permutation,
        *strides, y.stride(0), table.stride(0),
        WIDTH0=width0, WIDTH1=width1, WIDTH2=width2,
        ALIGNED=16 if all(width % 16 == 0 for width in widths) else 1,
        PLANES=parts, ROWS=layout.tile_rows, RANKS=RANK_TILE, COLUMNS=columns,
        OPERAND=operand_dtype(x), **_options(stages=2),
    )  # fmt: skip


def _options(stages: int) -> dict[str, int]:
    """Of a launch; AMD's compiler is told not to take another instruction for taller tiles."""
    options = {"num_warps": 4, "num_stages": stages}
    return options | ({"matrix_instr_nonkdim": 16} if torch.version.hip else {})
