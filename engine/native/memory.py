"""Memory that the native step reads: zeroed, on huge pages, outside of Python's heap.

Pages are taken when they are first written, so that a large stretch costs what is in it. This file
knows bytes and addresses; it refuses to know what they hold.
"""

import contextlib
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.kernels.cpu.library import ALIGNMENT

Bytes = NDArray[np.uint8]


def aligned(nbytes: int) -> int:
    """Bytes that something of `nbytes` takes of a stretch of memory."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Memory:
    """`nbytes` bytes of anonymous memory, handed out from the front, freed with the object."""

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=flags)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: Bytes = np.frombuffer(memory, np.uint8)
        self.address = self.bytes.ctypes.data
        self.used = 0

    def touch(self, nbytes: int, threads: int) -> None:
        """Take the pages of the first `nbytes`, which must be unwritten, now instead of later."""
        share = -(-min(nbytes, len(self.bytes)) // threads)

        def write(thread: int) -> None:
            self.bytes[thread * share : (thread + 1) * share : mmap.PAGESIZE] = 0

        with ThreadPoolExecutor(threads, thread_name_prefix="touch") as pool:
            list(pool.map(write, range(threads)))

    def take(self, nbytes: int) -> int:
        """The address of `nbytes` unused bytes, aligned; raises `MemoryError` if none are left."""
        start = self.used
        self.used += aligned(nbytes)
        if self.used > len(self.bytes):
            raise MemoryError(f"{len(self.bytes)} bytes of memory cannot hold {self.used}")
        return self.address + start

    def put(self, array: NDArray[Any]) -> int:
        """The address of a copy of `array`."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = self.take(flat.nbytes)
        start = address - self.address
        self.bytes[start : start + flat.nbytes] = flat
        return address
