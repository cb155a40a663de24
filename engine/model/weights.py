"""Reads a checkpoint's tensors, each once, and says when some are missing or left over.

This file knows safetensors files and tensors' names; it refuses to know what they are for.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loraplex.engine.model.config import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Checkpoint:
    """Tensors of a model directory by name, read to `device`.

    Raises `ModelError` when its files cannot be read.
    """

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        self._files: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        for file in _weight_files(directory):
            try:
                opened: Any = safe_open(directory / file, framework="pt", device=device)
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{directory / file} cannot be read: {error}") from error
            self._files[file] = opened
            self._names |= dict.fromkeys(opened.keys(), file)
        self._unread = set(self._names)

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor as `dtype`; raises `ModelError` when it is missing or of another shape."""
        if name not in self._names:
            raise ModelError(f"the weights lack {name}")
        tensor: Tensor = self._files[self._names[name]].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{name} has shape {tuple(tensor.shape)}; {shape} is needed")
        if not tensor.is_floating_point():
            raise ModelError(f"{name} is stored as {tensor.dtype}; bf16, fp16 or fp32 is needed")
        self._unread.discard(name)
        return tensor.to(dtype)

    def skip(self, suffix: str) -> None:
        """Leave tensors with this ending unread."""
        self._unread = {name for name in self._unread if not name.endswith(suffix)}

    def close(self) -> None:
        """Raise `ModelError` when a tensor was not read: the model is not what we computed."""
        if self._unread:
            first, more = min(self._unread), len(self._unread) - 1
            rest = f" and {more} more tensors" if more else ""
            raise ModelError(f"the decoder has no use for {first}{rest} of the weights")


def _weight_files(directory: Path) -> list[str]:
    if (directory / INDEX).is_file():
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        return sorted(set(index["weight_map"].values()))
    return [SINGLE]
