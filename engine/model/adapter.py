"""An image as fp32 tensors, by layer and projection.

The CPU multiplies in fp32, so a bf16 image takes about twice its block and an int8 one four times;
the block itself is not kept. This file knows an image's layout and the decoder's sizes; it refuses
to know digests.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from loraplex.engine.images import ITEM_SIZE, PROJECTIONS, Entry, ImageError, ImageHeader
from loraplex.engine.model.config import ModelConfig
from loraplex.kernels.rows import COLUMNS
from loraplex.kernels.sgmv import LoraSlice, LoraWeights, lora_weights

TORCH_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.int8}

Adapter = Mapping[tuple[int, str], LoraWeights]
Sizes = Mapping[str, tuple[int, tuple[int, ...]]]  # of a projection: in, and out of its linears


def projection_sizes(config: ModelConfig) -> Sizes:
    """Sizes of the projections in `images.PROJECTIONS`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "qkv": (hidden, (config.query_size, config.kv_size, config.kv_size)),
        "o": (config.query_size, (hidden,)),
        "gate_up": (hidden, (inner, inner)),
        "down": (inner, (hidden,)),
    }


def resident_bytes(header: ImageHeader) -> int:
    """Bytes of the tensors that `read_adapter` makes of an image."""
    return sum(map(_entry_bytes, header.entries))


def adapter_bytes(adapter: Adapter) -> int:
    """Bytes of an adapter's tensors."""
    return sum(weights.nbytes for weights in adapter.values())


def _entry_bytes(entry: Entry) -> int:
    ranks, count = sum(part.rank for part in entry.slices), 0
    for part in entry.slices:
        rows = (part.gain >= 0) + (part.bias >= 0)
        count += part.rank * _padded(part.out_features) + rows * part.out_features
    return 4 * (_padded(ranks) * (entry.in_features + 1) + count)


def _padded(columns: int) -> int:
    """Columns after `pad_columns`."""
    return columns + -columns % COLUMNS


def read_adapter(header: ImageHeader, block: bytearray, config: ModelConfig) -> Adapter:
    """The image's tensors; raises `ImageError` when it does not fit the model or its own block."""
    sizes = projection_sizes(config)
    reader = _Block(header, block)
    adapter = {}
    for entry in header.entries:
        if not _fits(entry, sizes, config.num_layers):
            raise ImageError(f"the image's {entry.projection} of layer {entry.layer} does not fit")
        adapter[entry.layer, entry.projection] = _weights(entry, reader)
    return adapter


def _fits(entry: Entry, sizes: Sizes, layers: int) -> bool:
    if not 0 <= entry.layer < layers or entry.projection not in PROJECTIONS:
        return False
    outs = tuple(part.out_features for part in entry.slices)
    return (entry.in_features, outs) == sizes[entry.projection]


def _weights(entry: Entry, reader: "_Block") -> LoraWeights:
    slices, column, rank = [], 0, 0
    for part in entry.slices:
        out = part.out_features
        slices.append(
            LoraSlice(
                start=column,
                stop=column + out,
                first_rank=rank,
                rank=part.rank,
                b=reader.array(part.b, part.rank, out) if part.rank else None,
                gain=reader.row(part.gain, out) if part.gain >= 0 else None,
                bias=reader.row(part.bias, out) if part.bias >= 0 else None,
            )
        )
        column, rank = column + out, rank + part.rank
    a = reader.array(entry.a, rank, entry.in_features)
    return lora_weights(a, reader.row(entry.scale, rank), slices)


class _Block:
    """Arrays of an image's block, copied out as fp32."""

    def __init__(self, header: ImageHeader, block: bytearray) -> None:
        self._block, self._dtype = block, header.dtype

    def array(self, offset: int, rows: int, columns: int) -> Tensor:
        """`[rows, columns]` in the image's dtype."""
        size = ITEM_SIZE[self._dtype]
        flat = self._read(offset, rows * columns, TORCH_DTYPE[self._dtype], size)
        return flat.view(rows, columns)

    def row(self, offset: int, length: int) -> Tensor:
        """`[length]`, stored as fp32."""
        return self._read(offset, length, torch.float32, 4)

    def _read(self, offset: int, count: int, dtype: torch.dtype, size: int) -> Tensor:
        if not count:
            return torch.empty(0)
        if offset < 0 or offset + count * size > len(self._block):
            raise ImageError("the image's header points outside its block")
        view = torch.frombuffer(self._block, dtype=dtype, count=count, offset=offset)
        return view.to(torch.float32, copy=True)
