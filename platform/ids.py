"""Identifiers that sort by the order they were made in: a prefix and a ULID in lower case.

Knows the clock and randomness; refuses to know what the identifiers name.
"""

import secrets
import threading
import time
from typing import Final

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32, in ASCII order
_RANDOM_BITS = 80
_STEP_BITS = 64
LENGTH = 26


class Ulids:
    """Numbers of 128 bits, each above all before it: 48 bits of milliseconds, then 80 random ones.

    A second one of the same millisecond (or of an earlier one: clocks are set back) lies a random
    step above the first, so that it follows and is still not to be guessed. The ULID specification
    steps by one. Any thread may ask; other processes are ordered by their clocks alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def __next__(self) -> int:
        now = time.time_ns() // 1_000_000 << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
        with self._lock:
            if now <= self._last:
                now = self._last + 1 + secrets.randbits(_STEP_BITS)
            self._last = now
            return now


_ulids: Final = Ulids()


def new_id(prefix: str) -> str:
    """`prefix`, "_" and 26 characters, which sort after those of every id made here before."""
    number = next(_ulids)
    digits = (_ALPHABET[number >> shift & 31] for shift in range(5 * (LENGTH - 1), -1, -5))
    return f"{prefix}_{''.join(digits)}"
