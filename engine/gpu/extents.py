"""Extents of one stretch of memory: which bytes are taken, where the next ones go.

An image goes into the smallest gap that holds it. Where the free bytes suffice but no gap does,
`compact` says what to move. This file knows numbers; it refuses to know what lies there.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Move:
    """Bytes `[source, source + length)` go to `target`, which is lower; they may overlap."""

    source: int
    target: int
    length: int


class Extents:
    """Extents within `[0, size)`, by where they begin; each at least one byte long."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: dict[int, int] = {}  # begin: length

    @property
    def free_bytes(self) -> int:
        """Bytes of all gaps together."""
        return self.size - sum(self._taken.values())

    def take(self, length: int) -> int | None:
        """Where `length` bytes were taken, or None when no gap holds them."""
        gaps = [(size, begin) for begin, size in self._gaps() if size >= length]
        if not gaps:
            return None
        begin = min(gaps)[1]
        self._taken[begin] = length
        return begin

    def give(self, begin: int) -> None:
        """Give back the extent that begins there; raises `KeyError` when there is none."""
        del self._taken[begin]

    def compact(self) -> list[Move]:
        """Move all extents down until the free bytes are one gap; moves are to be made in order."""
        moves, packed = [], {}
        end = 0
        for begin, length in sorted(self._taken.items()):
            if begin != end:
                moves.append(Move(begin, end, length))
            packed[end] = length
            end += length
        self._taken = packed
        return moves

    def check_integrity(self) -> None:
        """Raise unless extents are disjoint and inside."""
        end = 0
        for begin, length in sorted(self._taken.items()):
            if begin < end or length < 1:
                raise RuntimeError(f"the extent at {begin} overlaps the one before it")
            end = begin + length
        if end > self.size:
            raise RuntimeError(f"an extent ends at {end}, beyond {self.size}")

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """Begin and length of each gap."""
        end = 0
        for begin, length in sorted(self._taken.items()):
            if begin > end:
                yield end, begin - end
            end = begin + length
        if self.size > end:
            yield end, self.size - end
