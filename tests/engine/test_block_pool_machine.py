"""The pool and its cache against a model that recounts everything, under random steps.

The model knows what KV each block physically holds: for every token up to the block's end, the
token and what it ran under. A sequence must always find exactly its own.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loraplex.engine.block_pool import BlockPool, OutOfBlocks
from loraplex.engine.prefix_cache import Chain, extend_hashes, namespace

SIZE = 2
TENANTS = "abc"
SCOPES = ("a", "bc")  # the second is shared by two tenants
IMAGES = (None, "1" * 64, "2" * 64)

KV = tuple[tuple[str, str | None, int], ...]  # of each token so far: scope, image, id


@dataclass
class Stream:
    tenant: str
    scope: str
    image: str | None
    adapter_start: int
    token_ids: list[int]
    table: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)

    def kv(self, count: int) -> KV:
        under = (None if i < self.adapter_start else self.image for i in range(count))
        return tuple(
            (self.scope, image, i) for image, i in zip(under, self.token_ids, strict=False)
        )

    def hash(self) -> None:
        base, image = namespace("x", None, self.scope), namespace("x", self.image, self.scope)
        extend_hashes(self.hashes, self.token_ids, Chain(base, image, self.adapter_start), SIZE)


class World:
    """A pool, those who use it, and a naive account of both."""

    def __init__(self, num_blocks: int, limit: int) -> None:
        self.pool = BlockPool(num_blocks, SIZE, limit=limit)
        self.streams: list[Stream] = []
        self.memory: dict[int, KV] = {}
        self.charged: dict[int, str] = {}  # cached blocks
        self.idle: list[int] = []  # the least recently used first
        self.weights = dict.fromkeys(TENANTS, 1.0)
        self.evicted: dict[str, list[str]] = defaultdict(list)
        self.hash_of: dict[int, bytes] = {}

    def start(self, stream: Stream) -> None:
        stream.hash()
        cached = {self.hash_of[block]: block for block in self.charged}
        expected = []
        for block_hash in stream.hashes:
            if block_hash not in cached:
                break
            expected.append(cached[block_hash])
        stream.table = self.pool.match(stream.hashes, stream.tenant)
        assert stream.table == expected
        self.idle = [block for block in self.idle if block not in expected]
        for index, block in enumerate(stream.table):
            assert self.memory[block] == stream.kv((index + 1) * SIZE)
        self.streams.append(stream)
        if not self.fill(stream):
            self.finish(stream)

    def fill(self, stream: Stream) -> bool:
        """Give the stream the blocks that it lacks and write to them; False where none are left."""
        lacking = self.pool.blocks_for(len(stream.token_ids)) - len(stream.table)
        blocks = self.allocate(lacking)
        if blocks is None:
            return False
        stream.table += blocks
        self.write(stream)
        return True

    def allocate(self, count: int) -> list[int] | None:
        held = {block for stream in self.streams for block in stream.table}
        spare = self.pool.limit - len(held)
        assert self.pool.free_count == spare
        if count > spare:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return None
        self.evict(count - (spare - len(self.idle)))
        blocks = self.pool.allocate(count)
        assert len({*blocks}) == count and not held & {*blocks}
        assert all(block < self.pool.limit for block in blocks)
        return blocks

    def evict(self, count: int) -> None:
        for _ in range(count):
            by_tenant: dict[str, list[int]] = defaultdict(list)
            for block in self.idle:
                by_tenant[self.charged[block]].append(block)
            most = max(len(blocks) / self.weights[t] for t, blocks in by_tenant.items())
            block = next(
                block
                for block in self.idle
                if len(by_tenant[self.charged[block]]) / self.weights[self.charged[block]] == most
            )
            self.idle.remove(block)
            tenant = self.charged.pop(block)
            self.evicted[tenant].append(self.hash_of.pop(block)[:8].hex())

    def write(self, stream: Stream) -> None:
        """Compute the KV of blocks that are the stream's own; cache those that are full."""
        stream.hash()
        for index, block in enumerate(stream.table):
            self.memory[block] = stream.kv(min((index + 1) * SIZE, len(stream.token_ids)))
        names = {self.hash_of[block] for block in self.charged}
        for block, block_hash in zip(stream.table, stream.hashes, strict=False):
            self.pool.store(block, block_hash, stream.tenant)
            if block_hash not in names:
                self.charged[block] = stream.tenant
                self.hash_of[block] = block_hash

    def append(self, stream: Stream, token: int) -> None:
        """Decode a token; the block that it is written to must be the stream's own."""
        if len(stream.token_ids) % SIZE and self.pool.is_shared(stream.table[-1]):
            copy = self.allocate(1)
            if copy is None:
                return
            self.pool.release(stream.table[-1:])
            stream.table[-1:] = copy
        stream.token_ids.append(token)
        if not self.fill(stream):
            stream.token_ids.pop()

    def fork(self, stream: Stream) -> None:
        self.pool.share(stream.table)
        fork = Stream(
            stream.tenant, stream.scope, stream.image, stream.adapter_start, [*stream.token_ids]
        )
        fork.table, fork.hashes = [*stream.table], [*stream.hashes]
        self.streams.append(fork)

    def finish(self, stream: Stream) -> None:
        self.streams = [other for other in self.streams if other is not stream]
        held = {block for other in self.streams for block in other.table}
        self.pool.release(stream.table)
        self.idle += [b for b in reversed(stream.table) if b not in held and b in self.charged]

    def resize(self, limit: int) -> None:
        held = {block for stream in self.streams for block in stream.table}
        if limit < len(held):
            with pytest.raises(OutOfBlocks):
                self.pool.resize(limit)
            return
        self.evict(len(held) + len(self.idle) - limit)
        moves = self.pool.resize(limit)
        kept = held | {*self.idle}
        assert {source for source, _ in moves} == {block for block in kept if block >= limit}
        for source, target in moves:
            assert target < limit and target not in kept
            self.memory[target] = self.memory[source]
        renamed = dict(moves)
        for stream in self.streams:
            stream.table = [renamed.get(block, block) for block in stream.table]
        self.idle = [renamed.get(block, block) for block in self.idle]
        self.charged = {renamed.get(block, block): t for block, t in self.charged.items()}
        self.hash_of = {renamed.get(block, block): h for block, h in self.hash_of.items()}

    def drop_cache(self) -> None:
        self.evict(len(self.idle))
        self.pool.drop_cache()

    def set_weight(self, tenant: str, weight: float) -> None:
        self.weights[tenant] = weight
        self.pool.set_weight(tenant, weight)

    def check(self) -> None:
        self.pool.check_integrity([stream.table for stream in self.streams])
        assert self.pool.cached_count == len(self.idle)
        for stream in self.streams:
            for index, block in enumerate(stream.table):
                mine = stream.kv(min((index + 1) * SIZE, len(stream.token_ids)))
                assert self.memory[block] == mine
        evicted: dict[str, list[str]] = defaultdict(list)
        for event in self.pool.take_events():
            if event.kind == "evicted":
                evicted[event.tenant] += event.blocks
        assert evicted == self.evicted
        self.evicted.clear()


def scope_of(tenant: str) -> str:
    return next(scope for scope in SCOPES if tenant in scope)


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 12), data=st.data())
    def begin(self, num_blocks: int, data: st.DataObject) -> None:
        self.world = World(num_blocks, data.draw(st.integers(0, num_blocks)))

    def some(self, data: st.DataObject) -> Stream:
        return data.draw(st.sampled_from(self.world.streams))

    @rule(
        tenant=st.sampled_from(TENANTS),
        image=st.sampled_from(IMAGES),
        adapter_start=st.integers(0, 7),
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=9),
    )
    def start(
        self, tenant: str, image: str | None, adapter_start: int, token_ids: list[int]
    ) -> None:
        start = adapter_start if image else 0
        self.world.start(Stream(tenant, scope_of(tenant), image, start, token_ids))

    @precondition(lambda self: self.world.streams)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        self.world.append(self.some(data), token)

    @precondition(lambda self: self.world.streams)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.world.fork(self.some(data))

    @precondition(lambda self: self.world.streams)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.world.finish(self.some(data))

    @rule(data=st.data())
    def resize(self, data: st.DataObject) -> None:
        self.world.resize(data.draw(st.integers(0, self.world.pool.num_blocks)))

    @rule()
    def drop_cache(self) -> None:
        self.world.drop_cache()

    @rule(tenant=st.sampled_from(TENANTS), weight=st.sampled_from([0.5, 1.0, 3.0]))
    def set_weight(self, tenant: str, weight: float) -> None:
        self.world.set_weight(tenant, weight)

    @invariant()
    def the_books_agree(self) -> None:
        self.world.check()


TestPool = PoolMachine.TestCase


def test_tens_of_thousands_of_random_steps() -> None:
    chance = random.Random(0)
    world = World(24, 24)
    for _ in range(20_000):
        step = chance.random()
        if step < 0.2:
            tenant, image = chance.choice(TENANTS), chance.choice(IMAGES)
            start = chance.randrange(8) if image else 0
            token_ids = [chance.randrange(2) for _ in range(chance.randrange(1, 14))]
            world.start(Stream(tenant, scope_of(tenant), image, start, token_ids))
        elif step < 0.96 and world.streams:
            stream = chance.choice(world.streams)
            act = chance.choices([world.append, world.fork, world.finish], [6, 1, 3])[0]
            act(stream, *([chance.randrange(2)] if act == world.append else []))
        elif step < 0.99:
            world.resize(chance.randrange(8, 25))
        else:
            world.set_weight(chance.choice(TENANTS), chance.choice([0.5, 1.0, 3.0]))
        world.check()
    assert world.pool.hit_tokens > 1_000 and world.pool.evicted_blocks > 1_000
    for stream in [*world.streams]:
        world.finish(stream)
    world.drop_cache()
    world.check()
    assert world.pool.free_count == world.pool.limit
