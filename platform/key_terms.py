"""What a key may be like: its name, scopes, expiry and adapters, each checked in one place.

Knows words and moments; refuses to know secrets, tables and who asks.
"""

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Final, Literal, get_args

from loraplex.platform.db.models import MODEL_LENGTH, NAME_LENGTH
from loraplex.platform.errors import BadRequest

Scope = Literal["infer", "adapters:read", "adapters:write", "admin"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
BINDABLE: Final[frozenset[str]] = frozenset({"infer", "adapters:read", "adapters:write"})
MAX_ADAPTERS: Final = 100
MAX_OVERLAP: Final = timedelta(days=30)


def check_name(name: str) -> None:
    """Raise `BadRequest` for what is no key's name."""
    if not 1 <= len(name) <= NAME_LENGTH or not name.isprintable():
        raise BadRequest(f"A key's name has 1 to {NAME_LENGTH} printable characters.", param="name")


def check_expiry(moment: datetime | None, now: datetime) -> None:
    """Raise `BadRequest` for a moment that has no timezone or is past; None is never."""
    if moment is None:
        return
    if moment.tzinfo is None:
        raise BadRequest("A key's expiry needs a timezone, such as 'Z'.", param="expires_at")
    if moment <= now:
        raise BadRequest("A key's expiry must be in the future.", param="expires_at")


def check_overlap(overlap: timedelta) -> None:
    """Raise `BadRequest` for an overlap that is negative or longer than 30 days."""
    if not timedelta(0) <= overlap <= MAX_OVERLAP:
        raise BadRequest(
            f"The overlap is 0 to {int(MAX_OVERLAP.total_seconds())} seconds.", param="overlap_s"
        )


def check_scopes(tenant_id: str | None, scopes: Collection[str]) -> None:
    """Raise `BadRequest` for no scope, an unknown one, and an operator's that infers."""
    if not scopes or {*scopes} - {*SCOPES}:
        raise BadRequest(f"A key's scopes are one or more of {', '.join(SCOPES)}.", param="scopes")
    if tenant_id is None and "infer" in scopes:
        raise BadRequest(
            "An operator's key cannot infer, because no tenant would be charged; "
            "make a key for a tenant.",
            param="scopes",
        )


def check_adapters(
    names: Collection[str] | None, scopes: Collection[str], tenant_id: str | None
) -> None:
    """Raise `BadRequest` for names that are none, and for a key that nothing would hold to them.

    None is all adapters and the base. A name may be of an adapter that is not there yet.
    """
    if names is None:
        return
    if not 1 <= len(names) <= MAX_ADAPTERS or not all(map(_may_be_name, names)):
        raise BadRequest(
            f"adapters names 1 to {MAX_ADAPTERS} adapters without versions ('support', "
            "'owner/support', or the base's name); null is all.",
            param="adapters",
        )
    if tenant_id is None:
        raise BadRequest(
            "An operator's key is not bound to adapters; make a key for their tenant.",
            param="adapters",
        )
    if not {*scopes} <= BINDABLE:
        raise BadRequest(
            "A key that is bound to adapters has no other scopes than infer, adapters:read and "
            "adapters:write.",
            param="adapters",
        )


def _may_be_name(name: str) -> bool:
    plain = name.isprintable() and not {*name} & {" ", "@", ":"}
    return plain and 1 <= len(name) <= MODEL_LENGTH
