"""Arithmetic of runs of unequal length, for plans that are built without a loop."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


def runs(counts: Ints) -> tuple[Ints, Ints]:
    """For runs of `counts` `[n]` things: the run of each thing, and its number within the run."""
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return owner, np.arange(len(owner), dtype=np.int32) - before(counts)[owner]


def before(counts: Ints) -> Ints:
    """How many things lie in the runs before each run, `[n]`."""
    return np.cumsum(counts, dtype=np.int32) - counts


def columns(count: int, width: int, *values: Ints | int) -> Ints:
    """`[count, width]` with `values` as its first columns, and zeros after them."""
    table = np.zeros((count, width), np.int32)
    for column, value in enumerate(values):
        table[:, column] = value
    return table
