"""The boundary of KV blocks and images: what is held stays, and the sides do not trade in turns."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from loraplex.engine.boundary import STRIDES, TENURE, Boundary

BLOCK = 100


def test_images_start_with_a_quarter() -> None:
    boundary = Boundary(100 * BLOCK, BLOCK, least_blocks=10, most_blocks=1000)
    assert (boundary.blocks, boundary.image_bytes) == (75, 25 * BLOCK)
    assert boundary.most_image_bytes == 90 * BLOCK


def test_images_start_with_what_blocks_cannot_use_or_can_spare() -> None:
    assert Boundary(100 * BLOCK, BLOCK, 10, 20).image_bytes == 80 * BLOCK
    assert Boundary(100 * BLOCK + 7, BLOCK, 90, 1000).image_bytes == 10 * BLOCK + 7


@pytest.mark.parametrize(("least", "most"), [(101, 200), (20, 10), (-1, 5)])
def test_what_cannot_be_divided_is_refused(least: int, most: int) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Boundary(100 * BLOCK, BLOCK, least, most)


def test_what_is_lacking_is_given_in_whole_blocks() -> None:
    boundary = Boundary(100 * BLOCK, BLOCK, 10, 1000)
    assert boundary.give_to_images(BLOCK + 1, spare_blocks=50) == 73
    assert boundary.give_to_images(0, spare_blocks=50) == 73
    assert boundary.give_to_images(1000 * BLOCK, spare_blocks=50) == 23, "no more than is spare"
    assert boundary.give_to_images(1000 * BLOCK, spare_blocks=23) == 10, "nor below the least"


def test_a_growing_side_gets_a_stride_at_a_time() -> None:
    boundary = Boundary(STRIDES * 10 * BLOCK, BLOCK, 10, 10_000)
    blocks = boundary.blocks
    assert boundary.give_to_blocks(1, spare_bytes=50 * BLOCK) == blocks + 10
    assert boundary.give_to_blocks(1, spare_bytes=4 * BLOCK) == blocks + 14
    assert boundary.give_to_blocks(25, spare_bytes=50 * BLOCK) == blocks + 39


def test_blocks_never_become_more_than_sequences_can_use() -> None:
    boundary = Boundary(100 * BLOCK, BLOCK, 10, 80)
    assert boundary.give_to_blocks(50, spare_bytes=25 * BLOCK) == 80


def test_the_side_that_gained_last_refuses_for_a_while() -> None:
    boundary = Boundary(100 * BLOCK, BLOCK, 10, 1000)
    blocks = boundary.give_to_images(5 * BLOCK, spare_blocks=20)
    for _ in range(TENURE):
        assert boundary.give_to_blocks(5, spare_bytes=20 * BLOCK) == blocks
    assert boundary.give_to_blocks(5, spare_bytes=20 * BLOCK) == blocks + 5
    assert boundary.give_to_images(5 * BLOCK, spare_blocks=20) == blocks + 5


def test_memory_that_nobody_uses_is_given_at_once() -> None:
    boundary = Boundary(100 * BLOCK, BLOCK, 10, 1000)
    blocks = boundary.give_to_images(5 * BLOCK, spare_blocks=20)
    blocks = boundary.give_to_blocks(5, spare_bytes=boundary.image_bytes)
    assert blocks == 75
    assert boundary.give_to_images(5 * BLOCK, spare_blocks=blocks) == 70


def test_two_sides_in_need_take_long_turns() -> None:
    boundary = Boundary(10_000 * BLOCK, BLOCK, 10, 10_000)
    history = [boundary.blocks]
    for _ in range(1000):
        history.append(boundary.give_to_images(BLOCK, spare_blocks=1))
        history.append(boundary.give_to_blocks(1, spare_bytes=BLOCK))
    moves = [after - before for before, after in itertools.pairwise(history) if after != before]
    turns = sum(a != b for a, b in itertools.pairwise(moves))
    assert 10 < turns <= 1000 // TENURE, "neither starves, and the same memory moves back rarely"


class BoundaryMachine(RuleBasedStateMachine):
    """Asks from both sides, who hold more or less from ask to ask."""

    @initialize(
        memory=st.integers(1, 5000),
        block=st.integers(1, 100),
        least=st.floats(0, 1),
        more=st.integers(0, 200),
    )
    def start(self, memory: int, block: int, least: float, more: int) -> None:
        least_blocks = int(memory // block * least)
        self.boundary = Boundary(memory, block, least_blocks, least_blocks + more)

    @rule(lacking=st.integers(0, 6000), held=st.floats(0, 1))
    def images_ask(self, lacking: int, held: float) -> None:
        boundary = self.boundary
        before, held_blocks = boundary.blocks, int(boundary.blocks * held)
        after = boundary.give_to_images(lacking, before - held_blocks)
        assert held_blocks <= after == boundary.blocks <= before
        assert lacking or after == before

    @rule(lacking=st.integers(0, 100), held=st.floats(0, 1))
    def sequences_ask(self, lacking: int, held: float) -> None:
        boundary = self.boundary
        before, held_bytes = boundary.blocks, int(boundary.image_bytes * held)
        after = boundary.give_to_blocks(lacking, boundary.image_bytes - held_bytes)
        assert before <= after == boundary.blocks
        assert held_bytes <= boundary.image_bytes
        assert lacking or after == before

    @invariant()
    def totals_add_up(self) -> None:
        if boundary := getattr(self, "boundary", None):
            assert boundary.least_blocks <= boundary.blocks <= boundary.most_blocks
            taken = boundary.blocks * boundary.block_bytes
            assert boundary.image_bytes + taken == boundary.memory_bytes
            assert 0 <= boundary.image_bytes <= boundary.most_image_bytes


TestBoundaryMachine = BoundaryMachine.TestCase
TestBoundaryMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
