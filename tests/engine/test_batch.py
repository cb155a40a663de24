"""`engine.batch`: the order of rows, spans, segments and wanted rows, on ints alone."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.batch import Batch, Segment, Span, build


@dataclass
class Tokens:
    token_ids: list[int]
    block_table: list[int] = field(default_factory=lambda: [7, 3, 9, 1])
    image: str | None = None
    drafts: list[int] = field(default_factory=list)
    adapter_start: int | None = 0


@dataclass
class Part:
    sequence: Tokens
    start: int
    count: int
    wanted: int = 1


def test_one_prefill() -> None:
    batch, order = build([Part(Tokens([5, 6, 7, 8, 9]), 0, 5)], block_size=4)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4]
    assert batch.spans == (Span(0, 5, 5),)
    assert [table.tolist() for table in batch.block_tables] == [[7, 3]]
    assert batch.segments == () and batch.wanted.tolist() == [4] and len(order) == 1


def test_part_of_a_prefill_wants_nothing() -> None:
    batch, _ = build([Part(Tokens([5, 6, 7, 8, 9]), 1, 3, wanted=0)], block_size=4)
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
    decode, prompt = Tokens([1, 2, 3], image="a"), Tokens([4, 5, 6, 7])
    parts = [Part(decode, 2, 1), Part(prompt, 0, 2, wanted=0), Part(prompt, 2, 2, wanted=2)]
    batch, order = build(parts, block_size=4)
    assert batch.wanted.tolist() == [2, 3, 4]
    assert [p.count for p in order] == [2, 2, 1]
    assert batch.spans == (Span(0, 2, 2), Span(2, 4, 4), Span(4, 5, 3))


def test_drafts_follow_the_tokens() -> None:
    sequence = Tokens([1, 2, 3], drafts=[40, 50, 60])
    batch, _ = build([Part(sequence, 2, 3, wanted=3)], block_size=4)
    assert batch.token_ids.tolist() == [3, 40, 50]
    assert batch.positions.tolist() == [2, 3, 4] and batch.spans == (Span(0, 3, 5),)
    assert [table.tolist() for table in batch.block_tables] == [[7, 3]]
    assert batch.wanted.tolist() == [0, 1, 2]


def test_an_adapter_begins_inside_a_sequence() -> None:
    ids = list(range(8))
    parts = [
        Part(Tokens(ids, image="a", adapter_start=5), 0, 8),
        Part(Tokens(ids, image="a", adapter_start=5), 5, 3),
        Part(Tokens(ids, image="a", adapter_start=7), 2, 6),
        Part(Tokens(ids, image="a", adapter_start=5), 0, 4),
        Part(Tokens(ids, image="a", adapter_start=None), 6, 2),
    ]
    batch, order = build(parts, block_size=4)
    assert [parts.index(part) for part in order] == [3, 4, 0, 1, 2]
    assert batch.segments == (Segment("a", 11, 17), Segment("a", 22, 23))


@pytest.mark.parametrize("array", ["token_ids", "positions", "wanted"])
def test_arrays_are_int32(array: str) -> None:
    batch, _ = build([Part(Tokens([1, 2]), 0, 1)], block_size=4)
    assert getattr(batch, array).dtype == np.int32
    assert batch.block_tables[0].dtype == np.int32


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """Any part of any sequence, whose adapter begins anywhere."""
    known, drafted = draw(st.integers(1, 12)), draw(st.integers(0, 3))
    ids = draw(st.lists(st.integers(0, 99), min_size=known + drafted, max_size=known + drafted))
    start = draw(st.integers(0, known - 1))
    count = draw(st.integers(1, known + drafted - start))
    sequence = Tokens(
        ids[:known],
        draw(st.permutations(range(5))),
        draw(st.sampled_from([None, "a", "b"])),
        ids[known:],
        draw(st.none() | st.just(0) | st.integers(0, 16)),
    )
    return Part(sequence, start, count, draw(st.integers(0, count)))


def image_at(sequence: Tokens, position: int) -> str | None:
    start = sequence.adapter_start
    return None if start is None or position < start else sequence.image


def images_of_rows(batch: Batch) -> list[str | None]:
    images: list[str | None] = [None] * len(batch.token_ids)
    for image, start, end in batch.segments:
        images[start:end] = [image] * (end - start)
    return images


@given(st.lists(parts(), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_each_row_is_its_token_under_its_image(scheduled: list[Part]) -> None:
    batch, order = build(scheduled, block_size=4)
    rows = [(part, at) for part in order for at in range(part.start, part.start + part.count)]
    assert sorted(map(id, order)) == sorted(map(id, scheduled))
    assert batch.positions.tolist() == [at for _, at in rows]
    assert batch.token_ids.tolist() == [
        (part.sequence.token_ids + part.sequence.drafts)[at] for part, at in rows
    ]
    assert images_of_rows(batch) == [image_at(part.sequence, at) for part, at in rows]
    assert batch.wanted.tolist() == [
        row for row, (part, at) in enumerate(rows) if at >= part.start + part.count - part.wanted
    ]
    for part, span, table in zip(order, batch.spans, batch.block_tables, strict=True):
        assert (span.end - span.start, span.context) == (part.count, part.start + part.count)
        assert table.tolist() == part.sequence.block_table[: -(-span.context // 4)]


@given(st.lists(parts(), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_segments_are_sorted_apart_and_as_few_as_can_be(scheduled: list[Part]) -> None:
    segments = build(scheduled, block_size=4)[0].segments
    assert all(segment.start < segment.end for segment in segments)
    for before, after in pairwise(segments):
        assert before.end <= after.start
        assert before.end < after.start or before.image != after.image
