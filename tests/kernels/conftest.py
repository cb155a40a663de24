"""What kernel tests share: seeded numbers, and thread counts that are put back."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

THREADS = (1, 2, 3, 5)


@pytest.fixture
def randn() -> Callable[..., Tensor]:
    """`torch.randn` of a given shape, the same in each run."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


@pytest.fixture(params=THREADS)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Runs the test with several numbers of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def same_rows() -> Iterator[Callable[[Callable[[Tensor], Tensor], Tensor], None]]:
    """Asserts that rows of `f(x)` have the same bits alone, in any company and with any threads."""

    before = torch.get_num_threads()

    def check(f: Callable[[Tensor], Tensor], x: Tensor) -> None:
        torch.set_num_threads(1)
        whole = f(x)
        for threads in THREADS:
            torch.set_num_threads(threads)
            for count in (1, 2, 3, 4, 5, 7, 8, 13, 32, 33, len(x)):
                for start in (0, 1, 6):
                    rows = slice(start, start + count)
                    assert torch.equal(f(x[rows].clone()), whole[rows]), (threads, rows)

    yield check
    torch.set_num_threads(before)
