"""How checks of `gpu.py` tell what they found."""

import math
import traceback
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCE = 8e-3  # of an error's norm, relative; bf16 has 8 bits
TOLERANCE_OF_CODES = 2e-2  # where bf16 may make an int8 code of a key the one beside it
TOLERANCE_OF_STEP = 4e-2  # all operators of two layers one after the other


class Check(NamedTuple):
    """What was compared, how wrong it is, and from which error on that is too much."""

    what: str
    error: float  # NaN where nothing could be compared
    limit: float = TOLERANCE

    @property
    def passes(self) -> bool:
        """Whether the error is small enough."""
        return self.error < self.limit


def told(name: str, checks: Callable[[], Iterable[Check]]) -> list[Check]:
    """Checks under a name, printed as they come. One that raises fails and ends its group alone."""
    found: list[Check] = []
    try:
        for check in checks():
            found.append(check._replace(what=f"{name} {check.what}"))
            tell(found[-1])
    except Exception as error:
        traceback.print_exc()
        found.append(Check(f"{name} after that: {type(error).__name__}", math.nan))
        tell(found[-1])
    return found


def tell(check: Check) -> None:
    """Print a check's line."""
    print(f"{'pass' if check.passes else 'FAIL'}  {check.what}: {check.error:.1e}", flush=True)


def unequal(a: Tensor, b: Tensor) -> float:
    """1 when a number's bits differ, else 0; NaN equals nothing."""
    return float(not torch.equal(a, b))


def difference(expected: Tensor, found: Tensor) -> float:
    """Norm of the error over the norm of what is right."""
    error = found.detach().to("cpu", torch.float64) - expected.double()
    return float(error.norm() / expected.double().norm())
