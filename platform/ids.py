"""Identifiers that sort by the time they were made: a prefix and a ULID in lower case.

Knows the clock and randomness; refuses to know what the identifiers name.
"""

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32, in ASCII order
_RANDOM_BITS = 80
LENGTH = 26


def new_id(prefix: str) -> str:
    """`prefix`, "_" and 26 characters: 48 bits of milliseconds, then 80 random bits."""
    milliseconds = time.time_ns() // 1_000_000
    number = milliseconds << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    digits = (_ALPHABET[number >> shift & 31] for shift in range(5 * (LENGTH - 1), -1, -5))
    return f"{prefix}_{''.join(digits)}"
