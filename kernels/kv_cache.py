"""The paged KV cache: its layout, and the write of a step's keys and values.

*Semantics*: `CACHE[block(t), layer, s, h, offset(t), :] = X[t, s, h, :]`, keys with s = 0, values
with s = 1; CACHE `[blocks, layers, 2, kv heads, block size, D]`, X `[T, 2, kv heads, D]`.

Block-major, so that one block is one contiguous copy. This file knows blocks and offsets; it
refuses to know whose they are.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_STORAGE = {torch.float32: np.float32, torch.bfloat16: np.int16}


class KVCache:
    """The cache of all layers. Memory is taken as blocks are first written."""

    def __init__(
        self,
        blocks: int,
        layers: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        shape = (blocks, layers, 2, kv_heads, block_size, head_dim)
        self.data = torch.from_numpy(np.zeros(shape, _STORAGE[dtype])).view(dtype)
        self.kv_heads, self.block_size = kv_heads, block_size
        self.block_bytes = math.prod(shape[1:]) * dtype.itemsize
        self.heads_per_block = layers * 2 * kv_heads
        # Rows of the views of layer l begin at its own first row, so that indices serve all layers.
        lines = self.data.view(-1, block_size * head_dim)
        slots = self.data.view(-1, head_dim)
        first = [layer * 2 * kv_heads for layer in range(layers if blocks else 0)]
        self.lines = [lines[row:] for row in first]
        self.slots = [slots[row * block_size :] for row in first]

    def line_index(self, blocks: NDArray[np.integer]) -> NDArray[np.int64]:
        """Rows of `lines[layer]` for blocks `[n, m]`, as `[2, n, kv heads, m]`.

        A row holds what one head keeps of a block, `[block size · D]`.
        """
        parts = np.arange(2)[:, None, None, None] * self.kv_heads
        heads = np.arange(self.kv_heads)[:, None]
        first: NDArray[np.int64] = blocks.astype(np.int64)[:, None, :] * self.heads_per_block
        return first + heads + parts

    def slot_index(self, blocks: NDArray[np.integer], offsets: NDArray[np.integer]) -> Tensor:
        """Rows of `slots[layer]` that tokens `[T]` write, as `[T · 2 · kv heads]`."""
        lines = self.line_index(blocks[:, None])[..., 0].transpose(1, 0, 2)
        return torch.from_numpy((lines * self.block_size + offsets[:, None, None]).ravel())

    def clear(self, blocks: Tensor) -> None:
        """Zero blocks before their first token is written.

        Attention multiplies what lies beyond a sequence's last token by zero, which would not
        silence the NaN that another sequence may have left there.
        """
        self.data.index_fill_(0, blocks, 0.0)

    def write(self, layer: int, index: Tensor, x: Tensor) -> None:
        """Write X `[T, 2, kv heads, D]` of one layer at a `slot_index`."""
        self.slots[layer].index_copy_(0, index, x.reshape(-1, x.shape[-1]))


def copy_blocks(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """`TARGET[to] = SOURCE[from]` for each (from, to), one after the other, without waiting.

    Both are `[blocks, …]`, on one device or on a device and in pinned memory.
    """
    for place, goal in pairs:
        target[goal].copy_(source[place], non_blocking=True)


def token_blocks(
    tables: Sequence[NDArray[np.integer]], positions: Sequence[NDArray[np.integer]], block_size: int
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Block and offset of each token: `positions[i]` lie in the blocks of `tables[i]`."""
    pairs = zip(tables, positions, strict=True)
    blocks = [table[where // block_size] for table, where in pairs]
    return np.concatenate(blocks), np.concatenate(positions) % block_size
