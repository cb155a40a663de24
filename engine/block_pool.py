"""The KV blocks of one engine: free, held by sequences, or cached and idle.

Pure ints, no tensors: a block is an index into the executor's cache. A block without holders is
free, or, where it has a name in the prefix cache, idle: kept until its room is needed. The lowest
free block is handed out first, so that the top of the region tends to be free when images need it.
The pool refuses to know what a block holds and who holds it.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from loraplex.engine.cache_events import EventLog
from loraplex.engine.prefix_cache import PrefixCache
from loraplex.engine.protocol import CacheEvent


class OutOfBlocks(Exception):
    """More blocks were asked for than there are to hand out; nothing has changed."""


class BrokenPool(Exception):
    """The pool's books do not agree with each other or with the block tables."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, of which those below `limit` are handed out.

    Without `caching` no block is ever matched, and one that is released is free at once.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, caching: bool = True, limit: int | None = None
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.limit = num_blocks if limit is None else limit
        self.queried_tokens = self.hit_tokens = self.evicted_blocks = 0
        self._caching = caching
        self._free = list(range(num_blocks))  # a heap, with all blocks beyond the limit
        self._references = [0] * num_blocks
        self._cache = PrefixCache()
        self._events = EventLog(block_size)

    @property
    def free_count(self) -> int:
        """Blocks that `allocate` could hand out now: free or idle."""
        return self._blank_count + self._cache.idle_count

    @property
    def used_count(self) -> int:
        """Blocks that somebody holds."""
        return self.limit - self.free_count

    @property
    def cached_count(self) -> int:
        """Blocks that are cached and idle."""
        return self._cache.idle_count

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference; raises `OutOfBlocks`.

        Idle blocks are evicted where free ones do not suffice.
        """
        if count > self.free_count:
            raise OutOfBlocks(f"{count} blocks were asked for and {self.free_count} are free")
        self._evict(count - self._blank_count)
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, all of which must be held."""
        for block in blocks:
            self._check_held(block)
            self._references[block] += 1

    def is_shared(self, block: int) -> bool:
        """Whether more than one holds the block."""
        return self._references[block] > 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block, given in a table's order.

        A block that nobody holds any longer is idle where it is cached, else free. Of a table the
        last block will be evicted first: without what lies before it a block is of no use.
        """
        for block in reversed(blocks):
            self._check_held(block)
            self._references[block] -= 1
            if self._references[block] == 0 and not self._cache.rest(block):
                heapq.heappush(self._free, block)

    def find(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """How many blocks `match` would find, and how many of these nobody holds now."""
        found = idle = 0
        for block_hash in hashes:
            block = self._cache.find(block_hash)
            if block is None or not self._caching:
                break
            found, idle = found + 1, idle + (self._references[block] == 0)
        return found, idle

    def match(self, hashes: Sequence[bytes], tenant: str) -> list[int]:
        """The blocks of the longest cached prefix of `hashes`, a reference taken on each."""
        if not self._caching:
            return []
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._cache.find(block_hash)
            if block is None:
                break
            self._hold(block)
            blocks.append(block)
        self.queried_tokens += len(hashes) * self.block_size
        self.hit_tokens += len(blocks) * self.block_size
        self._events.note("hit", tenant, hashes[: len(blocks)])
        return blocks

    def store(self, block: int, block_hash: bytes, tenant: str) -> None:
        """A held block is full of what `block_hash` names, and is cached from now on.

        `tenant` is charged for it. Where another block of that name is cached, that one stays.
        """
        self._check_held(block)
        if self._caching and self._cache.add(block_hash, block, tenant):
            self._events.note("stored", tenant, [block_hash])

    def set_weight(self, tenant: str, weight: float) -> None:
        """The tenant's share of the cache relative to others' (1 unless set)."""
        self._cache.set_weight(tenant, weight)

    def resize(self, limit: int) -> list[tuple[int, int]]:
        """Hand out the blocks below `limit` alone; raises `OutOfBlocks` where more are held.

        Evicts as many idle blocks as no longer fit. Returns the moves (source, target) of what lay
        beyond the limit; the caller renumbers its block tables and has the executor copy. No target
        is a source.
        """
        if not 0 <= limit <= self.num_blocks:
            raise ValueError(f"the limit must lie in 0..{self.num_blocks}, not at {limit}")
        if limit < self.used_count:
            raise OutOfBlocks(f"{self.used_count} blocks are held, more than {limit}")
        beyond = range(limit, self.limit)
        self._evict(len(beyond) - self._blank_count)
        self.limit = limit
        return [
            (block, self._move(block))
            for block in beyond
            if self._references[block] or self._cache.is_cached(block)
        ]

    def drop_cache(self) -> None:
        """Evict all idle blocks."""
        self._evict(self.cached_count)

    def take_events(self) -> list[CacheEvent]:
        """What was stored, hit and evicted since the last call, in order for each tenant."""
        return self._events.take()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `BrokenPool` or `BrokenCache` unless the references are exactly those of `tables`.

        Every block must be held, idle or free, and one of these only.
        """
        held = Counter(block for table in tables for block in table)
        for block, references in enumerate(self._references):
            if references != held[block]:
                raise BrokenPool(f"block {block}: {references} references, {held[block]} holders")
        unheld = {block for block, references in enumerate(self._references) if references == 0}
        idle = {block for block in unheld if self._cache.is_cached(block)}
        if sorted(self._free) != sorted(unheld - idle):
            raise BrokenPool("the free blocks are not those that are neither held nor cached")
        if not set(self._free).issuperset(range(self.limit, self.num_blocks)):
            raise BrokenPool("a block beyond the limit is in use")
        self._cache.check_integrity(idle)

    @property
    def _blank_count(self) -> int:
        """Free blocks below the limit; all those beyond are free."""
        return len(self._free) - (self.num_blocks - self.limit)

    def _check_held(self, block: int) -> None:
        if self._references[block] == 0:
            raise BrokenPool(f"block {block} is held by nobody")

    def _hold(self, block: int) -> None:
        if self._references[block] == 0:
            self._cache.use(block)
        self._references[block] += 1

    def _evict(self, count: int) -> None:
        for _ in range(count):
            block, entry = self._cache.evict()
            heapq.heappush(self._free, block)
            self._events.note("evicted", entry.tenant, [entry.hash])
            self.evicted_blocks += 1

    def _move(self, source: int) -> int:
        """Move what a block holds to the lowest free block."""
        target = heapq.heappop(self._free)
        heapq.heappush(self._free, source)
        self._references[target] = self._references[source]
        self._references[source] = 0
        if self._cache.is_cached(source):
            self._cache.move(source, target)
        return target
