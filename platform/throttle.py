"""Slows down whoever guesses passwords: by name, and by the address that they come from.

After `FREE` failures each further one doubles the wait, up to five minutes; a success, or a quarter
of an hour without one, forgives. Knows names and times that it is told; refuses to know passwords.
"""

from collections import OrderedDict
from typing import Final

FREE: Final = 5
LONGEST_S: Final = 300.0
FORGIVEN_S: Final = 900.0
REMEMBERED: Final = 10_000


class Throttle:
    """Failures by whom; the oldest are forgotten when there are too many."""

    def __init__(self, free: int = FREE) -> None:
        self._free = free
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def wait_s(self, who: str, now: float) -> float:
        """Seconds until `who` may try again; 0: now. `now` is any clock that does not go back."""
        count, last = self._failures.get(who, (0, now))
        if count < self._free or now - last >= FORGIVEN_S:
            return 0.0
        wait = min(LONGEST_S, 2.0 ** min(count - self._free, 16))
        return max(0.0, last + wait - now)

    def failed(self, who: str, now: float) -> None:
        """`who` was wrong."""
        count, last = self._failures.pop(who, (0, now))
        self._failures[who] = (1 if now - last >= FORGIVEN_S else count + 1, now)
        if len(self._failures) > REMEMBERED:
            self._failures.popitem(last=False)

    def succeeded(self, who: str) -> None:
        """`who` was right: nothing is held against them."""
        self._failures.pop(who, None)
