"""Where KV blocks end and images begin in the one stretch of memory that they share.

S-LoRA pages both from one pool (Sheng et al., MLSys 2024); here blocks lie at the bottom, images at
the top, and the boundary moves a block at a time by demand. A side gives only what it has to spare.

Two rules keep the sides from trading the same memory at every step, as each move costs the giver
what it had cached there. Memory moves in strides of 1/64 of the whole, or more if more is lacking,
so a side that grows steadily rarely asks. And once memory moves to a side, that side refuses the
other's next `TENURE` asks, so the direction changes that seldom, and yet does when both are in need
for long; but a giver that is all spare, whose memory nobody uses, never refuses. An ask that is
refused is to be repeated at the next step.

This file knows counts and bytes. It refuses to know what is in them, and who moves it.
"""

from typing import Literal

TENURE = 32  # asks
STRIDES = 64  # to the whole
IMAGE_SHARE = 4  # at the start images have a quarter


class Boundary:
    """Divides `memory_bytes` into `blocks` KV blocks of `block_bytes` and the rest for images.

    There are never fewer than `least_blocks` blocks (what the longest sequence needs) and never
    more than `most_blocks` (what all sequences can use). At the start images have a quarter of the
    memory, less where `least_blocks` needs it and more where blocks could not use it. Raises
    `ValueError` when `least_blocks` do not fit or are more than `most_blocks`.
    """

    def __init__(
        self, memory_bytes: int, block_bytes: int, least_blocks: int, most_blocks: int
    ) -> None:
        if not 0 <= least_blocks <= most_blocks or least_blocks * block_bytes > memory_bytes:
            raise ValueError(
                f"{least_blocks} to {most_blocks} blocks of {block_bytes} bytes do not fit"
                f" {memory_bytes} bytes"
            )
        self.memory_bytes, self.block_bytes = memory_bytes, block_bytes
        self.least_blocks, self.most_blocks = least_blocks, most_blocks
        start = (memory_bytes - memory_bytes // IMAGE_SHARE) // block_bytes
        self.blocks = min(max(start, least_blocks), most_blocks)
        self._stride = memory_bytes // block_bytes // STRIDES
        self._gainer: Literal["blocks", "images"] | None = None
        self._refusals = 0  # that the gainer has left

    @property
    def image_bytes(self) -> int:
        """Bytes that images may take."""
        return self.memory_bytes - self.blocks * self.block_bytes

    @property
    def most_image_bytes(self) -> int:
        """Bytes that images can ever take."""
        return self.memory_bytes - self.least_blocks * self.block_bytes

    def give_to_images(self, lacking_bytes: int, spare_blocks: int) -> int:
        """Let images have what they lack, of the `spare_blocks` that no sequence holds.

        Returns the number of blocks from now on; that they move away is the caller's to see to.
        """
        lacking = -(-lacking_bytes // self.block_bytes)
        most = min(spare_blocks, self.blocks - self.least_blocks)
        if self._grants("images", min(lacking, most), unused=spare_blocks >= self.blocks):
            self.blocks -= min(max(lacking, self._stride), most)
        return self.blocks

    def give_to_blocks(self, lacking_blocks: int, spare_bytes: int) -> int:
        """Let sequences have the blocks they lack, of the `spare_bytes` that no image must keep.

        Returns the number of blocks from now on; that images move away is the caller's to see to.
        """
        most = min(spare_bytes // self.block_bytes, self.most_blocks - self.blocks)
        unused = spare_bytes >= self.image_bytes
        if self._grants("blocks", min(lacking_blocks, most), unused):
            self.blocks += min(max(lacking_blocks, self._stride), most)
        return self.blocks

    def _grants(self, asker: Literal["blocks", "images"], count: int, unused: bool) -> bool:
        """Whether `asker` gets blocks now: `count` of what it lacks can be had."""
        if count <= 0:
            return False
        if self._gainer not in (None, asker) and self._refusals and not unused:
            self._refusals -= 1
            return False
        if self._gainer != asker:
            self._gainer, self._refusals = asker, TENURE
        return True
