"""The arena keeps what lies in it, whatever is taken, given back and moved, wherever the floor."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.engine.arena import Arena, Move
from loraplex.engine.images import ALIGNMENT

UNITS = 40
SIZE = UNITS * ALIGNMENT


class Model:
    """An arena over real bytes; each extent holds a value of its own in every unit."""

    def __init__(self) -> None:
        self.arena = Arena(SIZE)
        self.memory = [0] * UNITS
        self.held: dict[int, tuple[int, int]] = {}  # value: first unit, units
        self.values = 0

    def take(self, units: int) -> None:
        free = self.arena.free_bytes
        if units * ALIGNMENT > free:
            with pytest.raises(MemoryError):
                self.arena.take(units * ALIGNMENT)
            assert self.arena.free_bytes == free
            return
        fits = max(self.gaps()) >= units
        begin, moves = self.arena.take(units * ALIGNMENT - self.values % ALIGNMENT)
        assert not moves or not fits, "nothing moves where a gap is large enough"
        self.follow(moves)
        self.values += 1
        self.held[self.values] = (begin // ALIGNMENT, units)
        self.fill(begin // ALIGNMENT, [self.values] * units)

    def give(self, value: int) -> None:
        self.arena.give(self.held.pop(value)[0] * ALIGNMENT)

    def set_floor(self, units: int) -> None:
        taken = sum(n for _, n in self.held.values())
        if units + taken > UNITS:
            with pytest.raises(MemoryError):
                self.arena.set_floor(units * ALIGNMENT)
            return
        self.follow(self.arena.set_floor(units * ALIGNMENT - self.values % ALIGNMENT * (units > 0)))
        assert self.arena.floor == units * ALIGNMENT
        self.fill(0, [-1] * units)  # KV blocks, which may be written at once

    def follow(self, moves: list[Move]) -> None:
        for move in moves:
            assert move.target > move.source
            source, units = move.source // ALIGNMENT, move.length // ALIGNMENT
            value = next(v for v, (begin, _) in self.held.items() if begin == source)
            self.held[value] = (move.target // ALIGNMENT, units)
            self.fill(move.target // ALIGNMENT, self.memory[source : source + units])

    def fill(self, first: int, values: list[int]) -> None:
        self.memory[first : first + len(values)] = values

    def gaps(self) -> list[int]:
        free = ["x" if u * ALIGNMENT < self.arena.floor else " " for u in range(UNITS)]
        for first, units in self.held.values():
            free[first : first + units] = "x" * units
        return [len(run) for run in "".join(free).split("x")]

    def check(self) -> None:
        self.arena.check_integrity()
        for value, (first, units) in self.held.items():
            assert self.memory[first : first + units] == [value] * units
        assert self.arena.free_bytes == sum(self.gaps()) * ALIGNMENT


class ArenaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    @rule(units=st.integers(1, 14))
    def take(self, units: int) -> None:
        self.model.take(units)

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        self.model.give(data.draw(st.sampled_from(sorted(self.model.held))))

    @rule(units=st.integers(0, UNITS))
    def set_floor(self, units: int) -> None:
        self.model.set_floor(units)

    @invariant()
    def each_extent_is_whole(self) -> None:
        self.model.check()


ArenaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestArena = ArenaMachine.TestCase


def test_twenty_thousand_steps() -> None:
    model, choose = Model(), random.Random(0)
    for _ in range(20_000):
        verb = choose.random()
        if verb < 0.5:
            model.take(choose.randint(1, 9))
        elif verb < 0.9 and model.held:
            model.give(choose.choice(list(model.held)))
        else:
            model.set_floor(choose.randint(0, UNITS))
        model.check()
    assert model.values > 5_000


def test_the_smallest_gap_that_fits_is_taken_from_its_top() -> None:
    arena = Arena(30 * ALIGNMENT)
    assert begins(arena, 8, 2, 5, 2, 6) == [22, 20, 15, 13, 7]
    arena.give(22 * ALIGNMENT)
    arena.give(15 * ALIGNMENT)
    assert begins(arena, 4, 5, 8) == [16, 2, 22]


def test_of_equal_gaps_the_highest_is_taken() -> None:
    arena = Arena(9 * ALIGNMENT)
    assert begins(arena, 2, 1, 2, 1, 2, 1) == [7, 6, 4, 3, 1, 0]
    for begin in (1, 7, 4):
        arena.give(begin * ALIGNMENT)
    assert begins(arena, 2, 2, 2) == [7, 4, 1]


def test_no_more_moves_than_there_must() -> None:
    arena = Arena(20 * ALIGNMENT)
    assert begins(arena, 4, 6, 3, 5) == [16, 10, 7, 2]
    arena.give(16 * ALIGNMENT)
    arena.give(7 * ALIGNMENT)
    begin, made = arena.take(5 * ALIGNMENT)
    assert made == moves((10, 14, 6))
    assert begin == 9 * ALIGNMENT


def test_a_floor_pushes_up_what_is_below() -> None:
    arena = Arena(20 * ALIGNMENT)
    assert begins(arena, 4, 6, 3) == [16, 10, 7]
    arena.give(16 * ALIGNMENT)
    assert arena.set_floor(7 * ALIGNMENT) == []
    assert arena.set_floor(7 * ALIGNMENT + 1) == moves((7, 17, 3))
    assert (arena.floor, arena.free_bytes) == (8 * ALIGNMENT, 3 * ALIGNMENT)
    with pytest.raises(MemoryError):
        arena.set_floor(12 * ALIGNMENT)
    assert arena.floor == 8 * ALIGNMENT
    assert arena.set_floor(11 * ALIGNMENT) == moves((10, 11, 6))


def test_a_floor_closes_gaps_that_are_too_small() -> None:
    arena = Arena(12 * ALIGNMENT)
    assert begins(arena, 1, 3, 1, 3) == [11, 8, 7, 4]
    arena.give(11 * ALIGNMENT)
    arena.give(7 * ALIGNMENT)
    assert arena.set_floor(6 * ALIGNMENT) == moves((8, 9, 3), (4, 6, 3))


def test_what_is_not_taken_cannot_be_given() -> None:
    arena = Arena(SIZE)
    begin, _ = arena.take(4)
    with pytest.raises(KeyError):
        arena.give(begin - ALIGNMENT)


def test_a_floor_above_the_region() -> None:
    with pytest.raises(ValueError, match="above a region"):
        Arena(ALIGNMENT + 1, ALIGNMENT + 1)


def begins(arena: Arena, *units: int) -> list[int]:
    """Where extents of so many units were taken, in units; nothing may move."""
    found = [arena.take(n * ALIGNMENT) for n in units]
    assert not any(made for _, made in found)
    return [begin // ALIGNMENT for begin, _ in found]


def moves(*units: tuple[int, int, int]) -> list[Move]:
    """Moves (source, target, length) given in units."""
    return [Move(*(n * ALIGNMENT for n in move)) for move in units]
