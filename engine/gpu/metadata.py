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
        self._host: list[tuple[Tensor, torch.cuda.Event | None]] = [
            (torch.zeros(size, dtype=torch.int32, pin_memory=pinned), None) for _ in range(2)
        ]

    def send(self, write: Callable[[NDArray[np.int32]], int]) -> None:
        """Have `write` fill a buffer, and copy as many ints of it as it returns.

        Waits where the copy that was made from that buffer has not ended.
        """
        host, copied = self._host.pop(0)
        if copied is not None:
            copied.synchronize()
        used = write(host.numpy())
        self.ints[:used].copy_(host[:used], non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if self.ints.is_cuda else None
        self._host.append((host, copied))
