"""What the pool promises to those who hold blocks, cache them and move the boundary."""

import random

import pytest

from loraplex.engine.block_pool import BlockPool, BrokenPool, OutOfBlocks
from loraplex.engine.cache_events import MAX_NOTES
from loraplex.engine.protocol import CacheEvent

SIZE = 4


def name(index: int) -> bytes:
    return index.to_bytes(32, "little")


def cached(pool: BlockPool, indices: range, tenant: str = "a") -> list[int]:
    """Blocks stored under the names of `indices`, and idle."""
    table = pool.allocate(len(indices))
    for block, index in zip(table, indices, strict=True):
        pool.store(block, name(index), tenant)
    pool.release(table)
    return table


def evicted(pool: BlockPool) -> list[int]:
    """What has been evicted since the last call, in order."""
    gone = [
        block for event in pool.take_events() if event.kind == "evicted" for block in event.blocks
    ]
    return [int.from_bytes(bytes.fromhex(block), "little") for block in gone]


def names(indices: range) -> list[bytes]:
    return [name(index) for index in indices]


def is_cached(pool: BlockPool, index: int) -> bool:
    blocks = pool.match([name(index)], "")
    pool.release(blocks)
    return bool(blocks)


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (160, 10)]
)
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert BlockPool(1, 16).blocks_for(tokens) == blocks


def test_a_block_is_shared_while_more_than_one_holds_it() -> None:
    pool = BlockPool(2, SIZE)
    table = pool.allocate(1)
    assert not pool.is_shared(table[0])
    pool.share(table)
    assert pool.is_shared(table[0])
    pool.release(table)
    assert not pool.is_shared(table[0])
    pool.check_integrity([table])


def test_a_free_block_can_be_neither_shared_nor_released_nor_stored() -> None:
    pool = BlockPool(2, SIZE)
    table = pool.allocate(1)
    pool.release(table)
    for misuse in (pool.release, pool.share, lambda _: pool.store(table[0], name(0), "a")):
        with pytest.raises(BrokenPool):
            misuse(table)


def test_integrity_sees_a_lost_and_a_foreign_reference() -> None:
    pool = BlockPool(3, SIZE)
    table = pool.allocate(2)
    with pytest.raises(BrokenPool):
        pool.check_integrity([])
    with pytest.raises(BrokenPool):
        pool.check_integrity([table, table[:1]])


def test_the_lowest_free_blocks_are_handed_out() -> None:
    pool = BlockPool(8, SIZE)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.release(first)
    assert pool.allocate(3) == [*first, 4]
    pool.check_integrity([first, [4], second])


def test_match_finds_the_longest_prefix_and_holds_it() -> None:
    pool = BlockPool(8, SIZE)
    table = cached(pool, range(3))
    assert pool.cached_count == 3 and pool.free_count == 8 and pool.used_count == 0
    found = pool.match([name(0), name(1), name(9), name(2)], "a")
    assert found == table[:2]
    assert pool.used_count == 2 and pool.cached_count == 1
    again = pool.match(names(range(2)), "a")
    assert again == found and pool.is_shared(found[0])
    assert pool.queried_tokens == 6 * SIZE and pool.hit_tokens == 4 * SIZE
    pool.check_integrity([found, again])


def test_a_running_sequence_shares_what_it_has_stored() -> None:
    pool = BlockPool(4, SIZE)
    running = pool.allocate(2)
    pool.store(running[0], name(0), "a")
    joining = pool.match(names(range(2)), "a")
    assert joining == running[:1]
    pool.release(running)
    assert pool.used_count == 1 and pool.cached_count == 0
    pool.check_integrity([joining])


def test_a_name_stays_with_its_first_block() -> None:
    pool = BlockPool(4, SIZE)
    first, second = pool.allocate(1), pool.allocate(1)
    for block in (*first, *second, *first):
        pool.store(block, name(0), "a")
    pool.release(second)
    assert pool.cached_count == 0
    pool.release(first)
    assert pool.cached_count == 1
    assert pool.match([name(0)], "a") == first


def test_of_a_table_the_last_block_is_evicted_first() -> None:
    pool = BlockPool(4, SIZE)
    cached(pool, range(4))
    pool.allocate(4)
    assert evicted(pool) == [3, 2, 1, 0]


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4, SIZE)
    cached(pool, range(3))
    pool.allocate(1)
    assert pool.cached_count == 3 and pool.evicted_blocks == 0


def test_a_hit_keeps_a_block_for_longer() -> None:
    pool = BlockPool(3, SIZE)
    for index in range(3):
        cached(pool, range(index, index + 1))
    pool.release(pool.match([name(0)], "a"))
    pool.allocate(1)
    assert [is_cached(pool, index) for index in range(3)] == [True, False, True]


def test_allocation_fails_whole_and_never_evicts_what_is_held() -> None:
    pool = BlockPool(4, SIZE)
    cached(pool, range(4))
    held = pool.match(names(range(2)), "a")
    with pytest.raises(OutOfBlocks):
        pool.allocate(3)
    assert pool.evicted_blocks == 0
    assert sorted(held + pool.allocate(2)) == [0, 1, 2, 3]
    assert pool.match(names(range(2)), "a") == held


def test_a_tenant_that_floods_evicts_itself() -> None:
    pool = BlockPool(10, SIZE)
    cached(pool, range(3), "quiet")
    for index in range(100, 200):
        cached(pool, range(index, index + 1), "loud")
    assert all(is_cached(pool, index) for index in range(3))
    assert pool.cached_count == 10


@pytest.mark.parametrize("weight", [1.0, 2.0, 4.0, 0.25])
def test_the_cache_is_divided_by_weight(weight: float) -> None:
    pool = BlockPool(20, SIZE)
    pool.set_weight("b", weight)
    for index in range(40):
        cached(pool, range(index, index + 1), "a")
        cached(pool, range(100 + index, 101 + index), "b")
    share = sum(is_cached(pool, 100 + index) for index in range(40))
    assert abs(share - 20 * weight / (1 + weight)) <= 1


def test_a_new_weight_counts_at_once() -> None:
    pool = BlockPool(4, SIZE)
    cached(pool, range(2), "a")
    cached(pool, range(2, 4), "b")
    pool.set_weight("b", 0.5)
    pool.allocate(1)
    assert [is_cached(pool, index) for index in range(4)] == [True, True, True, False]
    with pytest.raises(ValueError, match="positive"):
        pool.set_weight("b", 0)


def test_between_equal_tenants_the_longest_idle_block_goes() -> None:
    pool = BlockPool(3, SIZE)
    for index, tenant in enumerate("bac"):
        cached(pool, range(index, index + 1), tenant)
    pool.allocate(1)
    assert [is_cached(pool, index) for index in range(3)] == [False, True, True]


def test_a_shared_block_is_charged_to_the_one_that_stored_it() -> None:
    pool = BlockPool(4, SIZE)
    cached(pool, range(3), "a")
    pool.release(pool.match(names(range(3)), "b"))
    pool.take_events()
    pool.allocate(2)
    assert pool.take_events() == [CacheEvent("evicted", "a", ("02" + "00" * 7,), SIZE)]


def test_without_caching_nothing_is_kept() -> None:
    pool = BlockPool(4, SIZE, caching=False)
    cached(pool, range(2))
    assert pool.cached_count == 0 and pool.match(names(range(2)), "a") == []
    assert pool.queried_tokens == 0 and pool.take_events() == []
    pool.check_integrity([])


def test_dropping_the_cache_leaves_what_is_held() -> None:
    pool = BlockPool(6, SIZE)
    cached(pool, range(4))
    held = pool.match(names(range(2)), "a")
    pool.drop_cache()
    assert pool.cached_count == 0 and pool.evicted_blocks == 2
    assert pool.match(names(range(4)), "a") == held
    pool.check_integrity([held, held])


def test_blocks_beyond_the_limit_are_not_handed_out() -> None:
    pool = BlockPool(6, SIZE, limit=4)
    assert pool.free_count == 4
    table = pool.allocate(4)
    assert max(table) < 4 and pool.used_count == 4
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    assert pool.resize(6) == []
    assert pool.allocate(2) == [4, 5]


def test_a_lower_limit_moves_what_is_held_and_keeps_what_fits() -> None:
    pool = BlockPool(6, SIZE)
    low = pool.allocate(2)
    high = pool.allocate(3)
    cached(pool, range(1))
    pool.release(low)
    moves = dict(pool.resize(4))
    assert moves == {4: 0, 5: 1}
    high = [moves.get(block, block) for block in high]
    assert pool.cached_count == 1 and pool.match([name(0)], "a") == [1]
    pool.check_integrity([high, [1]])


def test_a_lower_limit_evicts_by_the_same_rule_as_an_allocation() -> None:
    pool = BlockPool(6, SIZE)
    cached(pool, range(4), "a")
    cached(pool, range(4, 6), "b")
    moves = dict(pool.resize(4))
    assert [is_cached(pool, index) for index in range(6)] == [True, True, False, False, True, True]
    assert moves == {4: 2, 5: 3}


def test_a_limit_below_what_is_held_changes_nothing() -> None:
    pool = BlockPool(6, SIZE)
    table = pool.allocate(4)
    cached(pool, range(2))
    with pytest.raises(OutOfBlocks):
        pool.resize(3)
    assert pool.limit == 6 and pool.cached_count == 2
    with pytest.raises(ValueError, match="limit"):
        pool.resize(7)
    pool.check_integrity([table])


def test_moved_blocks_keep_their_place_in_the_order() -> None:
    pool = BlockPool(6, SIZE)
    room = pool.allocate(3)
    for index in range(3):
        cached(pool, range(index, index + 1))
    pool.release(room)
    assert len(pool.resize(3)) == 3
    pool.allocate(3)
    assert evicted(pool) == [0, 1, 2]


def test_events_are_in_each_tenants_order_and_joined() -> None:
    pool = BlockPool(4, SIZE)
    cached(pool, range(2), "a")
    cached(pool, range(2, 4), "b")
    pool.release(pool.match(names(range(2)), "a"))
    pool.drop_cache()
    hexes = [name(index)[:8].hex() for index in range(4)]
    events = pool.take_events()
    for tenant, mine in (("a", hexes[:2]), ("b", hexes[2:])):
        own = [event for event in events if event.tenant == tenant]
        assert [event.kind for event in own] == (
            ["stored", "hit", "evicted"] if tenant == "a" else ["stored", "evicted"]
        )
        assert all(sorted(event.blocks) == mine and event.tokens == 2 * SIZE for event in own)
    assert pool.take_events() == []


def test_events_that_nobody_takes_are_bounded() -> None:
    pool = BlockPool(1, SIZE)
    cached(pool, range(1))
    for _ in range(MAX_NOTES + 10):
        pool.release(pool.match([name(0)], "a"))
    assert [(e.kind, len(e.blocks)) for e in pool.take_events()] == [("hit", MAX_NOTES)]


def test_a_thousand_tenants_and_ten_thousand_allocations() -> None:
    """Most allocations evict, from whoever has most for a weight that keeps changing."""
    chance = random.Random(0)
    pool = BlockPool(10_000, SIZE)
    tables: list[list[int]] = []
    for index in range(10_000):
        pool.set_weight(tenant := str(chance.randrange(1_000)), chance.choice([0.5, 1, 3]))
        table = pool.allocate(4)
        for position, block in enumerate(table[:3]):
            pool.store(block, name(4 * index + position), tenant)
        tables.append(table)
        pool.release(tables.pop(chance.randrange(len(tables))))
        if index % 2_000 == 0:
            moves = dict(pool.resize(chance.randrange(8_000, 10_001)))
            tables = [[moves.get(block, block) for block in table] for table in tables]
            pool.check_integrity(tables)
    assert pool.evicted_blocks > 10_000
    pool.check_integrity(tables)
