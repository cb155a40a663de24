"""The grammar of a request's `model`: `[owner/]name[@version-or-alias][:dtype]`.

Knows characters; refuses to know which names are taken, and by whom.
"""

import re
from dataclasses import dataclass
from typing import Final

NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")  # of a tenant or an adapter
ALIAS: Final = re.compile(r"[a-z][a-z0-9._-]{0,62}")
NUMBER: Final = re.compile(r"[1-9][0-9]{0,8}")
DTYPE: Final = re.compile(r"[a-z][a-z0-9]{0,7}")
_MODEL: Final = re.compile(
    rf"(?:(?P<owner>{NAME.pattern})/)?(?P<name>{NAME.pattern})"
    rf"(?:@(?:(?P<number>{NUMBER.pattern})|(?P<alias>{ALIAS.pattern})))?"
    rf"(?::(?P<dtype>{DTYPE.pattern}))?"
)


@dataclass(frozen=True)
class ModelName:
    """A name taken apart; without a number and an alias it means the newest version.

    `owner` is the name of the tenant whose adapter it is, None for the caller's own.
    """

    name: str
    owner: str | None = None
    number: int | None = None
    alias: str | None = None
    dtype: str | None = None

    @property
    def adapter(self) -> str:
        """The adapter's name as this caller gives it: with its owner, where it has one."""
        return f"{self.owner}/{self.name}" if self.owner else self.name

    def exactly(self, number: int, dtype: str | None) -> str:
        """The immutable id of one version of it, and of one image where `dtype` says which."""
        return f"{self.adapter}@{number}{f':{dtype}' if dtype else ''}"


def parse(model: str) -> ModelName | None:
    """A name taken apart, None where it can be nobody's."""
    match = _MODEL.fullmatch(model)
    if match is None:
        return None
    number = match["number"]
    return ModelName(
        name=match["name"],
        owner=match["owner"],
        number=int(number) if number else None,
        alias=match["alias"],
        dtype=match["dtype"],
    )
