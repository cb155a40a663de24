"""Draws a token from one row of logits, within limits.

Weights are relative to that of the likeliest token, which is 1; they are divided by their sum
nowhere. Top-k, and min-p without top-p, find what they keep among the logits, so that few weights
are computed. Top-p needs the sum of all, and so does a draw without limits, which then looks at one
block of tokens. This file knows one row's numbers; it refuses to know requests and where randomness
comes from.
"""

import math
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

BLOCK = 256  # tokens that are summed together, or whose highest logit is looked at
LIKELY = 2048  # tokens with this part of what top-p leaves out are looked at first
HOTTEST = 1e30  # temperatures above are as good as this, whose inverse is still a normal fp32

Floats = NDArray[np.float32]
Tokens = NDArray[np.intp]


class Limits(Protocol):
    """Within what a row draws; `top_k` is 0 for no limit, others are 1 and 0."""

    @property
    def temperature(self) -> float: ...  # noqa: D102

    @property
    def top_k(self) -> int: ...  # noqa: D102

    @property
    def top_p(self) -> float: ...  # noqa: D102

    @property
    def min_p(self) -> float: ...  # noqa: D102


class Draw(NamedTuple):
    """How a row draws: within which limits, and with which `share`, in [0, 1)."""

    sampling: Limits
    share: float


_LOWEST = np.finfo(np.float32).min  # above that of a token which may not come


class Drawer:
    """Draws from rows of the same vocabulary, one after the other, in the same memory."""

    def __init__(self, vocabulary: int) -> None:
        self._blocks = np.zeros((-(-vocabulary // BLOCK), BLOCK), np.float32)
        self._weights = self._blocks.reshape(-1)[:vocabulary]  # zeros follow it

    def draw(self, logits: Floats, peak: float, sampling: Limits, share: float) -> int:
        """The token where the running sum of what the limits keep passes `share`, in [0, 1).

        `logits` is `[vocabulary]`; it may hold -inf. `peak`, finite, is the highest.
        """
        tokens = _kept_by_logit(logits, peak, sampling)
        if tokens is not None:
            kept = _weigh(logits[tokens], peak, sampling, None)
            return int(tokens[_draw_within(kept, float(kept.sum()), sampling, share)])
        weights = _weigh(logits, peak, sampling, self._weights)
        if sampling.top_p >= 1:
            return _draw_from_all(self._blocks, share)
        whole = float(weights.sum())
        tokens = _candidates(weights, whole, sampling)
        return int(tokens[_draw_within(weights[tokens], whole, sampling, share)])


def _kept_by_logit(logits: Floats, peak: float, sampling: Limits) -> Tokens | None:
    """Tokens in their order among which are all that the limits keep; None for all there are.

    With top-k they are the `top_k` likeliest and those as likely as the last of them.
    """
    if sampling.top_k:
        return _likeliest(logits, sampling.top_k)
    if sampling.min_p and sampling.top_p >= 1:
        least = peak + min(sampling.temperature, HOTTEST) * (math.log(sampling.min_p) - 1e-3)
        return np.flatnonzero(logits >= max(least, float(_LOWEST)))
    return None


def _likeliest(logits: Floats, count: int) -> Tokens:
    """As many blocks hold as many tokens that are no less than the least of the blocks' highest."""
    full = logits[: len(logits) // BLOCK * BLOCK].reshape(-1, BLOCK)
    bound = _nth(full.max(axis=1), count) if count <= len(full) else _LOWEST
    tokens = np.flatnonzero(logits >= max(bound, _LOWEST))
    likely = logits[tokens]
    return tokens if count >= len(likely) else tokens[likely >= _nth(likely, count)]


def _nth(values: Floats, n: int) -> np.float32:
    """The n-th largest value."""
    place = len(values) - n
    return np.float32(np.partition(values, place)[place])


def _weigh(logits: Floats, peak: float, sampling: Limits, out: Floats | None) -> Floats:
    factor = np.float32(1 / min(sampling.temperature, HOTTEST))
    weights: Floats = np.subtract(logits, np.float32(peak), out=out)
    np.exp(np.multiply(weights, factor, out=weights), out=weights)
    return weights


def _draw_from_all(blocks: Floats, share: float) -> int:
    """Choose a block of tokens by its mass, then one of its tokens: a tenth of a running sum."""
    sums = np.cumsum(blocks.sum(axis=1), dtype=np.float64)
    block = _place(sums, share)
    before = float(sums[block - 1]) if block else 0.0
    rest = (float(sums[-1]) * share - before) / (float(sums[block]) - before)
    return block * BLOCK + _place(np.cumsum(blocks[block], dtype=np.float64), rest)


def _draw_within(kept: Floats, whole: float, sampling: Limits, share: float) -> int:
    """The place drawn of `kept`, which holds all that top-p and min-p keep of a mass `whole`."""
    kept[kept < _floor(kept, whole, sampling)] = 0
    return _place(np.cumsum(kept, dtype=np.float64), share)


def _place(sums: NDArray[np.float64], share: float) -> int:
    """Where running sums pass `share`, in [0, 1], of the whole; what is there has some mass."""
    place = int(np.searchsorted(sums, sums[-1] * share, side="right"))
    return place if place < len(sums) else int(np.searchsorted(sums, sums[-1]))


def _candidates(weights: Floats, whole: float, sampling: Limits) -> Tokens:
    """Tokens in their order, among which are all that top-p and min-p keep."""
    others = (1 - sampling.top_p) * whole
    likely = np.flatnonzero(weights >= max(sampling.min_p, others / LIKELY))
    if float(weights[likely].sum()) >= sampling.top_p * whole:
        return likely
    # All tokens under `others / vocabulary` are less than `others`; half leaves room for rounding.
    return np.flatnonzero(weights >= max(sampling.min_p, others / len(weights) / 2))


def _floor(kept: Floats, whole: float, sampling: Limits) -> float:
    """The least weight that the limits keep, of `kept`, which holds all that are as large.

    Of top-p it is that of the last token of the shortest prefix, likeliest first, which has `top_p`
    of `whole`.
    """
    if sampling.top_p >= 1:
        return sampling.min_p
    ordered = np.sort(kept)[::-1]
    sums = np.cumsum(ordered, dtype=np.float64)
    last = int(np.searchsorted(sums, sampling.top_p * whole))
    return max(sampling.min_p, float(ordered[min(last, len(ordered) - 1)]))
