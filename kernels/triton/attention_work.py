"""A step's attention as a list of work items, in one int32 buffer for `paged_attention`.

An item is a few rows of one sequence and the keys `[from, to)` that they look at: all rows of a
sequence that decodes, or some of a prefill's. An item that holds all rows of its sequence may be
cut at multiples of `SPLIT_KEYS` when its context is long. The pieces leave partial results, which
a merge then brings together by the same sums in the same order, so that cutting changes no bit and
the room for partial results alone decides it.

The buffer has the same size whatever the step holds. This file knows contexts and block tables; it
refuses to know tensors, devices and windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loraplex.kernels.triton.ragged import Ints, before, columns, runs

Span = tuple[int, int, int]  # rows [start, end) are the last of `context` tokens

SPLIT_KEYS = 512
HEIGHT = 32
WORK_HEAD = 4  # counts of items and of merges; nothing, nothing
ITEM = 8  # table, first row, rows, from key, to key, first row's position, partial row or -1, 0
MERGE = 4  # row, first partial row, partial rows, their distance


@dataclass(frozen=True)
class AttentionLayout:
    """What a work list may hold, for `group` query heads per KV head.

    `sequences` sequences; `prefill_rows` rows of those that have more rows than an item takes;
    `partial_rows` rows of partial results, at least `longest context / SPLIT_KEYS` if such a
    context is to be cut; `blocks` entries of block tables. An item is `height` query rows, a power
    of two: its rows of the step times `group`. Steps of one height agree on every bit, of two they
    need not: 16 suits decoding alone, 64 long prefills.
    """

    group: int
    sequences: int
    prefill_rows: int
    partial_rows: int
    blocks: int
    height: int = HEIGHT

    def __post_init__(self) -> None:
        if self.height < max(16, self.group) or self.height & (self.height - 1):
            raise ValueError(
                f"the height is {self.height}; {self.group} heads of a KV head need a power of two "
                "from 16 on that is not less"
            )

    @property
    def rows_per_item(self) -> int:
        """Rows of the step that an item takes."""
        return self.height // self.group

    @property
    def items(self) -> int:
        """The most items that a step can make."""
        return self.sequences + self.partial_rows + self.prefill_rows // self.rows_per_item

    @property
    def merges(self) -> int:
        """The most merges that a step can make."""
        return self.partial_rows // 2

    @property
    def merges_at(self) -> int:
        """Where merges begin."""
        return WORK_HEAD + self.items * ITEM

    @property
    def tables_at(self) -> int:
        """Where block tables begin."""
        return self.merges_at + self.merges * MERGE

    @property
    def size(self) -> int:
        """Ints of a work list."""
        return self.tables_at + self.blocks

    def write(self, buffer: Ints, spans: Sequence[Span], tables: Sequence[Ints]) -> int:
        """Write a step's work to `buffer` `[size]` and return how many ints of it are in use.

        `tables[i]` are the blocks of `spans[i]`. Raises `ValueError` when there are more sequences,
        rows or blocks than the layout holds.
        """
        work = _Work(spans, tables, self.rows_per_item)
        self._check(work)
        pieces = work.cut(self.partial_rows)
        items, merges = work.items(pieces), work.merges(pieces)
        blocks = np.concatenate([np.empty(0, np.int32), *tables])
        buffer[:WORK_HEAD] = len(items), len(merges), 0, 0
        for at, part in ((WORK_HEAD, items), (self.merges_at, merges), (self.tables_at, blocks)):
            buffer[at : at + part.size] = part.ravel()
        return self.tables_at + len(blocks)

    def _check(self, work: "_Work") -> None:
        rows, blocks = int(work.rows[work.tiles > 1].sum()), int(work.blocks.sum())
        has = (len(work.rows), rows, blocks)
        holds = (self.sequences, self.prefill_rows, self.blocks)
        if any(a > b for a, b in zip(has, holds, strict=True)):
            raise ValueError(f"(sequences, prefill rows, blocks) {has} are more than {holds}")


class _Work:
    """A step's sequences as arrays `[sequences]`."""

    def __init__(self, spans: Sequence[Span], tables: Sequence[Ints], rows_per_item: int) -> None:
        self.start, end, self.context = np.array(spans, np.int32).reshape(-1, 3).T
        self.rows, self.rows_per_item = end - self.start, rows_per_item
        self.tiles = -(-self.rows // rows_per_item)
        self.blocks = np.array([len(table) for table in tables], np.int32)

    def cut(self, partial_rows: int) -> Ints:
        """Into how many pieces each sequence's one item is cut; the longest are served first."""
        pieces = np.where(self.tiles == 1, -(-self.context // SPLIT_KEYS), 1)
        needed = self._partial_rows(pieces)
        order = np.argsort(-self.context, kind="stable")
        fits = np.empty(len(order), np.bool_)
        fits[order] = np.cumsum(needed[order]) <= partial_rows
        return np.where(fits, pieces, 1).astype(np.int32)

    def items(self, pieces: Ints) -> Ints:
        """`[items, ITEM]`: a sequence has several tiles of rows, or several pieces of keys."""
        s, number = runs(np.maximum(pieces, self.tiles))
        cut = pieces[s] > 1
        done = np.where(cut, 0, number * self.rows_per_item)
        rows = np.minimum(self.rows_per_item, self.rows[s] - done)
        position = self.context[s] - self.rows[s] + done
        begin = np.where(cut, number * SPLIT_KEYS, 0)
        end = position + rows
        return columns(
            len(s), ITEM, before(self.blocks)[s], self.start[s] + done, rows, begin,
            np.where(cut, np.minimum(begin + SPLIT_KEYS, end), end), position,
            np.where(cut, self._first_partial(pieces)[s] + number * rows, -1),
        )  # fmt: skip

    def merges(self, pieces: Ints) -> Ints:
        """`[merges, MERGE]`, one for each row of a sequence that is cut."""
        cut = np.flatnonzero(pieces > 1)
        owner, number = runs(self.rows[cut])
        s = cut[owner]
        first = self._first_partial(pieces)[s] + number
        return columns(len(s), MERGE, self.start[s] + number, first, pieces[s], self.rows[s])

    def _first_partial(self, pieces: Ints) -> Ints:
        return before(self._partial_rows(pieces))

    def _partial_rows(self, pieces: Ints) -> Ints:
        return np.where(pieces > 1, pieces * self.rows, 0).astype(np.int32)
