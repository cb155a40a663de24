"""Runs batches on a GPU: weights, KV cache and images on the device, decode steps as graphs.

`execute` launches a step and returns: outcomes are tensors that are still being computed, and
whoever reads their numbers waits. They are valid until the next step. A step in which each
sequence has one row is padded to a bucket of rows and replayed as a graph, one per bucket and
dtypes of images: a step of base rows alone launches nothing for adapters. All other steps are
launched as they are. This file knows batches and digests; it refuses to know kernels.
"""

import torch
from torch import Tensor

from loraplex.engine.batch import Batch
from loraplex.engine.gpu.graphs import Graphs, NoGraphs
from loraplex.engine.gpu.images import DeviceImages, kinds_of, largest_rank
from loraplex.engine.gpu.metadata import Metadata
from loraplex.engine.gpu.operators import DeviceStep, TritonOperators
from loraplex.engine.gpu.step_layout import (
    Limits,
    StepLayout,
    bucket_of,
    buckets_for,
    make_layout,
)
from loraplex.engine.images import ImageHeader
from loraplex.engine.model.adapter import projection_sizes
from loraplex.engine.model.decoder import Decoder
from loraplex.engine.outcome import Outcome
from loraplex.kernels.triton.paged_attention import AttentionStep, attention_scratch
from loraplex.kernels.triton.sampling import row_peaks
from loraplex.kernels.triton.sgmv import SgmvStep, sgmv_scratch

FIRST_RANKS = 64  # Σ ranks of a projection that there is room for at first


class GpuExecutor:
    """The executor of a decoder that is on a device, within `limits`."""

    def __init__(
        self,
        decoder: Decoder,
        limits: Limits,
        num_blocks: int,
        image_budget_bytes: int,
        *,
        graphs: bool,
    ) -> None:
        config, device = decoder.config, decoder.device
        self.name = "triton"
        self.device, self.dtype = str(device), str(decoder.dtype).removeprefix("torch.")
        self.block_size, self.num_blocks = limits.block_size, num_blocks
        self.image_budget_bytes = image_budget_bytes
        self.decoder = decoder
        self._buckets = buckets_for(limits.sequences)
        group = config.num_heads // config.num_kv_heads
        self._layouts = {b: make_layout(limits, group, b) for b in (None, *self._buckets)}
        self._metadata = Metadata(max(x.size for x in self._layouts.values()), device)
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, limits.block_size)
        self._cache = torch.zeros(*shape, config.head_dim, dtype=decoder.dtype, device=device)
        widest = max((x.attention for x in self._layouts.values()), key=lambda x: x.partial_rows)
        self._partial = attention_scratch(widest, config.num_kv_heads, config.head_dim, device)
        self._images = DeviceImages(config, image_budget_bytes, device)
        self.graphs: Graphs | NoGraphs = Graphs() if graphs else NoGraphs()
        self._make_room(FIRST_RANKS)

    def add_image(self, digest: str, header: ImageHeader, block: bytearray) -> None:
        """Make an image resident; raises `ImageError` when it does not fit the base."""
        self._images.add(digest, header, block)
        ranks = largest_rank(header)
        if ranks > self._scratch.shape[2]:
            self.graphs.clear()
            self._make_room(ranks)

    def remove_image(self, digest: str) -> None:
        """Forget a resident image."""
        self._images.remove(digest)

    def image_bytes(self, header: ImageHeader) -> int:
        """Bytes of an image in device memory: its block, as it is."""
        return header.block_bytes

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Outcome:
        """The outcome of the wanted rows; writes all rows' KV."""
        bucket = bucket_of(batch, self._buckets)
        if bucket is None:
            return self._compute(self.operators(batch))
        layout, kinds = self._layouts[bucket], self._send(batch, self._layouts[bucket])
        outcome = self.graphs.run(
            (bucket, kinds),
            lambda: self._compute(self._operators(layout, bucket, bucket, kinds)),
        )
        wanted = len(batch.wanted)
        return Outcome(outcome.logits[:wanted], outcome.likeliest[:wanted], outcome.peak[:wanted])

    def operators(self, batch: Batch) -> TritonOperators:
        """The operators of one step of just the batch's rows, valid until the next step."""
        layout = self._layouts[None]
        kinds = self._send(batch, layout)
        return self._operators(layout, len(batch.token_ids), len(batch.wanted), kinds)

    def _send(self, batch: Batch, layout: StepLayout) -> tuple[str, ...]:
        """Bring a step's metadata to the device; the dtypes of its images."""
        places = self._images.places
        kinds = kinds_of({segment.image for segment in batch.segments}, places)
        self._metadata.send(lambda buffer: layout.write(buffer, batch, places))
        return kinds

    def _compute(self, operators: TritonOperators) -> Outcome:
        """Launch a step."""
        logits = self.decoder.forward(operators)
        return Outcome(logits, *row_peaks(logits))

    def _operators(
        self, layout: StepLayout, rows: int, wanted: int, kinds: tuple[str, ...]
    ) -> TritonOperators:
        step = self._step(layout, rows, wanted, kinds)
        decoder = self.decoder
        return TritonOperators(decoder.config, decoder.rotary, self._cache, self._images, step)

    def _step(
        self, layout: StepLayout, rows: int, wanted: int, kinds: tuple[str, ...]
    ) -> DeviceStep:
        ints = self._metadata.ints
        table = ints[: 4 * layout.rows].view(4, layout.rows)
        work = ints[layout.attention_at : layout.size]
        return DeviceStep(
            table[0, :rows],
            table[1, :rows],
            table[2, :rows],
            table[3, :wanted],
            AttentionStep(layout.attention, work, *self._partial),
            [(kind, self._plan(layout, kind, ints)) for kind in kinds],
        )

    def _plan(self, layout: StepLayout, kind: str, ints: Tensor) -> SgmvStep:
        at = layout.plan_at(kind)
        return SgmvStep(layout.sgmv, ints[at : at + layout.sgmv.size], self._scratch)

    def _make_room(self, ranks: int) -> None:
        """Scratch for images of up to `ranks`, a power of two so that it rarely grows."""
        inputs = max(size for size, _ in projection_sizes(self.decoder.config).values())
        rounded = 1 << (ranks - 1).bit_length()
        rows = max(layout.rows for layout in self._layouts.values())
        self._scratch = sgmv_scratch(rows, rounded, inputs, self.decoder.device)
