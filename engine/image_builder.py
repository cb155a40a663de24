"""Writes an adapter image: lays its arrays out in one block, and the header before it.

This file knows sizes and offsets; what they mean is `images.py`'s. It refuses to know where arrays
come from and where images are kept.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from loraplex.engine.images import (
    ALIGNMENT,
    ITEM_SIZE,
    Entry,
    ImageDtype,
    ImageError,
    ImageHeader,
    Slice,
    encode_header,
)


@dataclass(frozen=True)
class SliceData:
    """Raw little-endian arrays of one slice: B transposed, and the optional fp32 rows."""

    rank: int
    out_features: int
    b: bytes = b""
    gain: bytes | None = None
    bias: bytes | None = None


class ImageBuilder:
    """Lays arrays out in one block; `finish` writes the file and returns its digest."""

    def __init__(self, base: str, dtype: ImageDtype, invocation: tuple[int, ...] = ()) -> None:
        self._base, self._dtype, self._invocation = base, dtype, invocation
        self._block = bytearray()
        self._entries: list[Entry] = []

    def add(
        self,
        layer: int,
        projection: str,
        in_features: int,
        a: bytes,
        scale: bytes,
        slices: list[SliceData],
    ) -> None:
        """Add one projection. `a` is `[sum ranks, in_features]`, `scale` is fp32 `[sum ranks]`.

        Raises `ImageError` when the bytes do not have the sizes that the ranks ask for.
        """
        size, rows = ITEM_SIZE[self._dtype], sum(s.rank for s in slices)
        _expect(len(a) == rows * in_features * size, "A", layer, projection)
        _expect(len(scale) == rows * 4, "scale", layer, projection)
        a_at, scale_at = self._place(a), self._place(scale)
        placed = []
        for part in slices:
            _expect(len(part.b) == part.rank * part.out_features * size, "B", layer, projection)
            for row in (part.gain, part.bias):
                _expect(row is None or len(row) == part.out_features * 4, "row", layer, projection)
            placed.append(
                Slice(
                    part.rank,
                    part.out_features,
                    *(self._place(x) if x else -1 for x in (part.b, part.gain, part.bias)),
                )
            )
        self._entries.append(Entry(layer, projection, in_features, a_at, scale_at, tuple(placed)))

    def finish(self, path: Path) -> str:
        """Write the image to `path` and return its digest."""
        entries = tuple(sorted(self._entries, key=lambda e: (e.layer, e.projection)))
        header = ImageHeader(
            self._base, self._dtype, len(self._block), entries, invocation=self._invocation
        )
        digest = hashlib.sha256()
        with path.open("wb") as file:
            for part in (encode_header(header), self._block):
                digest.update(part)
                file.write(part)
        return digest.hexdigest()

    def _place(self, data: bytes) -> int:
        offset = len(self._block)
        self._block += data
        self._block += bytes(-len(self._block) % ALIGNMENT)
        return offset


def _expect(holds: bool, what: str, layer: int, projection: str) -> None:
    if not holds:
        raise ImageError(f"{what} of layer {layer}, {projection} has the wrong size")
