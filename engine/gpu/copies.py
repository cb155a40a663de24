"""Copies from the host to the device beside the steps, on a stream of their own.

A copy begins once the steps given to the device so far have ended, as these may still read what it
overwrites. A step that needs what was copied is made to wait for it; no other step waits, nor does
the host. This file knows tensors; it refuses to know what is in them.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class Copies:
    """Copies under way, by name. On a CPU each is made at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._under_way: dict[str, torch.cuda.Event] = {}

    def start(self, name: str, target: Tensor, source: Tensor) -> None:
        """Begin to fill TARGET, uint8 `[n]`, from SOURCE, in pinned memory."""
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._under_way[name] = self._stream.record_event()

    def wait_for(self, names: Iterable[str]) -> None:
        """Let what the device is given from now on begin after these copies."""
        for name in self._under_way.keys() & set(names):
            torch.cuda.current_stream().wait_event(self._under_way.pop(name))

    def wait_for_all(self) -> None:
        """The same for all copies."""
        self.wait_for(list(self._under_way))
