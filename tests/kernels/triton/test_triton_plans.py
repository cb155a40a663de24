"""Plans of SGMV and of attention: nothing is left out or done twice, and nothing overflows."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.kernels.triton.attention_work import (
    ITEM,
    MERGE,
    SPLIT_KEYS,
    WORK_HEAD,
    AttentionLayout,
    Span,
)
from loraplex.kernels.triton.ragged import Ints
from loraplex.kernels.triton.sgmv_plan import (
    PLAN_HEAD,
    TILE,
    Segment,
    SgmvLayout,
    no_record,
    record,
)

BLOCK = 16


@st.composite
def owned_rows(draw: st.DrawFn) -> list[Segment]:
    """Disjoint segments with gaps between them, in any order."""
    start, segments = 0, []
    for _ in range(draw(st.integers(0, 12))):
        start += draw(st.integers(0, 3))
        end = start + draw(st.integers(1, 40))
        segments.append((start, end, draw(st.integers(0, 5))))
        start = end
    return draw(st.permutations(segments))


@given(owned_rows(), st.sampled_from([1, 16, 32]))
def test_each_row_is_in_one_tile_of_its_slot(segments: list[Segment], tile_rows: int) -> None:
    owner = {row: slot for start, end, slot in segments for row in range(start, end)}
    layout = SgmvLayout(len(owner), len(set(owner.values())), tile_rows)
    plan = np.full(layout.size, -7, np.int32)
    count = layout.write(plan, segments)
    assert count == plan[0] <= layout.tiles
    found = []
    for first, rows, slot, _ in plan[PLAN_HEAD:][: count * TILE].reshape(-1, TILE):
        assert 1 <= rows <= tile_rows
        found += [(int(row), int(slot)) for row in plan[layout.permutation :][first : first + rows]]
    assert sorted(found) == sorted(owner.items()) and len(found) == len(owner)


@pytest.mark.parametrize("segments", [[(0, 9, 0)], [(0, 2, 0), (2, 3, 1), (3, 4, 2)]])
def test_too_much_for_a_plan_is_refused(segments: list[Segment]) -> None:
    layout = SgmvLayout(8, 2)
    with pytest.raises(ValueError, match="are more than the plan's 8 rows of 2 images"):
        layout.write(np.zeros(layout.size, np.int32), segments)


def test_a_record_counts_in_units_of_the_alignment() -> None:
    line = record(1280, 0, 256, [(3, 128, -1, 384), (5, 512, 640, -1)])
    assert line.tolist() == [10, 12, 8, 0, 3, 11, -1, 13, 3, 5, 14, 15, -1, 0, 0, -1, -1, -1]
    assert no_record().tolist() == [0, 0, 0, *[0, 0, -1, -1, -1] * 3]
    with pytest.raises(ValueError, match="byte 1284 of the arena"):
        record(1280, 4, 0, [])


class Sequences:
    """Sequences of a step: `(rows, context)` each, with tables of numbered blocks."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        ends = np.cumsum([0, *(rows for rows, _ in shapes)]).tolist()
        self.spans: list[Span] = [
            (end, end + rows, context)
            for end, (rows, context) in zip(ends, shapes, strict=False)
        ]  # fmt: skip
        lengths = [-(-context // BLOCK) for _, context in shapes]
        numbers = np.arange(sum(lengths), dtype=np.int32) + 1000
        self.tables = np.split(numbers, np.cumsum(lengths)[:-1]) if lengths else []

    def layout(self, group: int, partial_rows: int, height: int) -> AttentionLayout:
        """The least that holds them."""
        prefill = sum(e - s for s, e, _ in self.spans if e - s > height // group)
        blocks = sum(map(len, self.tables))
        return AttentionLayout(group, len(self.spans), prefill, partial_rows, blocks, height)


def work_of(layout: AttentionLayout, sequences: Sequences) -> tuple[Ints, Ints, Ints]:
    """Items, merges and block tables of a work list; what it does not use is poisoned."""
    buffer = np.full(layout.size, -7, np.int32)
    used = layout.write(buffer, sequences.spans, sequences.tables)
    items, merges = buffer[:2]
    assert items <= layout.items and merges <= layout.merges and used <= layout.size
    return (
        buffer[WORK_HEAD:][: items * ITEM].reshape(-1, ITEM),
        buffer[layout.merges_at :][: merges * MERGE].reshape(-1, MERGE),
        buffer[layout.tables_at : used],
    )


SHAPES = st.lists(
    st.tuples(st.integers(1, 70), st.integers(0, 2500)).map(lambda s: (s[0], s[0] + s[1])),
    max_size=6,
)


@given(SHAPES, st.sampled_from([1, 3, 4, 16]), st.integers(0, 40), st.sampled_from([16, 32]))
def test_each_row_sees_its_keys_once(
    shapes: list[tuple[int, int]], group: int, partial_rows: int, height: int
) -> None:
    sequences = Sequences(shapes)
    layout = sequences.layout(group, partial_rows, height)
    items, merges, tables = work_of(layout, sequences)
    whole: dict[int, int] = {}  # keys of rows that an item finishes
    pieces: dict[int, list[tuple[int, int, int]]] = {}  # partial row, keys, of those that none does
    for table, first, rows, begin, end, position, partial, _ in items.tolist():
        owner = next(i for i, (s, e, _) in enumerate(sequences.spans) if s <= first < e)
        start, stop, context = sequences.spans[owner]
        assert first + rows <= stop and rows * group <= height
        assert position == context - (stop - first)
        assert tables[table : table + len(sequences.tables[owner])].tolist() == (
            sequences.tables[owner].tolist()
        )
        for row in range(first, first + rows):
            if partial < 0:
                assert begin == 0 and end == position + rows and row not in whole
                whole[row] = end
            else:
                assert rows == stop - start
                pieces.setdefault(row, []).append((partial + row - first, begin, end))
    assert whole.keys() | pieces.keys() == set(range(sum(rows for rows, _ in shapes)))
    check_merges(merges, pieces, partial_rows)


def check_merges(
    merges: Ints, pieces: dict[int, list[tuple[int, int, int]]], partial_rows: int
) -> None:
    """Each row of `pieces` is merged once, from pieces that follow each other."""
    assert sorted(merges[:, 0].tolist()) == sorted(pieces)
    for row, first, count, distance in merges.tolist():
        places = [first + number * distance for number in range(count)]
        assert [place for place, _, _ in pieces[row]] == places
        edges = [(begin, end) for _, begin, end in pieces[row]]
        assert [begin for begin, _ in edges] == [SPLIT_KEYS * i for i in range(count)]
        assert [end for _, end in edges[:-1]] == [begin for begin, _ in edges[1:]]
    used = [place for row in pieces.values() for place, _, _ in row]
    assert len(used) == len(set(used)) and max(used, default=-1) < partial_rows


def test_the_longest_context_is_cut_first() -> None:
    sequences = Sequences([(1, 1000), (1, 2000), (1, 1500)])
    _, merges, _ = work_of(sequences.layout(4, 8, 32), sequences)
    assert merges.tolist() == [[1, 0, 4, 1], [2, 4, 3, 1]]


def test_too_much_work_is_refused() -> None:
    layout = AttentionLayout(4, 2, 16, 0, 10)
    for shapes in ([(1, 1)] * 3, [(17, 17)], [(1, 161)]):
        sequences = Sequences(shapes)
        with pytest.raises(ValueError, match=r"are more than \(2, 16, 10\)"):
            layout.write(np.zeros(layout.size, np.int32), sequences.spans, sequences.tables)


@pytest.mark.parametrize(("group", "height"), [(48, 32), (4, 8), (4, 48)])
def test_a_height_that_no_tile_has_is_refused(group: int, height: int) -> None:
    with pytest.raises(ValueError, match=f"the height is {height}; {group} heads"):
        AttentionLayout(group, 1, 0, 0, 1, height)
