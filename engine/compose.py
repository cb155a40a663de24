"""Composes images of one base into one whose delta is the weighted sum of theirs.

The rows of A and Bᵀ are set one after another along the rank and the weights multiply the fp32 rows
of scales, so nothing is quantised anew (PEFT calls this combination "cat"); bias rows are added.
This file knows an image's layout and arithmetic. It refuses to know files, and who asks.
"""

import math
from collections.abc import Iterable, Sequence
from mmap import mmap
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loraplex.engine.images import ALIGNMENT, ITEM_SIZE, Entry, ImageError, ImageHeader, Slice
from loraplex.engine.protocol import Part

MAX_PARTS = 16

Block = bytearray | mmap  # writable memory
Key = tuple[int, str]  # layer and projection
Shape = tuple[int, tuple[int, ...]]  # in_features, and out_features of the slices


class CompositionError(ImageError):
    """These images cannot be composed."""


class Component(NamedTuple):
    """An image in a composition, and the factor by which its delta counts."""

    digest: str
    weight: float
    header: ImageHeader


def merge(parts: Iterable[Part]) -> list[Part]:
    """The parts in the order of their digests, each image once; raises `CompositionError`."""
    weights: dict[str, float] = {}
    for part in sorted((part.image, part.weight) for part in parts):
        weights[part[0]] = weights.get(part[0], 0.0) + part[1]
    if len(weights) > MAX_PARTS:
        raise CompositionError(
            f"{len(weights)} images are too many to compose: at most {MAX_PARTS}"
        )
    return [Part(image, weight) for image, weight in weights.items()]


def compose_header(components: Sequence[Component]) -> ImageHeader:
    """The header of a composition; raises `CompositionError` for one that cannot be."""
    base, dtype = components[0].header.base, components[0].header.dtype
    shapes: dict[Key, Shape] = {}
    for component in components:
        _check(component, base, dtype, shapes)
    layout = _Layout(ITEM_SIZE[dtype])
    found = [_by_key(component.header) for component in components]
    keys = sorted({key for entries in found for key in entries})
    entries = tuple(layout.entry([e[key] for e in found if key in e]) for key in keys)
    return ImageHeader(base, dtype, layout.end, entries)


def compose(
    components: Sequence[Component], blocks: Sequence[Block]
) -> tuple[ImageHeader, bytearray]:
    """Compose images, given their blocks; raises `CompositionError` for what cannot be composed."""
    header = compose_header(components)
    target = bytearray(header.block_bytes)
    found = [_by_key(component.header) for component in components]
    weights = [component.weight for component in components]
    for entry in header.entries:
        key = (entry.layer, entry.projection)
        members = [
            _Member(entries[key], block, weight)
            for entries, block, weight in zip(found, blocks, weights, strict=True)
            if key in entries
        ]
        _fill(entry, target, members, ITEM_SIZE[header.dtype])
    return header, target


class _Member(NamedTuple):
    """An image's part in one projection."""

    entry: Entry
    block: Block
    weight: float


class _Layout:
    """Lays the arrays of a composition out, each on a boundary of `ALIGNMENT`."""

    def __init__(self, item: int) -> None:
        self._item, self.end = item, 0

    def entry(self, members: Sequence[Entry]) -> Entry:
        """The entry of one projection that these entries of it compose."""
        first = members[0]
        ranks = [sum(e.slices[i].rank for e in members) for i in range(len(first.slices))]
        a = self._place(sum(ranks) * first.in_features * self._item)
        scale = self._place(sum(ranks) * 4)
        slices = []
        for i, rank in enumerate(ranks):
            out = first.slices[i].out_features
            b = self._place(rank * out * self._item) if rank else -1
            has_bias = any(e.slices[i].bias >= 0 for e in members)
            slices.append(Slice(rank, out, b, -1, self._place(out * 4) if has_bias else -1))
        return Entry(first.layer, first.projection, first.in_features, a, scale, tuple(slices))

    def _place(self, size: int) -> int:
        offset = self.end
        self.end += -(-size // ALIGNMENT) * ALIGNMENT
        return offset


def _check(component: Component, base: str, dtype: str, shapes: dict[Key, Shape]) -> None:
    """Check one part; `shapes` are those of the projections of the parts before it."""
    header, name = component.header, f"image {component.digest[:12]}… cannot be composed"
    if not math.isfinite(component.weight):
        raise CompositionError(f"{name}: its weight is {component.weight}")
    if header.base != base:
        raise CompositionError(f"{name}: it was compiled for another base than the other parts")
    if header.dtype != dtype:
        raise CompositionError(f"{name}: its dtype is {header.dtype}, another part's {dtype}")
    if any(part.gain >= 0 for entry in header.entries for part in entry.slices):
        raise CompositionError(f"{name}: it is a DoRA adapter, whose gains do not add up")
    if header.invocation:
        raise CompositionError(f"{name}: it is an activated adapter, which only some tokens have")
    for key, entry in _by_key(header).items():
        shape = entry.in_features, tuple(part.out_features for part in entry.slices)
        if shapes.setdefault(key, shape) != shape:
            raise CompositionError(f"{name}: its sizes are not those of the other parts")


def _by_key(header: ImageHeader) -> dict[Key, Entry]:
    return {(entry.layer, entry.projection): entry for entry in header.entries}


def _fill(entry: Entry, target: bytearray, members: Sequence[_Member], item: int) -> None:
    """Write the arrays of one projection."""
    row = 0
    for i, part in enumerate(entry.slices):
        b_row, bias = 0, np.zeros(part.out_features)
        for member in members:
            theirs = member.entry
            rank, first = theirs.slices[i].rank, sum(s.rank for s in theirs.slices[:i])
            a, width = theirs.a + first * entry.in_features * item, entry.in_features * item
            _copy(target, entry.a + row * width, member.block, a, rank * width)
            scale = _floats(member.block, theirs.scale + 4 * first, rank)
            _write(target, entry.scale + 4 * row, scale.astype(np.float64) * member.weight)
            width = part.out_features * item
            _copy(target, part.b + b_row * width, member.block, theirs.slices[i].b, rank * width)
            if theirs.slices[i].bias >= 0:
                bias += _floats(member.block, theirs.slices[i].bias, len(bias)) * member.weight
            row, b_row = row + rank, b_row + rank
        if part.bias >= 0:
            _write(target, part.bias, bias)


def _copy(target: bytearray, at: int, source: Block, start: int, size: int) -> None:
    if size:
        target[at : at + size] = _view(source, start, size)


def _floats(block: Block, offset: int, count: int) -> NDArray[np.float32]:
    return np.frombuffer(_view(block, offset, 4 * count), np.float32)


def _view(block: Block, offset: int, size: int) -> memoryview:
    if offset < 0 or offset + size > len(block):
        raise ImageError("the image's header points outside its block")
    return memoryview(block)[offset : offset + size]


def _write(target: bytearray, offset: int, values: NDArray[np.float64]) -> None:
    with np.errstate(over="ignore"):
        row = values.astype(np.float32)
    if not np.isfinite(row).all():
        raise CompositionError("a composition's weights are too large")
    target[offset : offset + row.nbytes] = row.tobytes()
