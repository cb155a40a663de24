"""What a step computes: the logits of its wanted rows, and the likeliest token of each.

A greedy row without penalties needs no more than its likeliest token, so an executor that finds it
while it writes the logits spares a pass over them. This file knows logits; it refuses to know
requests and how a token is chosen.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.engine.draw import Draw

# Of an outcome's rows the tokens, by draws or (None) the likeliest; None where NaN is the peak.
DrawRows = Callable[["Outcome", Sequence[Draw | None]], list[int | None]]


@dataclass(frozen=True)
class Outcome:
    """Of `W` wanted rows, in their order; all on the executor's device."""

    logits: Tensor  # fp32 [W, vocabulary]
    likeliest: Tensor  # int64 [W], the first token with the highest logit
    peak: Tensor  # fp32 [W], that logit; NaN where a logit of the row is not finite
    draw: DrawRows | None = None  # for rows of this device; without one the host draws

    def tokens(self) -> list[int | None]:
        """Each row's likeliest token, None where a logit is not finite."""
        found = zip(self.likeliest.tolist(), self.peak.tolist(), strict=True)
        return [token if math.isfinite(peak) else None for token, peak in found]

    def to(self, device: torch.device) -> "Outcome":
        """The same rows on another device, which `draw` is for."""
        logits, likeliest, peak = self.logits, self.likeliest, self.peak
        return Outcome(logits.to(device), likeliest.to(device), peak.to(device), self.draw)


def outcome_of(logits: Tensor) -> Outcome:
    """The outcome whose logits are `logits`, fp32 `[W, vocabulary]`."""
    peak, likeliest = logits.max(dim=-1)
    finite = torch.isfinite(peak) & torch.isfinite(logits.amin(dim=-1))
    return Outcome(logits, likeliest, peak.where(finite, torch.nan))
