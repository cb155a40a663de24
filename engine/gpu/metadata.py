"""The step's metadata on the device: one buffer that stays, filled by one copy a step."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Metadata:
    """`size` ints on the device, and pinned memory to fill them from.

    There are two pinned buffers, so that a step's ints may be written while the copy of those of
    the step before is under way.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.ints = torch.zeros(size, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._host: list[Tensor] = [
            torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        ]

    def send(self, write: Callable[[NDArray[np.int32]], int]) -> None:
        """Have `write` fill a buffer, and copy as many ints of it as it returns."""
        self._host.reverse()
        host = self._host[0]
        used = write(host.numpy())
        self.ints[:used].copy_(host[:used], non_blocking=True)
