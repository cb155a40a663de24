"""Runs batches on the base: owns its weights, the KV cache and the resident images.

`TorchExecutor` is the reference: torch operators on a CPU, for every model of the family. A row's
logits have the same bits whatever else is in its batch. This file knows batches and digests; it
refuses to know requests, sampling and where images come from.
"""

import functools
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.engine.batch import Batch
from loraplex.engine.images import ImageHeader
from loraplex.engine.model.adapter import Adapter, make_resident
from loraplex.engine.model.decoder import Decoder
from loraplex.engine.model.operators import ReferenceOperators, Step
from loraplex.engine.outcome import Outcome, outcome_of
from loraplex.kernels.attention_plan import AttentionPlan, Context, plan_attention
from loraplex.kernels.kv_cache import KVCache, token_blocks
from loraplex.kernels.sgmv import Segment

RESIDENT_PER_BLOCK = 2  # bytes that a byte of a bf16 image takes once it is fp32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Executor(Protocol):
    """Computes logits. `image_budget_bytes` is what the `image_bytes` of resident images may be."""

    num_blocks: int
    block_size: int
    image_budget_bytes: int
    device: str
    dtype: str
    name: str

    def add_image(self, digest: str, header: ImageHeader, block: bytearray) -> None:
        """Make an image resident; raises `ImageError` when it does not fit the base."""
        ...

    def remove_image(self, digest: str) -> None:
        """Forget a resident image."""
        ...

    def image_bytes(self, header: ImageHeader) -> int:
        """Bytes of an image once it is resident."""
        ...

    def execute(self, batch: Batch) -> Outcome:
        """The outcome of the wanted rows; writes all rows' KV."""
        ...


class TorchExecutor:
    """The reference executor: a decoder, its KV cache of `num_blocks` blocks, and images."""

    name = "torch"

    def __init__(
        self, decoder: Decoder, *, block_size: int, num_blocks: int, image_budget_bytes: int = 0
    ) -> None:
        config = decoder.config
        self.block_size, self.num_blocks = block_size, num_blocks
        self.image_budget_bytes = image_budget_bytes
        self.device, self.dtype = "cpu", str(decoder.dtype).removeprefix("torch.")
        self._decoder = decoder
        self._cache = KVCache(
            num_blocks, config.num_layers, config.num_kv_heads, block_size, config.head_dim,
            decoder.dtype,
        )  # fmt: skip
        self._images: dict[str, Adapter] = {}

    def add_image(self, digest: str, header: ImageHeader, block: bytearray) -> None:
        """Make an image resident; raises `ImageError` when it does not fit the base."""
        self._images[digest] = make_resident(header, block, self._decoder.config)

    def remove_image(self, digest: str) -> None:
        """Forget a resident image."""
        del self._images[digest]

    def image_bytes(self, header: ImageHeader) -> int:
        """Bytes of the image's block; the budget allows for what they become as fp32."""
        return header.block_bytes

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Outcome:
        """The outcome of the wanted rows; writes all rows' KV."""
        return outcome_of(self._decoder.forward(self.operators(batch)))

    def operators(self, batch: Batch) -> ReferenceOperators:
        """The operators of one step; clears the blocks that it starts."""
        decoder = self._decoder
        return ReferenceOperators(decoder.config, decoder.rotary, self._cache, self._step(batch))

    def _step(self, batch: Batch) -> Step:
        """Tensors of a batch; clears the blocks that it starts."""
        positions = [batch.positions[s.start : s.end] for s in batch.spans]
        blocks, offsets = token_blocks(batch.block_tables, positions, self.block_size)
        self._cache.clear(_int64(blocks[offsets == 0]))
        return Step(
            _int64(batch.token_ids),
            _int64(batch.positions),
            self._cache.slot_index(blocks, offsets),
            self._plans(batch),
            functools.partial(_segments, self._adapters(batch)),
            _int64(batch.wanted),
        )

    def _plans(self, batch: Batch) -> dict[int | None, AttentionPlan]:
        config = self._decoder.config
        contexts = [
            Context(span.start, span.end, span.context, table)
            for span, table in zip(batch.spans, batch.block_tables, strict=True)
        ]
        group = config.num_heads // config.num_kv_heads
        windows = set(config.windows)
        return {w: plan_attention(contexts, self._cache, group, w) for w in windows}

    def _adapters(self, batch: Batch) -> list[tuple[int, int, Adapter]]:
        return [(s.start, s.end, self._images[s.image]) for s in batch.segments]


def _segments(
    adapters: list[tuple[int, int, Adapter]], layer: int, projection: str
) -> list[Segment]:
    """The rows of the step that have an adapter in this projection."""
    found = ((start, end, a.get((layer, projection))) for start, end, a in adapters)
    return [(start, end, weights) for start, end, weights in found if weights is not None]


def _int64(array: NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))
