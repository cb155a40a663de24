"""The KV blocks of one engine: which are free, and how many sequences refer to each of the rest.

Pure ints, no tensors: a block is an index into the executor's cache. The pool refuses to know what
a block holds and who holds it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence


class OutOfBlocks(Exception):
    """More blocks were asked for than are free; nothing was allocated."""


class BrokenPool(Exception):
    """The pool's books do not agree with each other or with the block tables."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, allocated on demand and freed at once."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def free_count(self) -> int:
        """Blocks that nobody refers to."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Blocks that somebody refers to."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference; raises `OutOfBlocks`."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks were asked for and {len(self._free)} are free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, all of which must be in use."""
        for block in blocks:
            if self._references[block] == 0:
                raise BrokenPool(f"block {block} is shared while it is free")
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each block; one without references is free at once."""
        for block in blocks:
            if self._references[block] == 0:
                raise BrokenPool(f"block {block} is released while it is free")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `BrokenPool` unless the references are exactly those of `tables`."""
        held = Counter(block for table in tables for block in table)
        for block, references in enumerate(self._references):
            if references != held[block]:
                raise BrokenPool(f"block {block}: {references} references, {held[block]} holders")
        free = {block for block, references in enumerate(self._references) if references == 0}
        if len(self._free) != len(free) or set(self._free) != free:
            raise BrokenPool("the free list is not the blocks without references")
