"""Which blocks each tenant has in one engine's prefix cache, and what was not passed on of it yet.

The state is kept whole, so whoever passes it on may fail, be slow or lose it at the other end:
changes join until they are taken, and everything can be told again. Its size is that of the
engine's cache. Knows cache events; refuses to know Redis and any clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from loraplex.engine.protocol import CacheEvent

MAX_CHANGES: Final = 4000  # blocks in one telling
MAX_BLOCKS: Final = 1 << 20  # more than that is taken for a sign of lost evictions


@dataclass(frozen=True)
class Telling:
    """News of one tenant's blocks, which follow on the telling numbered `previous`.

    When `whole`, all that was told before is void. Numbers grow and are never used again.
    """

    number: int
    previous: int
    whole: bool
    added: tuple[str, ...]
    removed: tuple[str, ...]


@dataclass
class _Share:
    """A tenant's blocks. `changes` says of those that changed whether they are there now."""

    blocks: set[str] = field(default_factory=set)
    changes: dict[str, bool] = field(default_factory=dict)
    whole: bool = True  # the next telling must be
    number: int = 0  # of the last telling
    told_at: float = 0.0


class Mirror:
    """What the events of one engine life add up to.

    `life` changes when all that was told becomes void at once. `complete` is False once blocks may
    be missing because events were lost; blocks that are here are in the cache all the same.
    """

    def __init__(self) -> None:
        self.life, self.complete = 0, True
        self._shares: dict[str, _Share] = {}
        self._size = self._number = 0

    def restart(self, *, complete: bool) -> None:
        """Begin a new life with no blocks."""
        self.life, self.complete = self.life + 1, complete
        self._shares.clear()
        self._size = 0

    def hear(self, event: CacheEvent) -> None:
        """Take note of an event; those of a tenant must come in order."""
        if event.kind == "hit":
            return
        for block in event.blocks:
            self._note(event.tenant, block, event.kind == "stored")

    def due(self, told_before: float) -> list[str]:
        """Tenants of whom there is news, or whose last telling is older than `told_before`."""
        return [tenant for tenant in self._shares if self.is_due(tenant, told_before)]

    def is_due(self, tenant: str, told_before: float) -> bool:
        """Whether `due` has the tenant."""
        share = self._shares.get(tenant)
        if share is None:
            return False
        return share.whole or bool(share.changes) or share.told_at < told_before

    def tell(self, tenant: str, now: float) -> Telling:
        """The next telling of a tenant who is due; there may be more news than it holds."""
        share = self._shares[tenant]
        whole, share.whole = share.whole, False
        if whole:
            share.changes = dict.fromkeys(share.blocks, True)
        news = dict(islice(share.changes.items(), MAX_CHANGES))
        for block in news:
            del share.changes[block]
        self._number += 1
        previous, share.number, share.told_at = share.number, self._number, now
        added = tuple(block for block, there in news.items() if there)
        removed = tuple(block for block, there in news.items() if not there)
        return Telling(self._number, previous, whole, added, removed)

    def confirm(self, tenant: str) -> None:
        """The last telling arrived: nothing need be kept of a tenant without blocks."""
        share = self._shares.get(tenant)
        if share and not (share.blocks or share.changes or share.whole):
            del self._shares[tenant]

    def retell(self, tenants: Iterable[str] | None = None) -> None:
        """Tell everything again of these tenants, or of all."""
        for tenant in tuple(self._shares) if tenants is None else tenants:
            if share := self._shares.get(tenant):
                share.whole = True
                share.changes.clear()

    def check_integrity(self) -> None:
        """Raise `ValueError` unless the blocks are counted right and the changes are news."""
        if sum(len(share.blocks) for share in self._shares.values()) != self._size:
            raise ValueError("blocks are miscounted")
        for share in self._shares.values():
            if any(there != (block in share.blocks) for block, there in share.changes.items()):
                raise ValueError("a change is not how things are")

    def _note(self, tenant: str, block: str, there: bool) -> None:
        share = self._shares.setdefault(tenant, _Share())
        if there and (block in share.blocks or self._size >= MAX_BLOCKS):
            self.restart(complete=False)  # evictions were lost, and nobody knows which
            share = self._shares.setdefault(tenant, _Share())
        elif not there and block not in share.blocks:
            self.complete = False  # its storing was lost
            return
        (share.blocks.add if there else share.blocks.remove)(block)
        self._size += 1 if there else -1
        if not share.whole:
            share.changes[block] = there
