"""Numbers in files and in images: F16, BF16 and F32 tensors, and casts that lose the least.

NumPy has no bfloat16: it is held as the `uint16` of its bits. This file knows number formats only.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loraplex.engine.images import ImageDtype
from loraplex.engine.safetensors_header import Tensor

Floats = npt.NDArray[np.float32]
Served = npt.NDArray[Any]  # float32, int8, or the bits of bfloat16 as uint16

INT8_MAX = 127  # -128 is not used, so that a row and its negative are stored alike

_STORED = {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}


@dataclass(frozen=True)
class ServedRows:
    """A matrix as an image holds it: row i means `scale[i] · values[i]`."""

    values: Served  # [rows, columns]
    scale: Floats  # [rows]; ones, unless the values are int8


def read_floats(path: Path, tensor: Tensor) -> Floats:
    """A tensor of a file, widened exactly to float32; raises `OSError` if it cannot be read."""
    with path.open("rb") as file:
        file.seek(tensor.start)
        stored = np.frombuffer(file.read(tensor.size), _STORED[tensor.dtype])
    return widen(stored).reshape(tensor.shape)


def read_rows(path: Path, tensor: Tensor, rows: npt.NDArray[np.int64]) -> Floats:
    """Some rows of a tensor `[rows, columns]` of a file, as float32; the others are not read."""
    stored = np.memmap(path, _STORED[tensor.dtype], "r", tensor.start, tensor.shape)
    return widen(np.ascontiguousarray(stored[rows]))


def widen(values: Served) -> Floats:
    """Exactly the same numbers as float32."""
    if values.dtype == np.uint16:
        return (values.astype("<u4") << 16).view("<f4")
    return values.astype("<f4", copy=False)


def serve_rows(values: Floats, dtype: ImageDtype) -> ServedRows:
    """Store `[rows, columns]` in `dtype`.

    As int8 a row's largest number becomes ±127, so no number is off by more than half of the row's
    scale, a 254th of that largest one. A row of zeros has scale 0.
    """
    if dtype != "int8":
        return ServedRows(cast(values, dtype), np.ones(len(values), "<f4"))
    scale = (np.abs(values).max(axis=1) / INT8_MAX).astype("<f4")
    steps = np.divide(values, scale[:, None], out=np.zeros_like(values), where=scale[:, None] > 0)
    return ServedRows(np.rint(steps).clip(-INT8_MAX, INT8_MAX).astype(np.int8), scale)


def cast(values: Floats, dtype: Literal["bf16", "fp32"]) -> Served:
    """Round to the nearest number of `dtype`, ties to even; numbers of `dtype` keep their bits.

    What is too large becomes infinite.
    """
    if dtype == "fp32":
        return values
    bits = np.ascontiguousarray(values).view("<u4")
    rounded: Served = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2")
