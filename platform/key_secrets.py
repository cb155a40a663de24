"""What the secret of an API key looks like.

`lpx_`, 32 random base-62 characters (190 bits) and their CRC-32 in 6 more, so that a typing error
is told from a wrong key without a look at the database. Refuses to know whose it is.
"""

import re
import secrets
import string
import zlib
from typing import Final

BASE62: Final = string.digits + string.ascii_uppercase + string.ascii_lowercase
_RANDOM, _CHECK, _SHOWN = 32, 6, 8
_PATTERN: Final = re.compile(rf"lpx_([0-9A-Za-z]{{{_RANDOM}}})([0-9A-Za-z]{{{_CHECK}}})")


def new_secret() -> str:
    """A secret that nobody has."""
    body = "".join(secrets.choice(BASE62) for _ in range(_RANDOM))
    return f"lpx_{body}{_checksum(body)}"


def is_well_formed(secret: str) -> bool:
    """Whether it has the form of a secret, and no typing error."""
    match = _PATTERN.fullmatch(secret)
    return match is not None and _checksum(match[1]) == match[2]


def redacted(secret: str) -> str:
    """As much of a secret as may be shown again."""
    return f"{secret[:_SHOWN]}…"


def _checksum(body: str) -> str:
    number, digits = zlib.crc32(body.encode()), ""
    for _ in range(_CHECK):
        number, digit = divmod(number, len(BASE62))
        digits = BASE62[digit] + digits
    return digits
