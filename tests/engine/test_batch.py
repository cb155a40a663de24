"""`engine.batch`: the order of rows, spans, segments and wanted rows, on ints alone."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from loraplex.engine.batch import Segment, Span, build


@dataclass
class Tokens:
    token_ids: list[int]
    block_table: list[int] = field(default_factory=lambda: [7, 3, 9, 1])
    image: str | None = None


@dataclass
class Part:
    sequence: Tokens
    start: int
    count: int


def test_one_prefill() -> None:
    batch, order = build([Part(Tokens([5, 6, 7, 8, 9]), 0, 5)], block_size=4)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4]
    assert batch.spans == (Span(0, 5, 5),)
    assert [table.tolist() for table in batch.block_tables] == [[7, 3]]
    assert batch.segments == () and batch.wanted.tolist() == [4] and len(order) == 1


def test_part_of_a_prefill_wants_nothing() -> None:
    batch, _ = build([Part(Tokens([5, 6, 7, 8, 9]), 1, 3)], block_size=4)
    assert batch.positions.tolist() == [1, 2, 3] and batch.spans == (Span(0, 3, 4),)
    assert [table.tolist() for table in batch.block_tables] == [[7]]
    assert batch.wanted.tolist() == []


def test_images_are_neighbours_and_bases_first() -> None:
    images = ["b", None, "a", "b", None, "a"]
    parts = [Part(Tokens([10 * i, 10 * i + 1], image=d), 0, 2) for i, d in enumerate(images)]
    batch, order = build(parts, block_size=4)
    assert [parts.index(part) for part in order] == [1, 4, 2, 5, 0, 3]
    assert batch.segments == (Segment("a", 4, 8), Segment("b", 8, 12))
    assert batch.token_ids.tolist() == [10, 11, 40, 41, 20, 21, 50, 51, 0, 1, 30, 31]


def test_wanted_rows_are_in_the_order_of_parts() -> None:
    decode, chunk = Tokens([1, 2, 3], image="a"), Tokens([4, 5, 6, 7])
    batch, order = build([Part(decode, 2, 1), Part(chunk, 0, 2), Part(chunk, 2, 2)], block_size=4)
    assert batch.wanted.tolist() == [3, 4]
    assert [p.count for p in order] == [2, 2, 1]
    assert batch.spans == (Span(0, 2, 2), Span(2, 4, 4), Span(4, 5, 3))


@pytest.mark.parametrize("array", ["token_ids", "positions", "wanted"])
def test_arrays_are_int32(array: str) -> None:
    batch, _ = build([Part(Tokens([1, 2]), 0, 1)], block_size=4)
    assert getattr(batch, array).dtype == np.int32
    assert batch.block_tables[0].dtype == np.int32
