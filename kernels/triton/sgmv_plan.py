"""Which rows of a step run under which image, as one int32 buffer for `sgmv`.

A step's plan is a count, a table of tiles (first place, rows, slot) and a permutation that brings
the rows of one image together; rows of the bare base are not in it. A slot is a line of a table
that lives on the device and says, for one projection of one layer, where an image's arrays lie in
the arena. So a plan serves all layers, and has the same size whatever the step holds.

This file knows ints; it refuses to know tensors, devices and what is in the arena.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loraplex.kernels.triton.ragged import Ints, before, columns, runs

Segment = tuple[int, int, int]  # rows [start, end) and their slot
Slice = tuple[int, int, int, int]  # rank; bytes from the image's block to B, gain, bias, or -1

ALIGNMENT = 128  # bytes; the unit of all places in the arena, so that an int32 reaches 256 GiB
MAX_SLICES = 3
RECORD_HEAD = 3  # A, scale, Σ ranks
RECORD_SLICE = 5  # first rank, rank, B, gain, bias
RECORD = RECORD_HEAD + MAX_SLICES * RECORD_SLICE
PLAN_HEAD = 4  # the count of tiles; the rest keeps the tiles aligned
TILE = 4  # first place in the permutation, rows, slot, nothing


@dataclass(frozen=True)
class SgmvLayout:
    """What a plan may hold: `rows` rows of at most `images` images, in tiles of `tile_rows`."""

    rows: int
    images: int
    tile_rows: int = 16

    @property
    def tiles(self) -> int:
        """The most tiles that a step can make."""
        images = min(self.images, self.rows)
        return images + (self.rows - images) // self.tile_rows

    @property
    def permutation(self) -> int:
        """Where the permutation begins."""
        return PLAN_HEAD + self.tiles * TILE

    @property
    def size(self) -> int:
        """Ints of a plan."""
        return self.permutation + self.rows

    def write(self, buffer: Ints, segments: Sequence[Segment]) -> int:
        """Write a step's plan to `buffer` `[size]` and return its count of tiles.

        Segments are disjoint and in any order; several may name one slot. Raises `ValueError` when
        they hold more rows or images than the layout does.
        """
        rows, slots, counts = _by_slot(segments)
        if len(rows) > self.rows or len(slots) > self.images:
            raise ValueError(
                f"{len(rows)} rows of {len(slots)} images are more than the plan's "
                f"{self.rows} rows of {self.images} images"
            )
        tiles = _tiles(slots, counts, self.tile_rows)
        buffer[0] = len(tiles)
        buffer[PLAN_HEAD : PLAN_HEAD + tiles.size] = tiles.ravel()
        buffer[self.permutation : self.permutation + len(rows)] = rows
        return len(tiles)


def _by_slot(segments: Sequence[Segment]) -> tuple[Ints, Ints, Ints]:
    """Rows sorted by slot, the slots, and how many rows each has."""
    start, end, slot = np.array(segments, np.int32).reshape(-1, 3).T
    segment, number = runs(end - start)
    owner = slot[segment]
    slots, counts = np.unique(owner, return_counts=True)
    rows: Ints = (start[segment] + number)[np.argsort(owner, kind="stable")]
    return rows, slots, counts.astype(np.int32)


def _tiles(slots: Ints, counts: Ints, tile_rows: int) -> Ints:
    """`[tiles, TILE]`, no tile with rows of two slots."""
    image, number = runs(-(-counts // tile_rows))
    done = number * tile_rows
    rows = np.minimum(tile_rows, counts[image] - done)
    return columns(len(image), TILE, before(counts)[image] + done, rows, slots[image])


def record(block: int, a: int, scale: int, slices: Sequence[Slice]) -> Ints:
    """An image's line `[RECORD]` for one projection, its block being at byte `block` of the arena.

    `a` and `scale` are bytes into the block, as are the places in `slices`. Raises `ValueError`
    for a place that is not aligned.
    """
    line = no_record()
    line[:RECORD_HEAD] = _place(block, a), _place(block, scale), sum(s[0] for s in slices)
    first = 0
    for number, (rank, *places) in enumerate(slices):
        at = RECORD_HEAD + number * RECORD_SLICE
        line[at : at + RECORD_SLICE] = first, rank, *(_place(block, p) for p in places)
        first += rank
    return line


def no_record() -> Ints:
    """The line of an image that does not touch a projection."""
    line = np.full(RECORD, -1, np.int32)
    line[:RECORD_HEAD] = 0
    line[RECORD_HEAD::RECORD_SLICE] = line[RECORD_HEAD + 1 :: RECORD_SLICE] = 0
    return line


def _place(block: int, offset: int) -> int:
    if offset < 0:
        return -1
    place, rest = divmod(block + offset, ALIGNMENT)
    if rest:
        raise ValueError(f"byte {block + offset} of the arena is not a multiple of {ALIGNMENT}")
    return place
