"""Which side of a canary split a conversation takes: a pure function, the same on every server.

A conversation keeps its side for as long as the split has its percentage, whoever serves it, and
when the percentage grows no conversation leaves the canary. Splitting by a hash of who asks is
usual for experiments (Tang et al., Overlapping Experiment Infrastructure, KDD 2010). Refuses to
know versions, requests and time.
"""

import hashlib
from dataclasses import dataclass
from typing import Final, Literal

from loraplex.platform.errors import BadRequest

Arm = Literal["stable", "canary"]
STEPS: Final = 10_000  # of 0.01% each


@dataclass(frozen=True)
class Canary:
    """The version that `percent` of the conversations try, in steps of 0.01.

    Raises `BadRequest` for a percentage that is all, nothing or finer.
    """

    number: int
    percent: float

    def __post_init__(self) -> None:
        if not 0 < self.percent < 100 or self.percent != round(self.percent, 2):
            raise BadRequest(
                "A canary's percent is more than 0, less than 100 and has at most two decimals.",
                param="canary.percent",
            )


def arm(alias_key: str, conversation: str, percent: float) -> Arm:
    """The side of the split of the alias `alias_key` that a conversation of this id takes."""
    hashed = hashlib.sha256(f"{alias_key}\0{conversation}".encode()).digest()
    place = int.from_bytes(hashed[:8]) * STEPS >> 64  # uniform over 0 … STEPS - 1
    return "canary" if place < round(percent * STEPS / 100) else "stable"
