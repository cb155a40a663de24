"""The likeliest token of each row, and whether the row can be sampled from at all.

*Semantics*: `PEAK[t] = max_v L[t, v]` and `LIKELIEST[t] = min {v : L[t, v] = PEAK[t]}`; where some
`L[t, v]` is not finite PEAK[t] is NaN and LIKELIEST[t] any token. L `[T, V]` and PEAK `[T]` fp32,
LIKELIEST `[T]` int64.

A row is cut into parts of PART columns, so that one row alone keeps the whole device busy; a second
launch joins them. Maxima have no order of summation, so the cut changes nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 4096


@triton.jit
def part_peaks_kernel(logits_ptr, peak_ptr, first_ptr, size, parts, PART: tl.constexpr):
    """The *Semantics* above of one part of one row, into PEAK and FIRST `[T, parts]`."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * PART + tl.arange(0, PART)
    inside = column < size
    logits = tl.load(logits_ptr + row * size + column, mask=inside, other=float("-inf"))
    peak = tl.max(logits, 0)
    first = tl.min(tl.where(logits == peak, column, size - 1), 0)
    wrong = tl.max((inside & ~(tl.abs(logits) < float("inf"))).to(tl.int32), 0)
    tl.store(peak_ptr + row * parts + part, tl.where(wrong > 0, float("nan"), peak))
    tl.store(first_ptr + row * parts + part, first)


@triton.jit
def join_peaks_kernel(part_ptr, first_ptr, peak_ptr, likeliest_ptr, parts, BLOCK: tl.constexpr):
    """One row's parts joined; BLOCK is the least power of two from `parts` on."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < parts
    peaks = tl.load(part_ptr + row * parts + i, mask=inside, other=float("-inf"))
    firsts = tl.load(first_ptr + row * parts + i, mask=inside, other=2147483647)
    known = tl.where(peaks == peaks, peaks, float("-inf"))
    peak = tl.max(known, 0)
    first = tl.min(tl.where(known == peak, firsts, 2147483647), 0)
    wrong = tl.max((peaks != peaks).to(tl.int32), 0)
    tl.store(peak_ptr + row, tl.where(wrong > 0, float("nan"), peak))
    tl.store(likeliest_ptr + row, first.to(tl.int64))


def row_peaks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """LIKELIEST and PEAK of contiguous L `[T, V]` fp32."""
    rows, size = logits.shape
    parts = triton.cdiv(size, PART)
    part_peak = logits.new_empty(rows, parts)
    part_first = logits.new_empty(rows, parts, dtype=torch.int32)
    peak, likeliest = logits.new_empty(rows), logits.new_empty(rows, dtype=torch.int64)
    part_peaks_kernel[(rows, parts)](logits, part_peak, part_first, size, parts, PART=PART)
    join_peaks_kernel[(rows,)](
        part_peak, part_first, peak, likeliest, parts,
        BLOCK=triton.next_power_of_2(parts), num_warps=1,
    )  # fmt: skip
    return likeliest, peak
