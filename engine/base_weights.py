"""The base's linear weights, read one at a time from its safetensors files.

This file trusts the base, which the operator chose and `engine.prepare` checked.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loraplex.engine.checkpoint import weight_files
from loraplex.engine.float_arrays import Floats, read_floats, read_rows
from loraplex.engine.peft_format import module_path
from loraplex.engine.safetensors_header import Tensor


class BaseWeights:
    """Where each weight of a base lies; nothing is read before it is asked for."""

    def __init__(self, directory: Path) -> None:
        self._places = {
            name: (path, tensor)
            for path in weight_files(directory)
            for name, tensor in _header(path)
        }

    def read(self, layer: int, name: str) -> Floats:
        """Weight `[out, in]` of one linear as float32; raises `KeyError` when there is none."""
        return read_floats(*self._place(layer, name))

    def rows(self, layer: int, name: str, rows: npt.NDArray[np.int64]) -> Floats:
        """Some of its rows, without reading the others."""
        return read_rows(*self._place(layer, name), rows)

    def _place(self, layer: int, name: str) -> tuple[Path, Tensor]:
        return self._places[f"{module_path('model.', layer, name)}.weight"]


def _header(path: Path) -> Iterator[tuple[str, Tensor]]:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        entries = json.loads(file.read(size))
    for name, entry in entries.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield name, Tensor(entry["dtype"], tuple(entry["shape"]), 8 + size + start, end - start)
