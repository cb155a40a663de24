"""A step's metadata as one int32 buffer of a fixed size, so that one copy brings it to the device.

The buffer holds four rows of ints (tokens, positions, slots of the KV cache, wanted rows), a plan
of SGMV for each dtype that an image may have, and the attention's work list, of which only the part
in use is copied. Rows beyond the step's own are inert: they have no slot, no image and no work.
This file knows ints; it refuses to know tensors and devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraplex.engine.batch import Batch
from loraplex.kernels.kv_cache import token_blocks
from loraplex.kernels.triton.attention_work import HEIGHT, SPLIT_KEYS, AttentionLayout
from loraplex.kernels.triton.sgmv_plan import SgmvLayout

Ints = NDArray[np.int32]
Places = Mapping[str, tuple[str, int]]  # an image's dtype, and its line in the tables, by digest

BUCKETS = (16, 32, 64, 128, 256)  # rows of a step that only decodes
KINDS = ("bf16", "fp32", "int8")  # dtypes of images
NO_SLOT = -1
PARTIAL_ROWS = 256  # room for cutting long contexts: enough items to keep a device busy
TALL_TILE_FROM = 128  # rows of a step from which SGMV takes 32 rows a tile


@dataclass(frozen=True)
class StepLayout:
    """What a step's metadata may hold, and where it lies."""

    rows: int
    block_size: int
    sgmv: SgmvLayout
    attention: AttentionLayout

    @property
    def attention_at(self) -> int:
        """Where the attention's work list begins: it is last, and of varying length."""
        return self.plan_at(KINDS[0]) + len(KINDS) * self.sgmv.size

    @property
    def size(self) -> int:
        """Ints of a buffer."""
        return self.attention_at + self.attention.size

    def plan_at(self, kind: str) -> int:
        """Where the plan for images of a dtype begins."""
        return 4 * self.rows + KINDS.index(kind) * self.sgmv.size

    def write(self, buffer: Ints, batch: Batch, places: Places, kinds: Sequence[str] = ()) -> int:
        """Write a step to `buffer` and return how many of its ints are in use.

        `kinds` have a plan even where the step has none of their images. Raises `ValueError` when
        the batch is more than the layout holds.
        """
        self._write_rows(buffer[: 4 * self.rows].reshape(4, self.rows), batch)
        segments = by_kind(batch, places)
        for kind in {*kinds, *segments}:
            at = self.plan_at(kind)
            self.sgmv.write(buffer[at : at + self.sgmv.size], segments.get(kind, ()))
        spans = [(span.start, span.end, span.context) for span in batch.spans]
        used = self.attention.write(buffer[self.attention_at :], spans, batch.block_tables)
        return self.attention_at + used

    def _write_rows(self, rows: Ints, batch: Batch) -> None:
        count, wanted = len(batch.token_ids), len(batch.wanted)
        if count > self.rows:
            raise ValueError(f"a step of {count} rows is more than the {self.rows} of its layout")
        rows[:] = 0
        rows[2, count:] = NO_SLOT
        rows[:3, :count] = batch.token_ids, batch.positions, _slots(batch, self.block_size)
        rows[3, :wanted] = batch.wanted


def by_kind(batch: Batch, places: Places) -> dict[str, list[tuple[int, int, int]]]:
    """The step's segments as (start, end, line of the tables), by their image's dtype.

    Raises `KeyError` for an image that has no place.
    """
    found: dict[str, list[tuple[int, int, int]]] = {}
    for segment in batch.segments:
        kind, line = places[segment.image]
        found.setdefault(kind, []).append((segment.start, segment.end, line))
    return found


def buckets_for(max_sequences: int) -> tuple[int, ...]:
    """The buckets that steps of up to `max_sequences` rows need; larger steps have none."""
    smaller = [rows for rows in BUCKETS if rows < max_sequences]
    return BUCKETS[: len(smaller) + 1]


def bucket_of(batch: Batch, buckets: Sequence[int]) -> int | None:
    """The bucket of a step in which every sequence has one row; None for any other step."""
    rows = len(batch.token_ids)
    if rows != len(batch.spans):
        return None
    return next((bucket for bucket in buckets if bucket >= rows), None)


@dataclass(frozen=True)
class Limits:
    """What an engine's steps may reach: sequences, tokens, tokens of one sequence, of a block."""

    sequences: int
    tokens: int
    length: int
    block_size: int


def make_layout(limits: Limits, group: int, bucket: int | None) -> StepLayout:
    """The layout of a bucket's steps, or of all others; `group` query heads share a KV head."""
    rows = limits.tokens if bucket is None else bucket
    sequences = min(limits.sequences, rows)
    blocks, pieces = (-(-limits.length // n) for n in (limits.block_size, SPLIT_KEYS))
    attention = AttentionLayout(
        group,
        sequences=sequences,
        prefill_rows=rows if bucket is None else 0,
        partial_rows=min(sequences * pieces, max(PARTIAL_ROWS, pieces)) if pieces > 1 else 0,
        blocks=sequences * blocks,
        height=max(HEIGHT, 1 << (group - 1).bit_length()),
    )
    tile_rows = 16 if rows < TALL_TILE_FROM else 32
    return StepLayout(rows, limits.block_size, SgmvLayout(rows, sequences, tile_rows), attention)


def _slots(batch: Batch, block_size: int) -> NDArray[np.integer]:
    positions = [batch.positions[s.start : s.end] for s in batch.spans]
    blocks, offsets = token_blocks(batch.block_tables, positions, block_size)
    return blocks * block_size + offsets
