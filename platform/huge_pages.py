"""Moves what a process has in memory into huge pages, where the kernel can.

A request's way through the interpreter touches objects all over the heap, each time with cold
caches; in pages of 2 MiB finding them takes a ninth less CPU (benchmarks/LOG.md). Best effort:
elsewhere than on Linux 6.1 or newer nothing happens. Knows addresses; refuses to know what is at
them.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PAGE: Final = 2 << 20
MADV_HUGEPAGE: Final = 14  # what is touched from now on
MADV_COLLAPSE: Final = 25  # what is there: madvise(2)
MAPS: Final = Path("/proc/self/maps")


def use_huge_pages() -> None:
    """Collapse the private, anonymous memory of this process; takes some tenths of a second."""
    with contextlib.suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        for start, size in heaps(MAPS.read_text()):
            for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)


def heaps(maps: str) -> Iterator[tuple[int, int]]:
    """Whole huge pages of each such region in /proc/PID/maps (proc(5)), as start and size."""
    for line in maps.splitlines():
        span, access, _, _, inode, *name = line.split()
        if access != "rw-p" or inode != "0" or name not in ([], ["[heap]"]):
            continue
        low, high = (int(bound, 16) for bound in span.split("-"))
        start, end = -(-low // PAGE) * PAGE, high // PAGE * PAGE
        if start < end:
            yield start, end - start
