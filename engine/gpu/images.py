"""Images on the device: in the upper part of a region of bytes, and tables that say where.

An image is one contiguous copy of its block, in the layout of its file. A line of the tables, the
same in the table of each projection of each layer, belongs to it; `sgmv` finds its arrays there.
Tables and region never move, so graphs may hold their addresses. This file knows headers and
offsets; it refuses to know batches, and what lies in the lower part.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraplex.engine.arena import Arena, Move
from loraplex.engine.gpu.copies import Copies
from loraplex.engine.gpu.step_layout import KINDS, Places
from loraplex.engine.images import ITEM_SIZE, PROJECTIONS, Entry, ImageError, ImageHeader
from loraplex.engine.model.adapter import TORCH_DTYPE, projection_sizes
from loraplex.engine.model.config import ModelConfig
from loraplex.kernels.triton import sgmv
from loraplex.kernels.triton.ragged import Ints
from loraplex.kernels.triton.sgmv_plan import ALIGNMENT, RECORD, no_record, record

MAX_IMAGES = 4096
PIECE = 1 << 24  # bytes that move at once
NAMES = tuple(PROJECTIONS)


@dataclass(frozen=True)
class StagedImage:
    """An image in host memory, pinned where it is bound for a GPU."""

    header: ImageHeader
    block: Tensor  # uint8 [block bytes]
    at_zero: Ints  # its lines [layers, projections, RECORD], were it at byte 0
    step: Ints  # what they grow by when it lies ALIGNMENT bytes further


@dataclass
class _Resident:
    line: int
    begin: int  # of its extent
    at_zero: Ints
    step: Ints


class DeviceImages:
    """The images of one model, in `region`, uint8 `[n]` with n a multiple of `ALIGNMENT`.

    They lie above a floor, which is 0 at first.
    """

    def __init__(self, config: ModelConfig, region: Tensor, max_images: int = MAX_IMAGES) -> None:
        self._config, self._sizes = config, projection_sizes(config)
        self._region, self._arena = region, Arena(len(region))
        self._copies = Copies(region.device)
        self._piece = region.new_empty(min(PIECE, len(region)))
        shape = (config.num_layers, len(NAMES), max_images, RECORD)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=region.device)
        self._free_lines = list(range(max_images))[::-1]
        self._images: dict[str, _Resident] = {}
        self.arenas = {kind: sgmv.Arena.of(region, TORCH_DTYPE[kind]) for kind in KINDS}
        self.places: dict[str, tuple[str, int]] = {}

    def table(self, layer: int, name: str) -> Tensor:
        """The lines of one projection, int32 `[images, RECORD]`."""
        return self._tables[layer, NAMES.index(name)]

    def set_floor(self, floor: int) -> None:
        """Keep images above `floor` bytes; raises `MemoryError` when they do not fit there."""
        self._make(self._arena.set_floor(floor))

    def stage(self, header: ImageHeader, block: bytearray) -> StagedImage:
        """What `add` takes; may run on any thread.

        Raises `ImageError` when the image does not fit the model or its own block.
        """
        self._check(header, len(block))
        pinned = self._region.is_cuda
        staged = torch.empty(len(block), dtype=torch.uint8, pin_memory=pinned)
        if block:
            staged.copy_(torch.frombuffer(block, dtype=torch.uint8))
        at_zero = self._lines(header, 0)
        return StagedImage(header, staged, at_zero, self._lines(header, ALIGNMENT) - at_zero)

    def add(self, digest: str, staged: StagedImage) -> None:
        """Copy an image to the device; raises `MemoryError` when there is no room for it."""
        if not self._free_lines:
            raise MemoryError(f"{len(self._images)} images are resident, as many as can be")
        begin, moves = self._arena.take(len(staged.block))
        self._make(moves)
        image = _Resident(self._free_lines.pop(), begin, staged.at_zero, staged.step)
        self._copies.start(digest, self._region[begin : begin + len(staged.block)], staged.block)
        self._images[digest] = image
        self.places[digest] = (staged.header.dtype, image.line)
        self._write_lines(image)

    def remove(self, digest: str) -> None:
        """Forget an image; raises `KeyError` when it is not there."""
        image = self._images.pop(digest)
        del self.places[digest]
        self._copies.wait_for([digest])
        self._arena.give(image.begin)
        self._free_lines.append(image.line)

    def wait_for(self, digests: Iterable[str]) -> None:
        """Let what the device is given from now on begin once these images are there."""
        self._copies.wait_for(digests)

    def _make(self, moves: list[Move]) -> None:
        """Move images. The device does it after the steps that it was given before."""
        if not moves:
            return
        self._copies.wait_for_all()
        images = {image.begin: image for image in self._images.values()}
        for move in moves:
            self._move(move)
            image = images[move.target] = images.pop(move.source)
            image.begin = move.target
            self._write_lines(image)

    def _move(self, move: Move) -> None:
        """Move bytes up, the highest first, so that no piece lands on one that is yet to move.

        It takes no memory: what fails half-way would leave an image that is not where it is said.
        """
        for end in range(move.length, 0, -PIECE):
            begin = max(0, end - PIECE)
            source = self._region[move.source + begin : move.source + end]
            if move.target + begin < move.source + end:
                source = self._piece[: end - begin].copy_(source)
            self._region[move.target + begin : move.target + end].copy_(source)

    def _write_lines(self, image: _Resident) -> None:
        lines = torch.from_numpy(image.at_zero + image.step * (image.begin // ALIGNMENT))
        if self._tables.is_cuda:
            lines = lines.pin_memory()  # else the host would wait for the steps under way
        self._tables[:, :, image.line].copy_(lines, non_blocking=True)

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
