"""The pool's books stay right under any order of allocation, sharing and release."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.engine.block_pool import BlockPool, BrokenPool, OutOfBlocks


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=7, block_size=4)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        free = self.pool.free_count
        if count > free:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            assert self.pool.free_count == free
            return
        table = self.pool.allocate(count)
        assert len(set(table)) == count
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.share(table)
        self.tables.append(list(table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def the_books_agree(self) -> None:
        self.pool.check_integrity(self.tables)
        held = {block for table in self.tables for block in table}
        assert self.pool.used_count == len(held) == 7 - self.pool.free_count


TestPool = PoolMachine.TestCase


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (160, 10)]
)
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert BlockPool(1, 16).blocks_for(tokens) == blocks


def test_a_free_block_can_be_neither_shared_nor_released() -> None:
    pool = BlockPool(2, 16)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(BrokenPool):
        pool.release(table)
    with pytest.raises(BrokenPool):
        pool.share(table)


def test_integrity_sees_a_lost_and_a_foreign_reference() -> None:
    pool = BlockPool(3, 16)
    table = pool.allocate(2)
    with pytest.raises(BrokenPool):
        pool.check_integrity([])
    with pytest.raises(BrokenPool):
        pool.check_integrity([table, table[:1]])
