"""Keeps who holds a key for a moment, so that not every request reads the database.

A change of a key or its tenant is seen by every process once the moment is over, and at once by
the one that made it, which calls `clear`. What is not there is never kept: a key works as soon as
it is made. Knows digests and a clock; refuses to know what it keeps.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

Value = TypeVar("Value")
TTL_S: Final = 0.5
SIZE: Final = 4096


class Reading(NamedTuple):
    """When a value began to be read: the changes that were known then, and the clock."""

    era: int
    at: float


class KeyCache(Generic[Value]):
    """At most `size` values, the least recently used one leaving first, for `ttl_s` seconds each.

    `clock` gives seconds that never go back.
    """

    def __init__(
        self,
        ttl_s: float = TTL_S,
        size: int = SIZE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_s, self._size, self._clock = ttl_s, size, clock
        self._kept: OrderedDict[str, tuple[float, Value]] = OrderedDict()
        self._era = 0  # counts calls of `clear`

    def begin(self) -> Reading:
        """To be called before a value is read."""
        return Reading(self._era, self._clock())

    def get(self, digest: str) -> Value | None:
        """What was put under this digest, if it still holds."""
        until, value = self._kept.get(digest, (0.0, None))
        if value is None or self._clock() >= until:
            self._kept.pop(digest, None)
            return None
        self._kept.move_to_end(digest)
        return value

    def put(
        self, digest: str, value: Value, reading: Reading, at_most_s: float | None = None
    ) -> None:
        """Keep a value; one whose reading began before a change is dropped.

        It is kept for `at_most_s` seconds, if that is shorter than usual, from when its reading
        began: however long that took, it is never older than it may be.
        """
        if reading.era != self._era:
            return
        lasts_s = self._ttl_s if at_most_s is None else min(self._ttl_s, at_most_s)
        self._kept[digest] = (reading.at + lasts_s, value)
        self._kept.move_to_end(digest)
        if len(self._kept) > self._size:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        """Drop everything, and what is being read now."""
        self._era += 1
        self._kept.clear()
