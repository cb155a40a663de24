"""A step's metadata: buckets, inert rows, and where each part lies."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from loraplex.engine.batch import Batch, Segment, Span
from loraplex.engine.gpu.metadata import Metadata
from loraplex.engine.gpu.step_layout import (
    NO_SLOT,
    Limits,
    StepLayout,
    bucket_of,
    buckets_for,
    by_kind,
    make_layout,
)

LIMITS = Limits(sequences=40, tokens=96, length=2000, block_size=4)
PLACES = {"a": ("bf16", 5), "b": ("int8", 2), "c": ("bf16", 0)}


def batch(*rows: int, images: tuple[str | None, ...] = ()) -> Batch:
    """Sequences of some rows each, at position 6 and in blocks of 4; the last row is wanted."""
    ends = np.cumsum(rows)
    starts = ends - rows
    total = int(ends[-1])
    return Batch(
        np.arange(100, 100 + total, dtype=np.int32),
        np.concatenate([np.arange(6, 6 + n) for n in rows]).astype(np.int32),
        tuple(Span(int(s), int(e), int(6 + e - s)) for s, e in zip(starts, ends, strict=True)),
        tuple(np.arange(-(-(6 + n) // 4), dtype=np.int32) + 10 * i for i, n in enumerate(rows)),
        tuple(
            Segment(x, int(s), int(e))
            for x, s, e in zip(images, starts, ends, strict=False) if x is not None
        ),
        np.array([total - 1], np.int32),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sequences", "buckets"),
    [
        (1, (16,)),
        (16, (16,)),
        (17, (16, 32)),
        (256, (16, 32, 64, 128, 256)),
        (300, (16, 32, 64, 128, 256)),
    ],
)
def test_buckets_for(sequences: int, buckets: tuple[int, ...]) -> None:
    assert buckets_for(sequences) == buckets


def test_bucket_of() -> None:
    assert bucket_of(batch(1), (16, 32)) == 16
    assert bucket_of(batch(*[1] * 17), (16, 32)) == 32
    assert bucket_of(batch(*[1] * 33), (16, 32)) is None
    assert bucket_of(batch(1, 2), (16, 32)) is None


def written(layout: StepLayout, step: Batch) -> tuple[np.ndarray, int]:
    buffer = np.full(layout.size, -77, np.int32)
    return buffer, layout.write(buffer, step, PLACES)


def test_rows_of_a_bucket() -> None:
    layout = make_layout(LIMITS, group=2, bucket=16)
    buffer, used = written(layout, batch(1, 1, 1))
    rows = buffer[:64].reshape(4, 16)
    assert rows[0].tolist() == [100, 101, 102] + [0] * 13
    assert rows[1].tolist() == [6] * 3 + [0] * 13
    assert rows[2].tolist() == [6, 46, 86] + [NO_SLOT] * 13
    assert rows[3].tolist() == [2] + [0] * 15
    work = buffer[layout.attention_at :]
    assert work[:4].tolist() == [3, 0, 0, 0], "inert rows have no attention"
    assert used == layout.attention_at + layout.attention.tables_at + 6
    assert (buffer[used:] == -77).all()


def test_plans_by_dtype_of_image() -> None:
    layout = make_layout(LIMITS, group=2, bucket=None)
    step = batch(3, 20, 2, 5, images=(None, "a", "b", "c"))
    assert by_kind(step, PLACES) == {"bf16": [(3, 23, 5), (25, 30, 0)], "int8": [(23, 25, 2)]}
    buffer, _ = written(layout, step)
    counts = {kind: buffer[layout.plan_at(kind)] for kind in ("bf16", "int8", "fp32")}
    assert counts == {"bf16": 3, "int8": 1, "fp32": -77}
    assert buffer[layout.attention_at] == 5, "20 rows of two heads are two items"


def test_a_plan_without_images() -> None:
    """As it is rehearsed: what an earlier step left there is no plan of this one."""
    layout, step = make_layout(LIMITS, group=2, bucket=16), batch(1, 1)
    buffer = np.full(layout.size, 7, np.int32)
    layout.write(buffer, step, PLACES, ("bf16",))
    assert (buffer[layout.plan_at("bf16")], buffer[layout.plan_at("int8")]) == (0, 7)


def test_an_image_may_begin_inside_a_span_and_have_several_segments() -> None:
    layout = make_layout(LIMITS, group=2, bucket=None)
    segments = (Segment("a", 2, 5), Segment("a", 7, 9), Segment("c", 9, 11))
    wanted = np.array([3, 4, 8, 10], np.int32)
    buffer, _ = written(layout, replace(batch(5, 4, 2), segments=segments, wanted=wanted))
    plan = buffer[layout.plan_at("bf16") :]
    assert plan[0] == 2, "rows of one image share tiles"
    assert plan[layout.sgmv.permutation :][:7].tolist() == [9, 10, 2, 3, 4, 7, 8]
    assert buffer[3 * layout.rows :][:5].tolist() == [3, 4, 8, 10, 0]


def test_image_that_has_no_place() -> None:
    with pytest.raises(KeyError):
        written(make_layout(LIMITS, 2, 16), batch(1, images=("other",)))


def test_a_step_that_is_too_large() -> None:
    with pytest.raises(ValueError, match="17 rows"):
        written(make_layout(LIMITS, 2, 16), batch(*[1] * 17))


def test_a_decode_bucket_has_room_for_cut_contexts_but_none_for_prefills() -> None:
    long = make_layout(LIMITS, group=4, bucket=32).attention
    assert (long.prefill_rows, long.partial_rows) == (0, 32 * 4)
    short = make_layout(Limits(40, 96, 300, 4), group=4, bucket=32).attention
    assert (short.partial_rows, short.merges) == (0, 0)


def test_metadata_copies_what_is_in_use() -> None:
    metadata = Metadata(8, torch.device("cpu"))

    def write(value: int, used: int) -> None:
        def fill(buffer: np.ndarray) -> int:
            buffer[:] = value
            return used

        metadata.send(fill)

    write(1, 8)
    write(2, 3)
    write(3, 1)
    assert metadata.ints.tolist() == [3, 2, 2, 1, 1, 1, 1, 1]
