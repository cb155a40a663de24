"""Images on the device: one arena of bytes, and tables that say where each image's arrays lie.

An image is one contiguous copy of its block, in the layout of its file. A line of the tables, the
same in the table of each projection of each layer, belongs to it; `sgmv` finds its arrays there.
Tables and arena never move, so graphs may hold their addresses. This file knows headers and
offsets; it refuses to know batches.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from loraplex.engine.gpu.extents import Extents
from loraplex.engine.gpu.step_layout import KINDS, Places
from loraplex.engine.images import ITEM_SIZE, PROJECTIONS, Entry, ImageError, ImageHeader
from loraplex.engine.model.adapter import TORCH_DTYPE, projection_sizes
from loraplex.engine.model.config import ModelConfig
from loraplex.kernels.triton.ragged import Ints
from loraplex.kernels.triton.sgmv import Arena
from loraplex.kernels.triton.sgmv_plan import ALIGNMENT, RECORD, no_record, record

MAX_IMAGES = 4096
NAMES = tuple(PROJECTIONS)


@dataclass(frozen=True)
class _Resident:
    line: int
    begin: int  # of its extent
    at_zero: Ints  # its lines [layers, projections, RECORD], were its extent at byte 0
    step: Ints  # what they grow by when it lies ALIGNMENT bytes further


class DeviceImages:
    """The images of one model, in `budget_bytes` of a device's memory."""

    def __init__(
        self,
        config: ModelConfig,
        budget_bytes: int,
        device: torch.device | str,
        max_images: int = MAX_IMAGES,
    ) -> None:
        size = budget_bytes // ALIGNMENT * ALIGNMENT
        self._config, self._sizes = config, projection_sizes(config)
        self._bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self._extents = Extents(size)
        shape = (config.num_layers, len(NAMES), max_images, RECORD)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._free_lines = list(range(max_images))[::-1]
        self._images: dict[str, _Resident] = {}
        self.arenas = {kind: Arena.of(self._bytes, TORCH_DTYPE[kind]) for kind in KINDS}
        self.places: dict[str, tuple[str, int]] = {}

    def table(self, layer: int, name: str) -> Tensor:
        """The lines of one projection, int32 `[images, RECORD]`."""
        return self._tables[layer, NAMES.index(name)]

    def add(self, digest: str, header: ImageHeader, block: bytearray) -> None:
        """Copy an image to the device.

        Raises `ImageError` when it does not fit the model, its own block or what memory is left.
        """
        self._check(header, len(block))
        if not self._free_lines:
            raise ImageError(f"{len(self._images)} images are resident, as many as can be")
        at_zero = self._lines(header, 0)
        step = self._lines(header, ALIGNMENT) - at_zero
        begin = self._take(max(len(block), ALIGNMENT))
        image = _Resident(self._free_lines.pop(), begin, at_zero, step)
        if block:
            source = torch.frombuffer(block, dtype=torch.uint8)
            self._bytes[begin : begin + len(block)].copy_(source)
        self._images[digest] = image
        self.places[digest] = (header.dtype, image.line)
        self._write_lines(image)

    def remove(self, digest: str) -> None:
        """Forget an image; raises `KeyError` when it is not there."""
        image = self._images.pop(digest)
        del self.places[digest]
        self._extents.give(image.begin)
        self._free_lines.append(image.line)

    def _take(self, length: int) -> int:
        length = -(-length // ALIGNMENT) * ALIGNMENT
        begin = self._extents.take(length)
        if begin is None and length <= self._extents.free_bytes:
            self._compact()
            begin = self._extents.take(length)
        if begin is None:
            free = self._extents.free_bytes
            raise ImageError(f"the image takes {length} bytes; {free} are free on the device")
        return begin

    def _compact(self) -> None:
        """Close all gaps. The device makes the moves after the steps that it was given before."""
        moves = self._extents.compact()
        moved = {move.source: move.target for move in moves}
        for move in moves:
            bytes_ = self._bytes[move.source : move.source + move.length].clone()
            self._bytes[move.target : move.target + move.length].copy_(bytes_)
        for digest, image in self._images.items():
            if image.begin in moved:
                self._images[digest] = replace(image, begin=moved[image.begin])
                self._write_lines(self._images[digest])

    def _write_lines(self, image: _Resident) -> None:
        lines = image.at_zero + image.step * (image.begin // ALIGNMENT)
        self._tables[:, :, image.line] = torch.from_numpy(lines).to(self._tables.device)

    def _lines(self, header: ImageHeader, begin: int) -> Ints:
        lines: Ints = np.tile(no_record(), (*self._tables.shape[:2], 1))
        for entry in header.entries:
            slices = [(s.rank, s.b if s.rank else -1, s.gain, s.bias) for s in entry.slices]
            a, scale = (entry.a, entry.scale) if _ranks(entry) else (-1, -1)
            line = record(begin, a, scale, slices)
            lines[entry.layer, NAMES.index(entry.projection)] = line
        return lines

    def _check(self, header: ImageHeader, length: int) -> None:
        if header.dtype not in TORCH_DTYPE:
            raise ImageError(f"images of dtype {header.dtype} are not supported")
        for entry in header.entries:
            where = f"the image's {entry.projection} of layer {entry.layer}"
            if not self._fits(entry):
                raise ImageError(f"{where} does not fit")
            for offset, count in _arrays(entry, ITEM_SIZE[header.dtype]):
                if offset < 0 or offset % ALIGNMENT or offset + count > length:
                    raise ImageError(f"{where} points outside its block")

    def _fits(self, entry: Entry) -> bool:
        if not 0 <= entry.layer < self._config.num_layers or entry.projection not in NAMES:
            return False
        outs = tuple(part.out_features for part in entry.slices)
        if min((part.rank for part in entry.slices), default=0) < 0:
            return False
        return (entry.in_features, outs) == self._sizes[entry.projection]


def largest_rank(header: ImageHeader) -> int:
    """The largest Σ ranks that a projection of an image has."""
    return max((_ranks(entry) for entry in header.entries), default=0)


def kinds_of(images: set[str], places: Places) -> tuple[str, ...]:
    """The dtypes of some images, in the order of `KINDS`; raises `KeyError` for one not there."""
    found = {places[image][0] for image in images}
    return tuple(kind for kind in KINDS if kind in found)


def _ranks(entry: Entry) -> int:
    return sum(part.rank for part in entry.slices)


def _arrays(entry: Entry, item: int) -> list[tuple[int, int]]:
    """Offset and bytes of each array that the entry has."""
    ranks = _ranks(entry)
    found = [(entry.a, ranks * entry.in_features * item), (entry.scale, ranks * 4)] * (ranks > 0)
    for part in entry.slices:
        if part.rank:
            found.append((part.b, part.rank * part.out_features * item))
        found += [(row, part.out_features * 4) for row in (part.gain, part.bias) if row != -1]
    return found
