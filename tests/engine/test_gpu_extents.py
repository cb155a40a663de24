"""Extents keep what lies in them, whatever is taken, given back and moved."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.engine.gpu.extents import Extents, Move

SIZE = 64


class ExtentsMachine(RuleBasedStateMachine):
    """A memory in which each extent holds a value of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(SIZE)
        self.memory = bytearray(SIZE)
        self.held: dict[int, tuple[int, int]] = {}  # value: begin, length
        self.values = 0

    @rule(length=st.integers(1, 20))
    def take(self, length: int) -> None:
        begin = self.extents.take(length)
        if begin is None:
            assert not self.longest_gap() >= length
            return
        self.values += 1
        self.held[self.values % 256] = (begin, length)
        self.memory[begin : begin + length] = bytes([self.values % 256]) * length

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        value = data.draw(st.sampled_from(sorted(self.held)))
        self.extents.give(self.held.pop(value)[0])

    @rule()
    def compact(self) -> None:
        for move in self.extents.compact():
            part = self.memory[move.source : move.source + move.length]
            self.memory[move.target : move.target + move.length] = part
            value = next(v for v, (begin, _) in self.held.items() if begin == move.source)
            self.held[value] = (move.target, move.length)
        assert self.longest_gap() == self.extents.free_bytes

    @invariant()
    def each_extent_is_whole(self) -> None:
        self.extents.check_integrity()
        for value, (begin, length) in self.held.items():
            assert self.memory[begin : begin + length] == bytes([value]) * length
        assert self.extents.free_bytes == SIZE - sum(n for _, n in self.held.values())

    def longest_gap(self) -> int:
        free = [True] * SIZE
        for begin, length in self.held.values():
            free[begin : begin + length] = [False] * length
        return max(len(run) for run in "".join("x "[f] for f in free).split("x"))


ExtentsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestExtents = ExtentsMachine.TestCase


def test_the_smallest_gap_that_fits_is_taken() -> None:
    extents = Extents(30)
    begins = [extents.take(length) for length in (8, 2, 5, 2, 6)]
    assert begins == [0, 8, 10, 15, 17]
    extents.give(0)
    extents.give(10)
    assert extents.take(4) == 10
    assert extents.take(8) == 0
    assert extents.take(8) is None


def test_compaction_moves_in_order() -> None:
    extents = Extents(20)
    for length in (4, 6, 3, 5):
        extents.take(length)
    extents.give(0)
    extents.give(10)
    assert extents.compact() == [Move(4, 0, 6), Move(13, 6, 5)]
    assert extents.compact() == []
    assert extents.take(9) == 11


def test_what_is_not_taken_cannot_be_given() -> None:
    extents = Extents(20)
    extents.take(4)
    with pytest.raises(KeyError):
        extents.give(2)
