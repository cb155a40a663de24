"""What buckets of limits have used of their day and month: sums, from the rows of requests.

Pure; refuses to know where the rows come from, what the limits are, and who asks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from loraplex.platform.quotas import BucketKind

Owner = tuple[BucketKind, str]  # of a bucket: what it is, and its id


@dataclass(frozen=True)
class Spending:
    """Tokens, prompt and completion together, of a UTC day and of its month until then."""

    day: int = 0
    month: int = 0

    def __add__(self, other: "Spending") -> "Spending":
        return Spending(self.day + other.day, self.month + other.month)


NOTHING: Final = Spending()


def by_bucket(
    tenant_id: str, rows: Iterable[tuple[str, str | None, Spending]]
) -> dict[Owner, Spending]:
    """The sums of a tenant's buckets over rows of a key's id, an adapter's if it had one, and both.

    Each row counts for the tenant, its key and its adapter, as a request does.
    """
    sums: dict[Owner, Spending] = {}
    for key_id, adapter_id, spending in rows:
        owners: list[Owner] = [("tenant", tenant_id), ("key", key_id)]
        if adapter_id is not None:
            owners.append(("adapter", adapter_id))
        for owner in owners:
            sums[owner] = sums.get(owner, NOTHING) + spending
    return sums
