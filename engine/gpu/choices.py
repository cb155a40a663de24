"""Tokens chosen on the device: read by the host later, and by the next step at once.

This file knows draws and rows of logits; it refuses to know whose they are.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.engine.draw import HOTTEST, Draw
from loraplex.engine.gpu.health import watched
from loraplex.engine.gpu.metadata import Metadata
from loraplex.engine.outcome import Outcome
from loraplex.kernels.triton.draw import FIELDS, draw_rows, feed


class Chosen:
    """`Pending`: tokens on their way to pinned memory, int32 `[W]`, there once `event` has been."""

    def __init__(self, tokens: Tensor, event: torch.cuda.Event | None) -> None:
        self._tokens, self._event = tokens, event

    def result(self) -> list[int | None]:
        """See `Pending`; raises `DeviceLostError` when the device can do nothing any more."""
        if self._event is not None:
            with watched():
                self._event.synchronize()
        return [None if token < 0 else token for token in self._tokens.tolist()]


class Choices:
    """Chooses the tokens of steps of up to `rows` wanted rows. The newest two can be read."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._parameters = Metadata(FIELDS * rows, device)
        self._chosen = torch.zeros(rows, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._host = [torch.zeros(rows, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]

    def choose(self, outcome: Outcome, draws: Sequence[Draw | None]) -> Chosen:
        """Begin to choose a token for each row, by its draw or (None) the likeliest."""
        count = len(draws)
        self._parameters.send(lambda ints: _write(ints.view(np.float32), draws))
        parameters = self._parameters.ints[: FIELDS * count].view(torch.float32)
        chosen = self._chosen[:count]
        draw_rows(outcome.logits, outcome.likeliest, outcome.peak, parameters, chosen)
        self._host.reverse()
        host = self._host[0][:count]
        host.copy_(chosen, non_blocking=True)
        event = torch.cuda.current_stream().record_event() if chosen.is_cuda else None
        return Chosen(host, event)

    def feed(self, ids: Tensor) -> None:
        """Put what was chosen last where `ids`, int32 `[n]`, stand for it (see `Batch`)."""
        feed(ids, self._chosen)


def _write(parameters: NDArray[np.float32], draws: Sequence[Draw | None]) -> int:
    """Write a line for each draw, as `draw_rows` wants it; returns how many numbers they are."""
    used = FIELDS * len(draws)
    lines = parameters[:used].reshape(-1, FIELDS)
    lines[:] = 0
    for line, draw in zip(lines, draws, strict=True):
        if draw is not None:
            s = draw.sampling
            line[:] = 1 / min(s.temperature, HOTTEST), s.top_k, s.top_p, s.min_p, draw.share
    return used
