"""Tables of the rotary embedding's cosines and sines, from a `RopeConfig`.

A table rather than a computation per step: a position's bits must not depend on which rows share
its step. This file knows frequencies; it refuses to know heads.
"""

import math

import torch
from torch import Tensor

from loraplex.engine.model.config import RopeConfig


def rotary_tables(rope: RopeConfig, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, fp32 `[positions, head_dim / 2]`."""
    angles = torch.arange(positions).float()[:, None] * frequencies(rope, head_dim)
    return angles.cos() * rope.amplitude, angles.sin() * rope.amplitude


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of columns, fp32 `[head_dim / 2]`."""
    periods = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    plain = 1.0 / periods
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _blend(1.0 / (rope.factor * periods), plain, _yarn_weight(rope, head_dim))
    return plain


def _blend(stretched: Tensor, plain: Tensor, weight: Tensor) -> Tensor:
    return stretched * (1 - weight) + plain * weight


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Stretch long waves, keep short ones, blend between (Llama 3.1)."""
    turns = rope.original_positions / (2 * math.pi / plain)
    low, high = rope.low_frequency, rope.high_frequency
    return _blend(plain / rope.factor, plain, ((turns - low) / (high - low)).clamp(0, 1))


def _yarn_weight(rope: RopeConfig, head_dim: int) -> Tensor:
    """How much of each frequency stays as it is (YaRN: Peng et al., 2023)."""

    def column(turns: float) -> float:
        span = rope.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(rope.theta))

    low, high = column(rope.beta_fast), column(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    return 1 - ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
