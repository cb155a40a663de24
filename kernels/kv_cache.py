"""The paged KV cache: its layout, and the write of a step's keys and values.

*Semantics*: `CACHE[block(t), layer, s, h, offset(t), :] = X[t, s, h, :]`, keys with s = 0, values
with s = 1; CACHE `[blocks, layers, 2, kv heads, block size, D]`, X `[T, 2, kv heads, D]`. Where
CACHE is int8, rows are quantised (see `kv_rows.py`), and `SCALES[…]`, fp32 without the last axis of
CACHE, lie beside it.

Block-major, so that one block is one contiguous copy. This file knows blocks and offsets; it
refuses to know whose they are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.kernels.kv_rows import dequantise, quantise

_STORAGE = {torch.float32: np.float32, torch.bfloat16: np.int16, torch.int8: np.int8}


@dataclass(frozen=True)
class BlockLayout:
    """A block in a region of bytes: its rows, of `dtype`, and then their scales if it has any."""

    layers: int
    kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def is_scaled(self) -> bool:
        """Whether rows are quantised."""
        return self.dtype == torch.int8

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of a block's rows, `[layers, 2, kv heads, block size, D]`."""
        return self.layers, 2, self.kv_heads, self.block_size, self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of a block's rows."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        scales = math.prod(self.shape[:-1]) if self.is_scaled else 0
        return self.row_bytes + scales * torch.float32.itemsize

    def split(self, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
        """CACHE, and SCALES if there are any, as views of BLOCKS, uint8 `[blocks, block bytes]`."""
        rows = blocks[:, : self.row_bytes].view(self.dtype).view(len(blocks), *self.shape)
        if not self.is_scaled:
            return rows, None
        scales = blocks[:, self.row_bytes :].view(torch.float32)
        return rows, scales.view(len(blocks), *self.shape[:-1])


class KVCache:
    """The cache of all layers. Memory is taken as blocks are first written.

    Rows of the views of layer l begin at its own first row, so that indices serve all layers.
    """

    def __init__(self, blocks: int, layout: BlockLayout) -> None:
        shape, dtype, self.layout = (blocks, *layout.shape), layout.dtype, layout
        self.data = torch.from_numpy(np.zeros(shape, _STORAGE[dtype])).view(dtype)
        self.scales = torch.from_numpy(np.zeros(shape[:-1] if layout.is_scaled else 0, np.float32))
        self.kv_heads, self.block_size = layout.kv_heads, layout.block_size
        self.heads_per_block = layout.layers * 2 * layout.kv_heads
        self.lines = self._by_layer(self.data.view(-1, layout.block_size * layout.head_dim))
        self.slots = self._by_layer(self.data.view(-1, layout.head_dim))
        self.scale_lines = self._by_layer(self.scales.view(-1, layout.block_size))
        self.scale_slots = self._by_layer(self.scales.view(-1))

    def _by_layer(self, rows: Tensor) -> list[Tensor]:
        step = len(rows) // (len(self.data) * self.layout.layers or 1)
        return [rows[layer * step :] for layer in range(self.layout.layers)]

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
        self.data.index_fill_(0, blocks, 0)
        if self.layout.is_scaled:
            self.scales.index_fill_(0, blocks, 0.0)

    def write(self, layer: int, index: Tensor, x: Tensor) -> None:
        """Write X `[T, 2, kv heads, D]` of one layer at a `slot_index`."""
        rows = x.reshape(-1, x.shape[-1])
        if self.layout.is_scaled:
            rows, scales = quantise(rows)
            self.scale_slots[layer].index_copy_(0, index, scales)
        self.slots[layer].index_copy_(0, index, rows)

    def read(self, layer: int, index: Tensor) -> Tensor:
        """Lines of a `line_index`, fp32 `[lines, block size, D]`."""
        lines = self.lines[layer].index_select(0, index).view(len(index), self.block_size, -1)
        if not self.layout.is_scaled:
            return lines.float()
        return dequantise(lines, self.scale_lines[layer].index_select(0, index))

    def take(self, source: "KVCache", pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks `(from, to)` of SOURCE, one after the other."""
        copy_blocks(source.data, self.data, pairs)
        if self.layout.is_scaled:
            copy_blocks(source.scales, self.scales, pairs)


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
