"""An image packed for the native step: A and B slice by slice, rows as they are.

A packed image is one stretch of bytes: the struct `Adapter`, its projections `[layers][4]`, then
the arrays that these point to. Its pointers count from the first byte until `relocate` makes them
addresses, so that an image is packed on any thread, and moved, by one copy. bf16, fp32 and int8
images stay in their dtype. This file knows an image's layout and the struct `Adapter`; it refuses
to know digests, and where images lie.
"""

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraplex.engine.images import (
    ALIGNMENT,
    ITEM_SIZE,
    PROJECTIONS,
    Entry,
    ImageError,
    ImageHeader,
    Slice,
)
from loraplex.engine.native.memory import Bytes, aligned
from loraplex.kernels.cpu import library as abi
from loraplex.kernels.cpu.library import Library

KINDS = {"bf16": abi.BF16, "fp32": abi.FP32, "int8": abi.INT8}
ORDER = tuple(PROJECTIONS)  # of the projections of a layer, as in `abi.h`
TABLE = aligned(ctypes.sizeof(abi.Adapter))  # where the projections begin
WORD = 8  # bytes of each field of a struct
SLICES = [3, 8, 13]  # where the slices of a `LoraProjection` begin, in words
POINTERS = [0, 1, *(start + field for start in SLICES for field in range(3))]  # a, scale; b, …

Size = tuple[int, tuple[int, ...]]  # of a projection: in, and out of its linears
Sizes = Mapping[str, Size]
Jobs = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """How images with one header are packed: what goes where, in bytes from both beginnings."""

    nbytes: int
    head: Bytes  # the structs
    matrices: Jobs  # [n, 6], see `Library.pack_all`
    rows: Jobs  # [n, 3], see `Library.copy_all`


def packed_bytes(header: ImageHeader, layers: int, sizes: Sizes, library: Library) -> int:
    """Bytes of an image once it is packed for a model of `layers` layers; raises `ImageError`."""
    return _layout(header, layers, tuple(sizes.items()), library).nbytes


def pack_image(
    header: ImageHeader, block: bytearray, layers: int, sizes: Sizes, library: Library
) -> Bytes:
    """Pack an image for a model of `layers` layers; the block is not kept.

    Nearly all of it runs without Python's lock, for a step may be running. Raises `ImageError` when
    the image does not fit the model or its own block.
    """
    layout = _layout(header, layers, tuple(sizes.items()), library)
    if len(block) != header.block_bytes:
        raise ImageError("the image's block is not as long as its header says")
    source, image = np.frombuffer(block, np.uint8), _zeroes(layout.nbytes)
    image[: len(layout.head)] = layout.head
    places = source.ctypes.data, image.ctypes.data
    library.pack_all(KINDS[header.dtype], layout.matrices, *places)
    library.copy_all(layout.rows, *places)
    return image


def relocate(image: Bytes, layers: int, distance: int) -> None:
    """Add `distance` to all pointers in a packed image that are not null."""
    head = image[: 2 * WORD].view(np.int64)
    head[1] += distance
    table = image[TABLE : TABLE + _table_bytes(layers)].view(np.int64)
    rows = table.reshape(layers * len(ORDER), -1)
    pointers = rows[:, POINTERS]
    rows[:, POINTERS] = np.where(pointers, pointers + distance, 0)


def _table_bytes(layers: int) -> int:
    """Bytes of a model's projections."""
    return layers * len(ORDER) * ctypes.sizeof(abi.LoraProjection)


def _arrays_at(layers: int) -> int:
    """Where the arrays begin."""
    return TABLE + aligned(_table_bytes(layers))


@functools.lru_cache(maxsize=64)
def _layout(
    header: ImageHeader, layers: int, sizes: tuple[tuple[str, Size], ...], library: Library
) -> Layout:
    """Adapters of one kind have equal headers: laid out once for all of them."""
    _check(header, layers, dict(sizes))
    return _Planner(header, layers, library).plan(header.entries)


class _Planner:
    def __init__(self, header: ImageHeader, layers: int, library: Library) -> None:
        self._kind, self._library = KINDS[header.dtype], library
        self._head = np.zeros(_arrays_at(layers), np.uint8)
        self._head[: 2 * WORD].view(np.int64)[:] = self._kind, TABLE
        projections = abi.LoraProjection * (layers * len(ORDER))
        self._projections = projections.from_buffer(self._head.data, TABLE)
        self._used = len(self._head)
        self._matrices: list[tuple[int, ...]] = []
        self._rows: list[tuple[int, int, int]] = []

    def plan(self, entries: tuple[Entry, ...]) -> Layout:
        for entry in entries:
            place = entry.layer * len(ORDER) + ORDER.index(entry.projection)
            self._projections[place] = self._projection(entry)
        nbytes = -(-self._used // ALIGNMENT) * ALIGNMENT
        matrices = np.array(self._matrices, np.int64).reshape(-1, 6)
        rows = np.array(self._rows, np.int64).reshape(-1, 3)
        return Layout(nbytes, self._head, matrices, rows)

    def _projection(self, entry: Entry) -> abi.LoraProjection:
        ranks = sum(part.rank for part in entry.slices)
        shape = (ranks, entry.in_features)
        found = abi.LoraProjection(ranks=ranks)
        if ranks:
            found.a = self._matrix(entry.a, shape, (entry.in_features, 1))
            found.scale = self._row(entry.scale, ranks)
        first = 0
        for place, part in enumerate(entry.slices):
            found.slice[place] = self._slice(part, first)
            first += part.rank
        return found

    def _slice(self, part: Slice, first_rank: int) -> abi.LoraSlice:
        out = part.out_features
        return abi.LoraSlice(
            b=self._matrix(part.b, (out, part.rank), (1, out)) if part.rank else None,
            gain=self._row(part.gain, out),
            bias=self._row(part.bias, out),
            rank=part.rank,
            first_rank=first_rank,
        )

    def _matrix(self, offset: int, shape: tuple[int, int], strides: tuple[int, int]) -> int:
        place = self._take(self._library.packed_bytes(self._kind, *shape))
        self._matrices.append((offset, *shape, *strides, place))
        return place

    def _row(self, offset: int, length: int) -> int | None:
        if offset < 0:
            return None
        place = self._take(4 * length)
        self._rows.append((offset, place, 4 * length))
        return place

    def _take(self, nbytes: int) -> int:
        place = self._used
        self._used += aligned(nbytes)
        return place


def _zeroes(nbytes: int) -> Bytes:
    """Bytes at an address that `Library.pack` can write to."""
    found = np.zeros(nbytes + abi.ALIGNMENT, np.uint8)
    start = -found.ctypes.data % abi.ALIGNMENT
    return found[start : start + nbytes]


def _check(header: ImageHeader, layers: int, sizes: Sizes) -> None:
    seen, block_bytes = set(), header.block_bytes
    for entry in header.entries:
        name = f"the image's {entry.projection} of layer {entry.layer}"
        if not _fits(entry, layers, sizes) or (entry.layer, entry.projection) in seen:
            raise ImageError(f"{name} does not fit the model")
        if not all(0 <= start <= end <= block_bytes for start, end in _extents(header, entry)):
            raise ImageError(f"{name} points outside the image's block")
        seen.add((entry.layer, entry.projection))


def _fits(entry: Entry, layers: int, sizes: Sizes) -> bool:
    if not 0 <= entry.layer < layers or entry.projection not in sizes:
        return False
    outs = tuple(part.out_features for part in entry.slices)
    ranks = all(0 <= part.rank <= abi.MAX_RANK for part in entry.slices)
    return (entry.in_features, outs) == sizes[entry.projection] and ranks


def _extents(header: ImageHeader, entry: Entry) -> list[tuple[int, int]]:
    """Start and end of all that the entry has in the block."""
    size, ranks = ITEM_SIZE[header.dtype], sum(part.rank for part in entry.slices)
    found = [(entry.a, ranks * entry.in_features * size), (entry.scale, 4 * ranks)] if ranks else []
    for part in entry.slices:
        if part.rank:
            found.append((part.b, part.rank * part.out_features * size))
        rows = (row for row in (part.gain, part.bias) if row >= 0)
        found += [(row, 4 * part.out_features) for row in rows]
    return [(start, start + length) for start, length in found]
