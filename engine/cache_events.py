"""What happened to cached KV since it was last asked: a bounded log, told as few events.

It knows hashes and opaque tenants; it refuses to know blocks and who listens.
"""

from collections import deque
from collections.abc import Iterable
from typing import Literal

from loraplex.engine.protocol import CacheEvent

Kind = Literal["stored", "hit", "evicted"]

MAX_NOTES = 1 << 16  # blocks; of more than that the oldest are forgotten


class EventLog:
    """Notes of blocks stored, hit and evicted; a block has `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._notes: deque[tuple[Kind, str, bytes]] = deque(maxlen=MAX_NOTES)

    def note(self, kind: Kind, tenant: str, hashes: Iterable[bytes]) -> None:
        """Remember what happened to the blocks of these hashes, in order."""
        self._notes.extend((kind, tenant, block_hash) for block_hash in hashes)

    def take(self) -> list[CacheEvent]:
        """What was noted since the last call, in order for each tenant.

        Notes of the same kind join in one event until the tenant has one of another kind.
        """
        groups: list[tuple[Kind, str, list[str]]] = []
        latest: dict[str, tuple[Kind, str, list[str]]] = {}
        for kind, tenant, block_hash in self._notes:
            if tenant not in latest or latest[tenant][0] != kind:
                latest[tenant] = (kind, tenant, [])
                groups.append(latest[tenant])
            latest[tenant][2].append(block_hash[:8].hex())
        self._notes.clear()
        return [
            CacheEvent(kind, tenant, tuple(blocks), len(blocks) * self._block_size)
            for kind, tenant, blocks in groups
        ]
