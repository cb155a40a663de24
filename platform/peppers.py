"""Keyed hashes: a text is known by its HMAC-SHA256 (RFC 2104) under a secret, the pepper.

A stolen table of hashes is of no use without it. A new pepper makes new hashes while the old ones
still verify. Knows secrets; refuses to know what is hashed, and to show one.
"""

import hmac
from collections.abc import Sequence


class Peppers:
    """The newest pepper, and older ones, under which hashes may still be stored."""

    def __init__(self, newest: bytes, old: Sequence[bytes] = ()) -> None:
        self._keyed = [hmac.new(pepper, digestmod="sha256") for pepper in (newest, *old)]

    def digest(self, text: str) -> str:
        """The hash under the newest pepper, in 64 hexadecimal digits."""
        return _digest(self._keyed[0], text)

    def digests(self, text: str) -> list[str]:
        """The hashes under every pepper, the newest first."""
        return [_digest(keyed, text) for keyed in self._keyed]

    def verify(self, text: str, digest: str) -> bool:
        """Whether `digest` is the text's under any pepper, in a time that tells nothing of it."""
        matches = [hmac.compare_digest(each, digest) for each in self.digests(text)]
        return any(matches)


def _digest(keyed: hmac.HMAC, text: str) -> str:
    mac = keyed.copy()
    mac.update(text.encode())
    return mac.hexdigest()
