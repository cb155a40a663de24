"""Runs batches on the base: owns its weights, the KV cache and the resident images.

`TorchExecutor` is the reference: torch operators on a CPU, for every model of the family. A row's
logits have the same bits whatever else is in its batch. This file knows batches and digests; it
refuses to know requests, sampling and where images come from.
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.engine.batch import Batch
from loraplex.engine.draw import Draw
from loraplex.engine.images import ImageHeader
from loraplex.engine.model.adapter import (
    Adapter,
    adapter_bytes,
    read_adapter,
    resident_bytes,
)
from loraplex.engine.model.decoder import Decoder
from loraplex.engine.model.operators import ReferenceOperators, Step
from loraplex.engine.outcome import Outcome, outcome_of
from loraplex.kernels.attention_plan import AttentionPlan, Context, plan_attention
from loraplex.kernels.kv_cache import KVCache, token_blocks
from loraplex.kernels.sgmv import Segment

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Pairs = Sequence[tuple[int, int]]  # where blocks are, and where they go; one after the other


class Executor(Protocol):
    """Computes logits, in one region of memory that KV blocks and resident images share.

    Blocks lie at the bottom of the region, those below the count of `set_blocks`; the images'
    `image_bytes` may add up to what is above. At first all `num_blocks` are blocks. `prepare_image`
    and `image_bytes` may run on any thread, all else on the loop, between steps.
    """

    num_blocks: int  # most blocks that there can be
    block_size: int  # tokens of a block
    block_bytes: int
    memory_bytes: int  # of the region
    weight_bytes: int  # of the base, outside the region
    swap_slots: int  # places for blocks in host memory, outside the region
    device: str
    dtype: str
    name: str

    def set_blocks(self, count: int) -> None:
        """Let the blocks below `count` be blocks from now on, and images have what is above.

        Raises `MemoryError`, and changes nothing, when the resident images do not fit there,
        `ValueError` when there cannot be so many blocks.
        """
        ...

    def prepare_image(self, header: ImageHeader, block: bytearray) -> Any:
        """What `add_image` takes; raises `ImageError` when the image does not fit the base."""
        ...

    def add_image(self, digest: str, prepared: Any) -> None:
        """Make an image resident by one copy; raises `MemoryError` when there is no room."""
        ...

    def remove_image(self, digest: str) -> None:
        """Forget a resident image."""
        ...

    def image_bytes(self, header: ImageHeader) -> int:
        """Bytes that an image takes of the region."""
        ...

    def copy_blocks(self, pairs: Pairs) -> None:
        """Copy blocks (source, target)."""
        ...

    def swap_out(self, pairs: Pairs) -> None:
        """Copy blocks to host memory, (block, slot)."""
        ...

    def swap_in(self, pairs: Pairs) -> None:
        """Copy blocks from host memory, (slot, block)."""
        ...

    def execute(self, batch: Batch) -> Outcome:
        """The outcome of the wanted rows; writes all rows' KV."""
        ...


class Pending(Protocol):
    """The tokens of a launched step, which may still be running."""

    def result(self) -> list[int | None]:
        """The token of each wanted row, None where its logits are not finite; waits for them."""
        ...


@runtime_checkable
class AsyncExecutor(Executor, Protocol):
    """An executor whose device does what it is given in order, while the host goes on.

    What an `Executor` is told to do, to blocks and images too, comes after the steps launched.
    """

    def launch(self, batch: Batch, draws: Sequence[Draw | None]) -> Pending:
        """Begin a step whose tokens the device chooses: each wanted row by a draw or the likeliest.

        The batch may hold tokens of the step launched before. Only the newest two may be pending.
        """
        ...

    def wait(self) -> None:
        """Return once the device has done what it was told."""
        ...


class TorchExecutor:
    """The reference executor: a decoder, its KV cache and images, each of which has its own memory.

    The region of `memory_bytes` is bookkeeping alone: it bounds what they take together. KV is kept
    in the computation's dtype unless `kv_dtype` is given.
    """

    name = "torch"

    def __init__(
        self,
        decoder: Decoder,
        *,
        block_size: int,
        num_blocks: int,
        memory_bytes: int,
        swap_slots: int = 0,
        weight_bytes: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.block_size, self.num_blocks = block_size, num_blocks
        self.memory_bytes, self.swap_slots = memory_bytes, swap_slots
        self.weight_bytes = weight_bytes
        self.device, self.dtype = "cpu", str(decoder.dtype).removeprefix("torch.")
        self._decoder = decoder
        layout = decoder.kv_layout(block_size, kv_dtype)
        self._cache, self._host = (KVCache(count, layout) for count in (num_blocks, swap_slots))
        self.block_bytes = layout.block_bytes
        self._images: dict[str, Adapter] = {}
        self._image_bytes = 0
        self._blocks = 0
        self.set_blocks(num_blocks)

    def set_blocks(self, count: int) -> None:
        """See `Executor`."""
        if count > self.num_blocks:
            raise ValueError(f"{count} blocks are more than {self.num_blocks}")
        if count * self.block_bytes + self._image_bytes > self.memory_bytes:
            raise MemoryError(f"{count} blocks and {self._image_bytes} bytes of images do not fit")
        self._blocks = count

    def prepare_image(self, header: ImageHeader, block: bytearray) -> Adapter:
        """See `Executor`."""
        return read_adapter(header, block, self._decoder.config)

    def add_image(self, digest: str, prepared: Adapter) -> None:
        """See `Executor`."""
        size, free = adapter_bytes(prepared), self.memory_bytes - self._blocks * self.block_bytes
        if self._image_bytes + size > free:
            raise MemoryError(f"the image takes {size} bytes; {free - self._image_bytes} are free")
        self._images[digest] = prepared
        self._image_bytes += size

    def remove_image(self, digest: str) -> None:
        """See `Executor`."""
        self._image_bytes -= adapter_bytes(self._images.pop(digest))

    def image_bytes(self, header: ImageHeader) -> int:
        """See `Executor`."""
        return resident_bytes(header)

    def copy_blocks(self, pairs: Pairs) -> None:
        """See `Executor`."""
        self._cache.take(self._cache, pairs)

    def swap_out(self, pairs: Pairs) -> None:
        """See `Executor`."""
        self._host.take(self._cache, pairs)

    def swap_in(self, pairs: Pairs) -> None:
        """See `Executor`."""
        self._cache.take(self._host, pairs)

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
