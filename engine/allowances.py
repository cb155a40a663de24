"""How many bytes of images each tenant has in the engine, and whether it may have one more.

An image counts for every tenant whose requests hold it, and an idle one for whoever used it last.
A tenant with a limit brings in no image that would pass it, unless it has none: what is idle gives
way, what is held does not. An image that is there already, for another tenant, is never waited for;
it counts, and the tenant's idle ones make good for it.

This file knows tenants and bytes. It refuses to know digests, where images are and which one goes.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum


class Claim(Enum):
    """What an image is to a tenant that it counts for."""

    WAITING = "waiting"  # not found yet, or not to be had
    BARRED = "barred"  # found, and not let in
    COMING = "coming"  # let in, and not verified yet
    READY = "ready"  # verified, in host memory
    USED = "used"  # on the device
    IDLE = "idle"  # there too, and it may go


HELD = (Claim.COMING, Claim.READY, Claim.USED)
STAYING = (Claim.READY, Claim.USED, Claim.IDLE)


@dataclass(slots=True)
class _Account:
    limit: int | None = None
    sizes: Counter[Claim] = field(default_factory=Counter)
    images: Counter[Claim] = field(default_factory=Counter)

    def size(self, claims: Iterable[Claim]) -> int:
        return sum(self.sizes[claim] for claim in claims)

    def count(self, claims: Iterable[Claim]) -> int:
        return sum(self.images[claim] for claim in claims)


class Allowances:
    """The tenants' accounts. One without images is forgotten, with its limit, by `tidy`."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._emptied: set[str] = set()
        self.over: set[str] = set()  # those with idle images that have to go

    def set_limit(self, tenant: str, limit: int | None) -> None:
        """Put a limit in bytes, or none, in place of the tenant's last."""
        self._account(tenant).limit = limit
        self._emptied.add(tenant)
        self._judge(tenant)

    def add(self, tenant: str, claim: Claim, size: int) -> None:
        """Count an image for a tenant."""
        self._change(tenant, claim, size, 1)

    def remove(self, tenant: str, claim: Claim, size: int) -> None:
        """Count it no longer."""
        self._change(tenant, claim, -size, -1)

    def may_have(self, tenant: str, size: int) -> bool:
        """Whether an image of `size` bytes that waits may come, once idle ones are gone."""
        account = self._known(tenant)
        held = account.size(HELD)
        return account.limit is None or not account.count(HELD) or held + size <= account.limit

    def may_keep(self, tenant: str) -> bool:
        """Whether an image that counts as held may still become resident."""
        account = self._known(tenant)
        return (
            account.limit is None or account.count(HELD) <= 1 or account.size(HELD) <= account.limit
        )

    def resident(self, tenant: str) -> int:
        """Bytes on the device that count for a tenant."""
        return self._known(tenant).size((Claim.USED, Claim.IDLE))

    def is_barred(self, tenant: str) -> bool:
        """Whether the tenant waits for an image that is not let in."""
        return self._known(tenant).images[Claim.BARRED] > 0

    def tidy(self) -> None:
        """Forget the tenants that have no image left."""
        for tenant in self._emptied:
            if not any(self._accounts[tenant].images.values()):
                del self._accounts[tenant]
        self._emptied.clear()

    def totals(self) -> dict[str, dict[Claim, tuple[int, int]]]:
        """Bytes and images of each tenant's claims, those without any left out."""
        found = {
            tenant: {c: (account.sizes[c], n) for c, n in account.images.items() if n}
            for tenant, account in self._accounts.items()
        }
        return {tenant: claims for tenant, claims in found.items() if claims}

    def _account(self, tenant: str) -> _Account:
        return self._accounts.setdefault(tenant, _Account())

    def _known(self, tenant: str) -> _Account:
        return self._accounts.get(tenant) or _Account()

    def _change(self, tenant: str, claim: Claim, size: int, count: int) -> None:
        account = self._account(tenant)
        account.sizes[claim] += size
        account.images[claim] += count
        if count < 0:
            self._emptied.add(tenant)
        self._judge(tenant)

    def _judge(self, tenant: str) -> None:
        """A single image stays, whatever its size."""
        account = self._accounts[tenant]
        is_over = (
            account.limit is not None
            and account.size(STAYING) > account.limit
            and account.images[Claim.IDLE] > 0
            and account.count(STAYING) > 1
        )
        (self.over.add if is_over else self.over.discard)(tenant)
