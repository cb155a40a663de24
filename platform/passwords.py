"""Passwords: hashed with Argon2id (RFC 9106), and checked in a time that tells nothing.

A hash takes tens of milliseconds on purpose, so it is made on a thread, never inside a
transaction. Knows texts; refuses to know whose they are, to keep one, or to show one.
"""

import unicodedata
from functools import cache
from typing import Final

from anyio import CapacityLimiter, to_thread
from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from loraplex.platform.errors import BadRequest

SHORTEST: Final = 15  # characters, where a password is all that is asked (NIST SP 800-63B-4, 3.1.1)
LONGEST: Final = 256
AT_ONCE: Final = 2  # hashes, each of which takes 64 MiB

_HASHER: Final = PasswordHasher()


async def hash_password(password: str) -> str:
    """What to store; raises `BadRequest` for a password that is too short or too long."""
    if not SHORTEST <= len(password) <= LONGEST:
        raise BadRequest(
            f"A password has {SHORTEST} to {LONGEST} characters; several words are a good one.",
            param="password",
        )
    return await to_thread.run_sync(_HASHER.hash, _normal(password), limiter=_limiter())


async def check_password(stored: str | None, password: str) -> bool:
    """Whether it is the password; without a stored one it takes as long, and is not."""
    told = password if len(password) <= LONGEST else ""
    return await to_thread.run_sync(_verify, stored, _normal(told), limiter=_limiter())


def is_outdated(stored: str) -> bool:
    """Whether it was made with other parameters than are used today."""
    return _HASHER.check_needs_rehash(stored)


def _verify(stored: str | None, password: str) -> bool:
    try:
        return _HASHER.verify(stored or _nobodys(), password) and stored is not None
    except (VerificationError, InvalidHashError):
        return False


def _normal(password: str) -> str:
    """The same characters however a keyboard composed them (NIST SP 800-63B-4, 3.1.1.2)."""
    return unicodedata.normalize("NFC", password)


@cache
def _nobodys() -> str:
    return _HASHER.hash("no password is this")


@cache
def _limiter() -> CapacityLimiter:
    return CapacityLimiter(AT_ONCE)
