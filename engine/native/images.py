"""An image made resident for the native step: A and B packed slice by slice, rows as they are.

bf16, fp32 and int8 images stay in their dtype. This file knows an image's layout and the struct
`Adapter`; it refuses to know digests, and how much room there is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from loraplex.engine.images import ITEM_SIZE, PROJECTIONS, Entry, ImageError, ImageHeader, Slice
from loraplex.engine.native.arena import Arena, aligned
from loraplex.kernels.cpu import library as abi
from loraplex.kernels.cpu.library import Library

KINDS = {"bf16": abi.BF16, "fp32": abi.FP32, "int8": abi.INT8}
ORDER = tuple(PROJECTIONS)  # of the projections of a layer, as in `abi.h`

Sizes = Mapping[str, tuple[int, tuple[int, ...]]]  # of a projection: in, and out of its linears


@dataclass(frozen=True)
class PackedImage:
    """A resident image; `struct` points into what the arena holds."""

    struct: abi.Adapter
    arena: Arena


def resident_bytes(header: ImageHeader, library: Library) -> int:
    """Bytes of memory that `pack_image` takes for an image."""
    kind = KINDS[header.dtype]
    total = 0
    for entry in header.entries:
        ranks = sum(part.rank for part in entry.slices)
        total += aligned(library.packed_bytes(kind, ranks, entry.in_features)) if ranks else 0
        total += aligned(4 * ranks)
        for part in entry.slices:
            out = part.out_features
            total += aligned(library.packed_bytes(kind, out, part.rank)) if part.rank else 0
            total += sum(aligned(4 * out) for row in (part.gain, part.bias) if row >= 0)
    return total


def pack_image(
    header: ImageHeader, block: bytearray, layers: int, sizes: Sizes, library: Library
) -> PackedImage:
    """Pack an image for a model of `layers` layers; the block is not kept.

    Raises `ImageError` when the image does not fit the model or its own block.
    """
    _check(header, len(block), layers, sizes)
    packer = _Packer(header, block, library)
    projections = (abi.LoraProjection * (layers * len(ORDER)))()
    for entry in header.entries:
        place = entry.layer * len(ORDER) + ORDER.index(entry.projection)
        projections[place] = packer.projection(entry)
    return PackedImage(abi.Adapter(KINDS[header.dtype], projections), packer.arena)


class _Packer:
    def __init__(self, header: ImageHeader, block: bytearray, library: Library) -> None:
        self._kind, self._library = KINDS[header.dtype], library
        self._block = np.frombuffer(block, np.uint8)
        self.arena = Arena(resident_bytes(header, library))

    def projection(self, entry: Entry) -> abi.LoraProjection:
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
        address = self.arena.take(self._library.packed_bytes(self._kind, *shape))
        source = self._block.ctypes.data + offset
        self._library.pack(self._kind, source, shape, strides, address)
        return address

    def _row(self, offset: int, length: int) -> int | None:
        if offset < 0:
            return None
        return self.arena.put(self._block[offset : offset + 4 * length])


def _check(header: ImageHeader, block_bytes: int, layers: int, sizes: Sizes) -> None:
    seen = set()
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
