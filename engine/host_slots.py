"""The host's slots for blocks that are swapped out, each of one block: which are free.

It refuses to know what a slot holds and for whom.
"""

from collections.abc import Iterable, Sequence

from loraplex.engine.block_pool import BrokenPool


class HostSlots:
    """`count` slots; each has one holder or none."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def free_count(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Slots that somebody holds."""
        return len(self._taken)

    def take(self, count: int) -> list[int] | None:
        """Take `count` slots, or none at all where there are fewer."""
        if count > len(self._free):
            return None
        slots = [self._free.pop() for _ in range(count)]
        self._taken.update(slots)
        return slots

    def give(self, slots: Iterable[int]) -> None:
        """Give slots back; raises `BrokenPool` for one that nobody holds."""
        for slot in slots:
            if slot not in self._taken:
                raise BrokenPool(f"host slot {slot} is given back while it is free")
            self._taken.remove(slot)
            self._free.append(slot)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `BrokenPool` unless the slots taken are exactly those of `tables`, each once."""
        held = [slot for table in tables for slot in table]
        if sorted(held) != sorted(self._taken):
            raise BrokenPool(f"host slots {sorted(self._taken)} are taken, {sorted(held)} are held")
        if sorted([*held, *self._free]) != list(range(self._count)):
            raise BrokenPool("a host slot is neither held nor free, or both")
