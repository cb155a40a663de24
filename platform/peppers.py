"""Keyed hashes: a text is known by its HMAC-SHA256 (RFC 2104) under a secret, the pepper.

A stolen table of hashes is of no use without it. A new pepper makes new hashes while the old ones
still verify. Knows secrets; refuses to know what is hashed, and to show one.
"""

import hmac
from collections.abc import Sequence


class Peppers:
    """The newest pepper, and older ones, under which hashes may still be stored."""

    def __init__(self, newest: bytes, old: Sequence[bytes] = ()) -> None:
        self._newest, self._old = newest, tuple(old)

    def digest(self, text: str) -> str:
        """The hash under the newest pepper, in 64 hexadecimal digits."""
        return _digest(self._newest, text)

    def digests(self, text: str) -> list[str]:
        """The hashes under every pepper, the newest first."""
        return [_digest(pepper, text) for pepper in (self._newest, *self._old)]

    def verify(self, text: str, digest: str) -> bool:
        """Whether `digest` is the text's under any pepper, in a time that tells nothing of it."""
        matches = [hmac.compare_digest(each, digest) for each in self.digests(text)]
        return any(matches)


def _digest(pepper: bytes, text: str) -> str:
    return hmac.digest(pepper, text.encode(), "sha256").hex()
