"""Draws each row's token on the device, and hands tokens to the step after.

*Semantics*, as of `engine/draw.py`: a row's tokens have the weights `w = exp((l - peak) / T)`.
Top-k keeps those whose logit is no less than the k-th largest, top-p those of these whose weight is
no less than that of the last token of the shortest prefix, likeliest first, which has `top_p` of
their sum, min-p those with `w >= min_p`. The token is the first where the running sum of what is
kept, in the order of tokens, passes `share` of its whole. Row t's PARAMETERS `[T, 5]` fp32 are
(1 / T, top_k or 0, top_p, min_p, share); where 1 / T is 0 its token is LIKELIEST[t]. CHOSEN `[T]`
int32 is -1 where PEAK[t] is NaN.

Limits are found by bisection over the bits of fp32, which needs neither a sort nor scratch: each
pass reads the row once, from the cache. One program has one row, whose bits no neighbour changes.
"""

import triton
import triton.language as tl
from torch import Tensor

FIELDS = 5
BLOCK = 2048
FEED_BLOCK = 256
LOWEST_KEY = tl.constexpr(-0x7F800000)  # of the least finite number
LOWEST = tl.constexpr(-3.4028234663852886e38)
ONE_BITS = tl.constexpr(0x3F800000)
NOWHERE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def key_of(value):
    """An int32 that orders fp32 numbers as their values do."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The number that a key belongs to."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def count_from(logits_ptr, size, bound, BLOCK: tl.constexpr):
    """How many logits are no less than `bound`."""
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + column, mask=column < size, other=float("-inf"))
        counts += (logit >= bound).to(tl.int32)
    return tl.sum(counts, 0)


@triton.jit
def kept_weights(logits_ptr, column, size, peak, factor, bound, floor):
    """Weights of some columns, 0 where a limit leaves them out."""
    logit = tl.load(logits_ptr + column, mask=column < size, other=float("-inf"))
    weight = tl.exp((logit - peak) * factor)
    return tl.where((logit >= bound) & (weight >= floor), weight, 0.0)


@triton.jit
def mass_from(logits_ptr, size, peak, factor, bound, floor, BLOCK: tl.constexpr):
    """The sum of the weights that the limits keep."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        sums += kept_weights(logits_ptr, column, size, peak, factor, bound, floor)
    return tl.sum(sums, 0)


@triton.jit
def nth_logit(logits_ptr, size, peak, n, BLOCK: tl.constexpr):
    """The n-th largest logit; the least finite number when there are not so many."""
    low = LOWEST_KEY + tl.zeros([], tl.int64)
    high = key_of(peak).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        if count_from(logits_ptr, size, value_of(middle), BLOCK) >= n:
            low = middle
        else:
            high = middle
    return value_of(low)


@triton.jit
def least_weight(logits_ptr, size, peak, factor, bound, top_p, BLOCK: tl.constexpr):
    """The least weight that top-p keeps."""
    goal = top_p * mass_from(logits_ptr, size, peak, factor, bound, 0.0, BLOCK)
    low = tl.zeros([], tl.int32)
    high = ONE_BITS + 1 + tl.zeros([], tl.int32)
    while high - low > 1:
        middle = (low + high) >> 1
        floor = middle.to(tl.float32, bitcast=True)
        if mass_from(logits_ptr, size, peak, factor, bound, floor, BLOCK) >= goal:
            low = middle
        else:
            high = middle
    return low.to(tl.float32, bitcast=True)


@triton.jit
def place_of(logits_ptr, size, peak, factor, bound, floor, share, BLOCK: tl.constexpr):
    """The token where the running sum of what is kept passes `share` of its whole."""
    whole = peak * 0.0
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        whole += tl.sum(kept_weights(logits_ptr, column, size, peak, factor, bound, floor), 0)
    goal, so_far, before = share * whole, peak * 0.0, peak * 0.0
    found = tl.full([], -1, tl.int32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mass = tl.sum(kept_weights(logits_ptr, column, size, peak, factor, bound, floor), 0)
        passes = (found < 0) & ((so_far + mass > goal) | (so_far + mass >= whole))
        before = tl.where(passes, so_far, before)
        found = tl.where(passes, start, found)
        so_far += mass
    column = found + tl.arange(0, BLOCK)
    kept = kept_weights(logits_ptr, column, size, peak, factor, bound, floor)
    sums = before + tl.cumsum(kept, 0)
    passes = ((sums > goal) | (sums >= tl.max(sums, 0))) & (kept > 0)
    first = tl.min(tl.where(passes, column, NOWHERE), 0)
    last = tl.max(tl.where(kept > 0, column, 0), 0)  # where a scan's rounding leaves no other
    return tl.minimum(first, last)


@triton.jit
def draw_kernel(
    logits_ptr, likeliest_ptr, peak_ptr, parameters_ptr, chosen_ptr, size,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The *Semantics* above of one row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * size
    parameters_ptr += row * FIELDS
    factor, top_k = tl.load(parameters_ptr), tl.load(parameters_ptr + 1)
    top_p, min_p = tl.load(parameters_ptr + 2), tl.load(parameters_ptr + 3)
    peak, token = tl.load(peak_ptr + row), tl.load(likeliest_ptr + row).to(tl.int32)
    if (factor > 0) & (peak == peak):
        bound, floor = LOWEST + peak * 0.0, min_p
        if (top_k > 0) & (top_k < size):
            bound = nth_logit(logits_ptr, size, peak, top_k.to(tl.int32), BLOCK)
        if top_p < 1:
            least = least_weight(logits_ptr, size, peak, factor, bound, top_p, BLOCK)
            floor = tl.maximum(floor, least)
        share = tl.load(parameters_ptr + 4)
        token = place_of(logits_ptr, size, peak, factor, bound, floor, share, BLOCK)
    tl.store(chosen_ptr + row, tl.where(peak == peak, token, -1))


@triton.jit(do_not_specialize=["count"])
def feed_kernel(ids_ptr, chosen_ptr, count, BLOCK: tl.constexpr):
    """IDS[t] = max(CHOSEN[-1 - IDS[t]], 0) where IDS[t] is negative."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + i, mask=i < count, other=0)
    chosen = tl.load(chosen_ptr + (-1 - token), mask=token < 0, other=0)
    tl.store(ids_ptr + i, tl.maximum(chosen, 0), mask=token < 0)


def draw_rows(
    logits: Tensor, likeliest: Tensor, peak: Tensor, parameters: Tensor, chosen: Tensor
) -> None:
    """Fill CHOSEN for contiguous L `[T, V]` fp32; LIKELIEST and PEAK are those of `row_peaks`."""
    rows, size = logits.shape
    if rows:
        draw_kernel[(rows,)](
            logits, likeliest, peak, parameters, chosen, size,
            FIELDS=FIELDS, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


def feed(ids: Tensor, chosen: Tensor) -> None:
    """Put chosen tokens in the place of what stands for them in IDS `[n]` int32."""
    count = ids.shape[0]
    feed_kernel[(triton.cdiv(count, FEED_BLOCK),)](ids, chosen, count, BLOCK=FEED_BLOCK)
