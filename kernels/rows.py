"""How operands are padded so that a library's matrix product treats each row the same.

A BLAS picks its inner loops from the number of rows and columns, so that the last bits of a row may
depend on how many rows share the product. They do not for row counts that are multiples of
`row_quantum()` and column counts that are multiples of `COLUMNS`, whatever the number of threads.
This file knows shapes; it refuses to know what the products are for.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

COLUMNS = 16
QUANTA = (4, 8, 16, 32)
SMALL_WORK = 1 << 21  # multiply-adds that one thread does before a team is awake


def pad_rows(x: Tensor) -> Tensor:
    """`x` `[T, n]` with zero rows added up to a multiple of `row_quantum()`."""
    missing = -x.shape[-2] % row_quantum()
    return pad(x, (0, 0, 0, missing)) if missing else x


def pad_columns(x: Tensor) -> Tensor:
    """`x` `[…, n]` with zero columns added up to a multiple of `COLUMNS`."""
    missing = -x.shape[-1] % COLUMNS
    return pad(x, (0, missing)) if missing else x


@functools.cache
def row_quantum() -> int:
    """The least number in `QUANTA` whose multiples are row counts at which rows agree.

    Measured once a process. The largest is the answer where none is good enough.
    """
    good = (q for q in QUANTA if all(_products_agree(q, *shape) for shape in _SHAPES))
    return next(good, QUANTA[-1])


_SHAPES = ((64, 128), (128, 64), (576, 16), (8, 576), (96, 960))  # inner size, columns


def _products_agree(quantum: int, inner: int, columns: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8 * QUANTA[-1], inner, generator=generator)
    w = torch.randn(3, inner, columns, generator=generator)
    counts = [quantum * n for n in (1, 2, 3, 4, 5, 8)]
    batched = x.expand(3, *x.shape)
    return rows_agree(lambda rows: rows @ w[0], x, counts) and all(
        torch.equal(batched[:, :n] @ w, (batched @ w)[:, :n]) for n in counts
    )


def rows_agree(product: Callable[[Tensor], Tensor], x: Tensor, counts: list[int]) -> bool:
    """Whether the first rows of `product(x)` are the same bits for each count of rows."""
    whole = product(x)
    return all(torch.equal(product(x[:n]), whole[:n]) for n in counts)


@contextmanager
def threads_for(work: int) -> Iterator[None]:
    """Run products of `work` multiply-adds on one thread when waking others costs more."""
    threads = torch.get_num_threads()
    if work < SMALL_WORK:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def batched(a: Tensor, b: Tensor) -> Tensor:
    """`torch.bmm` of A `[n, rows, k]` and B `[n, k, columns]`, padded by the caller."""
    with threads_for(a.numel() * b.shape[-1]):
        return torch.bmm(a, b)
