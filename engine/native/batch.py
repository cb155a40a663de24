"""A step's `Batch` as the structs of the native step, with little Python for each row.

This file knows arrays and addresses; it refuses to know weights and digests' meaning.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.engine.batch import Batch
from loraplex.kernels.cpu import library as abi


class Staged:
    """A batch ready to be run; it keeps alive what `struct` points to."""

    def __init__(self, batch: Batch, adapters: Mapping[str, int]) -> None:
        """`adapters` has the address of each image's struct."""
        self.struct = abi.Batch()
        self._keep: list[NDArray[Any]] = []
        struct, tables = self.struct, np.concatenate(batch.block_tables)
        struct.rows, struct.sequences = len(batch.token_ids), len(batch.spans)
        struct.segments, struct.wanted = len(batch.segments), len(batch.wanted)
        struct.tokens = self._address(batch.token_ids)
        struct.positions = self._address(batch.positions)
        struct.want = self._address(batch.wanted)
        struct.sequence = self._address(_sequences(batch, self._address(tables)))
        struct.segment = self._address(_segments(batch, adapters))

    def _address(self, array: NDArray[Any]) -> int:
        self._keep.append(array)
        return address(array)


def _sequences(batch: Batch, tables: int) -> NDArray[np.int64]:
    """Structs `Sequence`; the block tables lie one after the other from `tables` on."""
    rows = []
    for span, table in zip(batch.spans, batch.block_tables, strict=True):
        rows.append((span.start, span.end, span.context, tables))
        tables += 4 * len(table)
    return np.array(rows, np.int64)


def _segments(batch: Batch, adapters: Mapping[str, int]) -> NDArray[np.int64]:
    """Structs `Segment`; raises `KeyError` for an image that is not resident."""
    return np.array([(s.start, s.end, adapters[s.image]) for s in batch.segments], np.int64)


def address(array: NDArray[Any]) -> int:
    """Where the array's first element is; it must be contiguous."""
    return int(array.__array_interface__["data"][0])
