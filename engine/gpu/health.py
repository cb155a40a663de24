"""Tells a step that failed from a device that is lost.

After some errors (an address that is not there, memory that lost its contents, a reset) whatever a
process asks of its device fails, until the process ends. Then it has to: another one starts in its
place, while this one would fail all requests for ever. This file knows errors; it refuses to know
what was computed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DeviceLostError(SystemExit):
    """The device fails whatever it is told to do; ends the process with code 1."""


@contextmanager
def watched() -> Iterator[None]:
    """Let errors of what is inside pass; raises `DeviceLostError` where the device is lost."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _check_device(error)
        raise


def _check_device(cause: RuntimeError) -> None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        message = f"the GPU fails whatever it is told to do; the engine ends: {cause}"
        raise DeviceLostError(message) from cause
