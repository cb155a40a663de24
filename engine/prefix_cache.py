"""Which blocks hold KV that a later prompt can use, and which of them goes first.

A full block is named by a hash chain: SHA-256 over a namespace, the name of the block before it and
its own tokens, so equal names mean equal KV. The namespace is made of digests and a secret, never
of names that people choose. This file knows hashes, block numbers and opaque tenants; it refuses to
know who holds a block, how many blocks there are and what the tokens mean.
"""

import hashlib
import heapq
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_START = bytes(32)  # stands before the first block of a chain
_SPARE_RANKS = 64


class BrokenCache(Exception):
    """The cache's books do not agree with each other or with the pool's."""


def namespace(base: str, image: str | None, scope: str) -> bytes:
    """What KV depends on besides tokens, as 32 bytes.

    `base` is the base's fingerprint, `image` the adapter image's digest (None: the bare base) and
    `scope` the secret of those who may share. Each part is preceded by its length, and no image
    differs from an empty one, so no two triples encode alike.
    """
    digest = hashlib.sha256(b"kv namespace")
    for part in (base, image, scope):
        encoded = b"" if part is None else part.encode()
        digest.update(struct.pack("<?Q", part is not None, len(encoded)) + encoded)
    return digest.digest()


@dataclass(frozen=True)
class Chain:
    """The namespaces of one sequence: tokens before `adapter_start` run on the bare base.

    `base` is `namespace(base, None, scope)` and `image` is `namespace(base, image, scope)`. A
    sequence that is all base or all adapter starts at 0.
    """

    base: bytes
    image: bytes
    adapter_start: int = 0


def extend_hashes(
    hashes: list[bytes], token_ids: Sequence[int], chain: Chain, block_size: int
) -> None:
    """Append to `hashes` the hash of each further full block of `token_ids`.

    A block that lies wholly before the adapter's start hashes as the bare base's would, so an
    activated LoRA (Greenewald et al., 2025) finds what the base has cached and leaves it the same.
    """
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        space, offset = chain.image, max(0, chain.adapter_start - start)
        if offset >= block_size:
            space, offset = chain.base, 0
        previous = hashes[-1] if hashes else _START
        tokens = token_ids[start : start + block_size]
        packed = struct.pack(f"<{1 + block_size}i", offset, *tokens)
        hashes.append(hashlib.sha256(space + previous + packed).digest())


class Cached(NamedTuple):
    """A cached block's name, and the tenant that it is charged to: the one that stored it."""

    hash: bytes
    tenant: str


class PrefixCache:
    """Blocks by hash; those that nobody uses are idle and can be evicted.

    The victim is the least recently used block of the tenant that has most idle blocks for its
    weight; between equals, the one whose block has been idle the longest. Each operation takes
    O(log tenants) a block.
    """

    def __init__(self) -> None:
        self.idle_count = 0
        self._blocks: dict[bytes, int] = {}
        self._cached: dict[int, Cached] = {}
        self._idle: dict[str, OrderedDict[bytes, int]] = {}  # by tenant: hash -> when it went idle
        self._weights: dict[str, float] = {}
        # A tenant's rank is pushed whenever it changes; those that are no longer true are skipped.
        self._ranks: list[tuple[float, int, str]] = []
        self._time = 0  # counts the blocks that went idle

    def find(self, block_hash: bytes) -> int | None:
        """The block of that name."""
        return self._blocks.get(block_hash)

    def is_cached(self, block: int) -> bool:
        """Whether the block has a name."""
        return block in self._cached

    def add(self, block_hash: bytes, block: int, tenant: str) -> bool:
        """Name a block that is in use; False where a block of that name is there already."""
        if block_hash in self._blocks:
            return False
        if block in self._cached:
            raise BrokenCache(f"block {block} has another name")
        self._blocks[block_hash] = block
        self._cached[block] = Cached(block_hash, tenant)
        return True

    def set_weight(self, tenant: str, weight: float) -> None:
        """The tenant's share of the idle blocks, relative to others' (1 unless set)."""
        if not weight > 0:
            raise ValueError(f"a tenant's weight must be positive, not {weight}")
        if self._weights.get(tenant, 1.0) != weight:
            self._weights[tenant] = weight
            self._push_rank(tenant)

    def rest(self, block: int) -> bool:
        """Nobody uses the block any longer; False where it isn't cached and so is free."""
        entry = self._cached.get(block)
        if entry is None:
            return False
        self._time += 1
        self._idle.setdefault(entry.tenant, OrderedDict())[entry.hash] = self._time
        self.idle_count += 1
        self._push_rank(entry.tenant)
        return True

    def use(self, block: int) -> None:
        """An idle block is used again, and most recently."""
        self._leave_idle(self._cached[block])

    def evict(self) -> tuple[int, Cached]:
        """Forget the idle block that goes first; there must be one."""
        while self._ranks[0] != self._rank(self._ranks[0][2]):
            heapq.heappop(self._ranks)
        tenant = self._ranks[0][2]
        entry = Cached(next(iter(self._idle[tenant])), tenant)
        self._leave_idle(entry)
        block = self._blocks.pop(entry.hash)
        del self._cached[block]
        return block, entry

    def move(self, source: int, target: int) -> None:
        """What `source` holds lies in `target` from now on, as recently used as before."""
        entry = self._cached.pop(source)
        self._cached[target] = entry
        self._blocks[entry.hash] = target

    def check_integrity(self, idle_blocks: set[int]) -> None:
        """Raise `BrokenCache` unless the books agree and exactly `idle_blocks` are idle."""
        if {entry.hash: block for block, entry in self._cached.items()} != self._blocks:
            raise BrokenCache("names and blocks are not each other's inverse")
        idle = {h: tenant for tenant, hashes in self._idle.items() for h in hashes}
        if {self._blocks.get(h) for h in idle} != idle_blocks:
            raise BrokenCache("the idle blocks are not those that nobody holds")
        if not len(idle) == sum(map(len, self._idle.values())) == self.idle_count:
            raise BrokenCache("idle blocks are miscounted")
        if any(self._cached[self._blocks[h]].tenant != tenant for h, tenant in idle.items()):
            raise BrokenCache("an idle block is not with the tenant that it is charged to")
        ranks = set(self._ranks)
        if not all(hashes and self._rank(tenant) in ranks for tenant, hashes in self._idle.items()):
            raise BrokenCache("a tenant's rank is not known")

    def _leave_idle(self, entry: Cached) -> None:
        idle = self._idle[entry.tenant]
        del idle[entry.hash]
        if not idle:
            del self._idle[entry.tenant]
        self.idle_count -= 1
        self._push_rank(entry.tenant)

    def _rank(self, tenant: str) -> tuple[float, int, str] | None:
        """Smallest for the tenant that must give first; None where it has nothing to give."""
        idle = self._idle.get(tenant)
        if idle is None:
            return None
        oldest = next(iter(idle.values()))
        return -len(idle) / self._weights.get(tenant, 1.0), oldest, tenant

    def _push_rank(self, tenant: str) -> None:
        rank = self._rank(tenant)
        if rank is not None:
            heapq.heappush(self._ranks, rank)
        if len(self._ranks) > 2 * len(self._idle) + _SPARE_RANKS:
            self._ranks = [rank for rank in map(self._rank, self._idle) if rank is not None]
            heapq.heapify(self._ranks)
