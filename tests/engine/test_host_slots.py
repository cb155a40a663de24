"""Host slots are taken whole or not at all, and never twice."""

import random

import pytest

from loraplex.engine.block_pool import BrokenPool
from loraplex.engine.host_slots import HostSlots


def test_slots_are_taken_whole_or_not_at_all() -> None:
    slots = HostSlots(3)
    assert slots.take(4) is None and slots.free_count == 3
    held = slots.take(2)
    assert held is not None and slots.used_count == 2
    assert slots.take(2) is None
    slots.check_integrity([held])
    slots.give(held)
    with pytest.raises(BrokenPool):
        slots.give(held)


def test_integrity_sees_lost_and_foreign_slots() -> None:
    slots = HostSlots(3)
    held = slots.take(2)
    assert held is not None
    for tables in ([], [held[:1]], [held, held], [[*held, 9]]):
        with pytest.raises(BrokenPool):
            slots.check_integrity(tables)


def test_random_steps_lose_nothing() -> None:
    chance, slots, tables = random.Random(0), HostSlots(13), list[list[int]]()
    for _ in range(5_000):
        if tables and chance.random() < 0.5:
            slots.give(tables.pop(chance.randrange(len(tables))))
        else:
            count = chance.randrange(6)
            taken = slots.take(count)
            assert (taken is None) == (count > 13 - sum(map(len, tables)))
            tables.extend([taken] if taken is not None else [])
        slots.check_integrity(tables)
