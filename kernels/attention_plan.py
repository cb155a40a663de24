"""Which keys each row of a step attends to, as indices and masks that serve all layers.

Sequences with equally many rows in the step form a group and go through one product. A group's
sequences are sorted by how many tiles of keys they need, so that those which take part in a tile
are the first ones. This file knows contexts and block tables; it refuses to know layers and heads'
contents.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.kernels.kv_cache import KVCache
from loraplex.kernels.rows import COLUMNS, row_quantum

TILE_KEYS = 128

Ints = NDArray[np.integer]


@dataclass(frozen=True)
class Tile:
    """Some keys of the first `sequences` of a group, for query rows from `first_row` on."""

    sequences: int
    first_row: int
    index: Tensor  # int64, rows of `cache.lines[layer]`
    hidden: Tensor | None  # fp32 [sequences, 1, rows, keys]: -inf for what a row must not see


@dataclass(frozen=True)
class Group:
    """`sequences` sequences of `count` rows each; `rows` int64 lists them, sequence by sequence.

    The heads of a KV head make `count · heads / kv heads` query rows, padded to `padded_rows`.
    """

    sequences: int
    count: int
    padded_rows: int
    rows: Tensor
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class AttentionPlan:
    """All rows of a step, group by group."""

    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Context:
    """One sequence: its rows `[start, end)` of the step are its last tokens of `context`."""

    start: int
    end: int
    context: int
    blocks: Ints  # int [≥ context / block size]

    @property
    def count(self) -> int:
        """Rows in the step."""
        return self.end - self.start

    @property
    def position(self) -> int:
        """Position of its first row."""
        return self.context - self.count


def plan_attention(
    contexts: Sequence[Context], cache: KVCache, queries_per_key: int, window: int | None
) -> AttentionPlan:
    """Plan a step; a row sees the last `window` keys up to itself, all when it is None."""
    planner = _Planner(cache, queries_per_key, window)
    counts = sorted({c.count for c in contexts})
    return AttentionPlan(
        tuple(planner.group([c for c in contexts if c.count == count]) for count in counts)
    )


class _Planner:
    def __init__(self, cache: KVCache, queries_per_key: int, window: int | None) -> None:
        self.cache, self.queries_per_key, self.window = cache, queries_per_key, window
        self.keys = tile_keys(cache.block_size)
        self.blocks_per_tile = self.keys // cache.block_size

    def group(self, contexts: Sequence[Context]) -> Group:
        contexts = sorted(contexts, key=self.tile_count, reverse=True)
        rows = np.concatenate([np.arange(c.start, c.end) for c in contexts])
        count, quantum = contexts[0].count, row_quantum()
        padded = math.ceil(count * self.queries_per_key / quantum) * quantum
        return Group(
            len(contexts), count, padded, torch.from_numpy(rows), self.tiles(contexts, padded)
        )

    def first_tile(self, c: Context) -> int:
        return 0 if self.window is None else max(0, c.position - self.window + 1) // self.keys

    def tile_count(self, c: Context) -> int:
        return math.ceil(c.context / self.keys) - self.first_tile(c)

    def tiles(self, contexts: Sequence[Context], padded: int) -> tuple[Tile, ...]:
        needed = [self.tile_count(c) for c in contexts]
        active = [contexts[: sum(n > i for n in needed)] for i in range(needed[0])]
        return tuple(self.tile(some, i, padded) for i, some in enumerate(active))

    def tile(self, contexts: Sequence[Context], number: int, padded: int) -> Tile:
        begin = np.array([(self.first_tile(c) + number) * self.keys for c in contexts])
        position = np.array([c.position for c in contexts])
        quantum = row_quantum()
        first = max(0, int((begin - position).min())) * self.queries_per_key // quantum * quantum
        return Tile(
            len(contexts),
            first,
            torch.from_numpy(self.cache.line_index(self.blocks(contexts, begin)).ravel()),
            self.hidden(begin, position, contexts[0].count, first, padded),
        )

    def blocks(self, contexts: Sequence[Context], begin: Ints) -> Ints:
        """The blocks of each sequence's tile `[sequences, blocks]`.

        Beyond its last block stands that block again: hidden, but finite and its own.
        """
        places = begin[:, None] // self.cache.block_size + np.arange(self.blocks_per_tile)
        pairs = zip(contexts, places, strict=True)
        return np.stack([c.blocks[np.minimum(p, len(c.blocks) - 1)] for c, p in pairs])

    def hidden(
        self, begin: Ints, position: Ints, count: int, first: int, padded: int
    ) -> Tensor | None:
        """Keys after a row, and those that left its window; None when there are none."""
        last = begin + self.keys - 1
        passed = self.window is not None and (begin <= position + count - 1 - self.window).any()
        if not passed and (last <= position + first // self.queries_per_key).all():
            return None
        steps = np.minimum(np.arange(first, padded) // self.queries_per_key, count - 1)
        rows = (position[:, None] + steps)[:, None, :, None]
        keys = (begin[:, None] + np.arange(self.keys))[:, None, None, :]
        hidden = keys > rows
        if self.window is not None:
            hidden |= keys <= rows - self.window
        return torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0)))


def tile_keys(block_size: int) -> int:
    """Keys in a tile: the least multiple of the block size and of `COLUMNS` from `TILE_KEYS` on."""
    step = math.lcm(block_size, COLUMNS)
    return math.ceil(TILE_KEYS / step) * step
