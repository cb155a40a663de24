"""Which bytes of one region images take, where the next ones go, and what to move to make room.

KV blocks grow from the bottom of the region up to the floor; images lie above it, from the top
down. An image goes into the smallest gap that holds it. Where the free bytes suffice but no gap
does, images move up. This file knows numbers; it refuses to know what lies there.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from loraplex.engine.images import ALIGNMENT


@dataclass(frozen=True)
class Move:
    """Bytes `[source, source + length)` go to `target`, which is higher; they may overlap."""

    source: int
    target: int
    length: int


class Arena:
    """Extents within `[floor, size)`, by where they begin; all are multiples of `ALIGNMENT`.

    Moves are to be made in order, before anything is written to what was taken.
    """

    def __init__(self, size: int, floor: int = 0) -> None:
        self.size, self.floor = size // ALIGNMENT * ALIGNMENT, _aligned(floor)
        if self.floor > self.size:
            raise ValueError(f"a floor of {floor} bytes is above a region of {size}")
        self._begins: list[int] = []  # ascending
        self._lengths: dict[int, int] = {}
        self._taken = 0

    @property
    def free_bytes(self) -> int:
        """Bytes of all gaps together."""
        return self.size - self.floor - self._taken

    def take(self, length: int) -> tuple[int, list[Move]]:
        """Where `length` bytes, rounded up, were taken, and the moves that make room for them.

        Raises `MemoryError`, and takes nothing, when fewer are free.
        """
        length = max(_aligned(length), ALIGNMENT)
        if length > self.free_bytes:
            raise MemoryError(f"{length} bytes are asked for, and {self.free_bytes} are free")
        moves: list[Move] = []
        end = self._smallest_gap(length)
        if end is None:
            moves, end = self._compact(length)
        self._insert(end - length, length)
        return end - length, moves

    def give(self, begin: int) -> None:
        """Give back the extent that begins there; raises `KeyError` when there is none."""
        self._taken -= self._lengths.pop(begin)
        del self._begins[bisect_left(self._begins, begin)]

    def set_floor(self, floor: int) -> list[Move]:
        """Let extents begin from `floor`, rounded up, and return the moves that this takes.

        Extents below go to gaps above where such hold them, so that the others stay. Raises
        `MemoryError`, and changes nothing, when they do not fit above it.
        """
        floor = _aligned(floor)
        if floor + self._taken > self.size:
            raise MemoryError(f"{self._taken} bytes do not fit between {floor} and {self.size}")
        self.floor = floor
        moves: list[Move] = []
        for begin in reversed(self._begins[: bisect_left(self._begins, floor)]):
            moves += self._lift(begin)
        if self._begins and self._begins[0] < floor:
            moves += self._compact(self.size)[0]
        return moves

    def check_integrity(self) -> None:
        """Raise unless extents are aligned, disjoint and inside."""
        end = self.floor
        for begin in self._begins:
            length = self._lengths[begin]
            if begin < end or length < 1 or begin % ALIGNMENT or length % ALIGNMENT:
                raise RuntimeError(f"the extent at {begin} is odd or overlaps the one before it")
            end = begin + length
        if end > self.size:
            raise RuntimeError(f"an extent ends at {end}, beyond {self.size}")
        if sorted(self._lengths) != self._begins or sum(self._lengths.values()) != self._taken:
            raise RuntimeError("the extents are not those that are counted")

    def _smallest_gap(self, length: int) -> int | None:
        """The end of the smallest gap that holds `length` bytes; of equals, of the highest."""
        fitting = [(end - begin, -end) for begin, end in self._gaps() if end - begin >= length]
        return -min(fitting)[1] if fitting else None

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """Begin and end of each gap."""
        end = self.floor
        for begin in self._begins:
            if begin > end:
                yield end, begin
            end = max(end, begin + self._lengths[begin])
        if self.size > end:
            yield end, self.size

    def _lift(self, begin: int) -> list[Move]:
        """Move an extent to the smallest gap that holds it, if there is one."""
        length = self._lengths[begin]
        self.give(begin)
        end = self._smallest_gap(length)
        target = begin if end is None else end - length
        self._insert(target, length)
        return [] if target == begin else [Move(begin, target, length)]

    def _compact(self, length: int) -> tuple[list[Move], int]:
        """Move extents up, the highest first, until `length` bytes are free below the last moved.

        Returns the moves, and where that gap ends.
        """
        moves, end = [], self.size
        for begin in reversed(self._begins):
            size = self._lengths[begin]
            if end - (begin + size) >= length:
                break
            end -= size
            if begin != end:
                moves.append(Move(begin, end, size))
        for move in moves:
            self._lengths[move.target] = self._lengths.pop(move.source)
        self._begins = sorted(self._lengths)
        return moves, end

    def _insert(self, begin: int, length: int) -> None:
        insort(self._begins, begin)
        self._lengths[begin] = length
        self._taken += length


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT
