"""Random models, images and batches for `gpu.py`; nothing is read from a disk."""

from collections.abc import Sequence
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from loraplex.engine.batch import Batch, Segment, Span
from loraplex.engine.images import ITEM_SIZE, Entry, ImageHeader, Slice
from loraplex.engine.model.adapter import TORCH_DTYPE, projection_sizes
from loraplex.engine.model.config import ModelConfig, RopeConfig

BLOCK_SIZE = 16
LARGE = 1 << 23  # numbers that are drawn on the device itself, whichever they are there


def model_config(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, dim: int, vocabulary: int,
    *, window: int | None = None, plain: bool = True,
) -> ModelConfig:  # fmt: skip
    """A Llama, or with `plain` false one with biases, norms of queries and keys, and a window."""
    windows = [window if n % 2 else None for n in range(layers)]
    return ModelConfig(
        vocabulary, hidden, inner, layers, heads, kv_heads, dim, 8192, 1e-5, RopeConfig(5e5),
        tuple(windows), tied=False, qk_norm=not plain, qkv_bias=not plain, o_bias=False,
        mlp_bias=not plain,
    )  # fmt: skip


LLAMA_8B = model_config(32, 4096, 14336, 32, 8, 128, 128256)


class RandomWeights:
    """A decoder's weights, drawn by name: the same on every device unless they are large."""

    def __init__(self, device: str) -> None:
        self._device = device

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Normal numbers that keep the size of activations, rounded to bf16; gains near one."""
        size = int(np.prod(shape))
        device = self._device if size > LARGE else "cpu"
        generator = torch.Generator(device).manual_seed(crc32(name.encode()))
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        values *= shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        if name.endswith("norm.weight"):
            values += 1.0
        return values.bfloat16().to(self._device, dtype)

    def skip(self, suffix: str) -> None:
        """Nothing is left over."""

    def close(self) -> None:
        """Nothing is left over."""


def block_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a KV block."""
    return BLOCK_SIZE * 2 * config.num_layers * config.kv_size * dtype.itemsize


def random_image(
    config: ModelConfig, kind: str, ranks: Sequence[int], seed: int, rows: bool = False
) -> tuple[ImageHeader, bytearray]:
    """An image on all projections, its linears' ranks being `ranks` in turn; `rows`: gain, bias."""
    block = _Block(kind, seed)
    entries = []
    for layer in range(config.num_layers):
        for number, (name, (size, outs)) in enumerate(projection_sizes(config).items(), layer):
            own = [ranks[(number + n) % len(ranks)] for n in range(len(outs))]
            slices = [
                Slice(
                    rank,
                    out,
                    block.weights(rank, out),
                    block.floats(out, 1.0) if rows else -1,
                    block.floats(out, 0.0) if rows else -1,
                )
                for rank, out in zip(own, outs, strict=True)
            ]
            a, scale = block.weights(sum(own), size), block.scales(sum(own), size)
            entries.append(Entry(layer, name, size, a, scale, tuple(slices)))
    content = bytearray(b"".join(block.parts))
    return ImageHeader("f" * 64, kind, len(content), tuple(entries)), content


class _Block:
    """An image's block as it grows."""

    def __init__(self, kind: str, seed: int) -> None:
        self.parts: list[bytes] = []
        self._kind, self._end, self._random = kind, 0, np.random.default_rng(seed)
        self._pool = self._numbers(1 << 20)

    def weights(self, rows: int, columns: int) -> int:
        """Random weights `[rows, columns]`, out of a pool: an image of 8B takes long to draw."""
        size = ITEM_SIZE[self._kind]
        start = int(self._random.integers(len(self._pool) // size)) * size
        return self._place(np.resize(np.roll(self._pool, -start), rows * columns * size).tobytes())

    def floats(self, count: int, mean: float) -> int:
        """Numbers near `mean` `[count]`, fp32."""
        return self._place((mean + 0.1 * self._random.normal(size=count)).astype("f4").tobytes())

    def scales(self, ranks: int, inputs: int) -> int:
        """What makes an adapter's part about a tenth of its base's, fp32 `[ranks]`."""
        step = 0.1 * inputs**-0.5 * max(ranks, 1) ** -0.5
        step *= 50.0**-2 if self._kind == "int8" else 1.0
        return self._place(np.full(ranks, step, np.float32).tobytes())

    def _numbers(self, count: int) -> np.ndarray:
        """Normal numbers as the image's dtype, those of int8 with a deviation of 50, as bytes."""
        values = torch.from_numpy(self._random.normal(size=count).astype(np.float32))
        if self._kind == "int8":
            values = (values * 50).round().clamp(-127, 127)
        return values.to(TORCH_DTYPE[self._kind]).view(torch.uint8).numpy()

    def _place(self, data: bytes) -> int:
        begin = self._end
        self.parts += [data, bytes(-len(data) % 128)]
        self._end += len(data) + -len(data) % 128
        return begin


def batch_of(
    spans: Sequence[tuple[int, int]], images: Sequence[str | None], vocabulary: int
) -> Batch:
    """Sequences of (rows, context), each in blocks of its own; equal images are neighbours."""
    ends = np.cumsum([rows for rows, _ in spans])
    starts = ends - [rows for rows, _ in spans]
    positions = [np.arange(context - rows, context) for rows, context in spans]
    counts = [-(-context // BLOCK_SIZE) for _, context in spans]
    tables = np.split(np.arange(sum(counts), dtype=np.int32), np.cumsum(counts)[:-1])
    pairs = zip(images, starts, ends, strict=True)
    return Batch(
        np.random.default_rng(0).integers(vocabulary, size=ends[-1]).astype(np.int32),
        np.concatenate(positions).astype(np.int32),
        tuple(
            Span(int(start), int(end), context)
            for start, end, (_, context) in zip(starts, ends, spans, strict=True)
        ),
        tuple(tables),
        tuple(Segment(image, int(start), int(end)) for image, start, end in pairs if image),
        (ends - 1).astype(np.int32),
    )
