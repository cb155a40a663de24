"""The memory that KV blocks and packed images share: blocks from the bottom, images from the top.

A page once written stays taken, whichever side has it. This file knows bytes, blocks and digests;
it refuses to know what blocks hold and how images are packed.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

from loraplex.engine.arena import Arena, Move
from loraplex.engine.native.images import relocate
from loraplex.engine.native.memory import Bytes, Memory


@dataclass
class _Resident:
    begin: int
    length: int


class Region:
    """`nbytes` bytes for up to `num_blocks` blocks, all of which are blocks at first, and images.

    `blocks` is uint8 `[num_blocks, block_bytes]`; `adapters` has the address of each image's
    struct until the next call. Raises `MemoryError` when so many blocks do not fit.
    """

    def __init__(self, nbytes: int, block_bytes: int, num_blocks: int, layers: int) -> None:
        if num_blocks * block_bytes > nbytes:
            raise MemoryError(f"{num_blocks} blocks of {block_bytes} bytes do not fit {nbytes}")
        self._memory, self._layers = Memory(nbytes), layers
        self._arena = Arena(nbytes)
        self._images: dict[str, _Resident] = {}
        self.address = self._memory.address
        self.blocks = self._memory.bytes[: num_blocks * block_bytes].reshape(-1, block_bytes)
        self.adapters: dict[str, int] = {}
        self.set_blocks(num_blocks)

    def set_blocks(self, count: int) -> None:
        """Let images have all but the first `count` blocks.

        Raises `MemoryError`, and changes nothing, when they do not fit there, `ValueError` when
        there cannot be so many blocks.
        """
        most, block_bytes = self.blocks.shape
        if count > most:
            raise ValueError(f"{count} blocks are more than {most}")
        self._make(self._arena.set_floor(count * block_bytes))

    def touch(self, nbytes: int, threads: int) -> None:
        """Take the pages of the first blocks, up to `nbytes`, before any of them is used."""
        self._memory.touch(min(nbytes, self.blocks.nbytes), threads)

    def add(self, digest: str, image: Bytes) -> None:
        """Copy a packed image into the region; raises `MemoryError` when there is no room."""
        begin, moves = self._arena.take(len(image))
        self._make(moves)
        self._images[digest] = _Resident(begin, len(image))
        self._memory.bytes[begin : begin + len(image)] = image
        self._place(digest, 0)

    def remove(self, digest: str) -> None:
        """Forget an image; raises `KeyError` when it is not there."""
        self._arena.give(self._images.pop(digest).begin)
        del self.adapters[digest]

    def _make(self, moves: Iterable[Move]) -> None:
        digests = {image.begin: digest for digest, image in self._images.items()} if moves else {}
        for move in moves:
            digest = digests[move.target] = digests.pop(move.source)
            ctypes.memmove(self.address + move.target, self.address + move.source, move.length)
            self._images[digest].begin = move.target
            self._place(digest, self.address + move.source)

    def _place(self, digest: str, origin: int) -> None:
        """Make the pointers of an image, so far relative to `origin`, point to where it lies."""
        image = self._images[digest]
        address = self.address + image.begin
        bytes_ = self._memory.bytes[image.begin : image.begin + image.length]
        relocate(bytes_, self._layers, address - origin)
        self.adapters[digest] = address
