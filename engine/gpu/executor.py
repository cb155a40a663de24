"""Runs batches on a GPU: weights, KV cache and images on the device, decode steps as graphs.

`execute` launches a step and returns: outcomes are tensors that are still being computed, and
whoever reads their numbers waits. They are valid until the next step. `launch` has the device
choose the tokens as well, which the next step may use before anybody has read them. A step in which
each sequence has one row is padded to a bucket of rows and replayed as a graph, one per bucket and
dtypes of images: a step of base rows alone launches nothing for adapters. All other steps are
launched as they are. This file knows batches and digests; it refuses to know kernels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex.engine.batch import Batch
from loraplex.engine.draw import Draw
from loraplex.engine.executor import Pairs
from loraplex.engine.gpu.choices import Choices, Chosen
from loraplex.engine.gpu.graphs import Graphs, NoGraphs
from loraplex.engine.gpu.health import watched
from loraplex.engine.gpu.images import DeviceImages, StagedImage, kinds_of, largest_rank
from loraplex.engine.gpu.metadata import Metadata
from loraplex.engine.gpu.operators import DeviceStep, TritonOperators
from loraplex.engine.gpu.pinned import pinned_blocks
from loraplex.engine.gpu.step_layout import (
    Limits,
    StepLayout,
    bucket_of,
    buckets_for,
    make_layout,
)
from loraplex.engine.images import ALIGNMENT, ImageHeader
from loraplex.engine.model.adapter import projection_sizes
from loraplex.engine.model.decoder import Decoder
from loraplex.engine.outcome import Outcome
from loraplex.kernels.kv_cache import copy_blocks
from loraplex.kernels.triton.paged_attention import AttentionStep, attention_scratch
from loraplex.kernels.triton.sampling import row_peaks
from loraplex.kernels.triton.sgmv import SgmvStep, sgmv_scratch

FIRST_RANKS = 64  # Σ ranks of a projection that there is room for at first


class GpuExecutor:
    """The executor of a decoder that is on a device, within `limits`.

    KV blocks and images share a region of `memory_bytes` of the device, which never moves. KV is
    kept in the computation's dtype unless `kv_dtype` is given.
    """

    def __init__(
        self,
        decoder: Decoder,
        limits: Limits,
        *,
        num_blocks: int,
        memory_bytes: int,
        swap_slots: int = 0,
        weight_bytes: int = 0,
        kv_dtype: torch.dtype | None = None,
        graphs: bool,
    ) -> None:
        config, device = decoder.config, decoder.device
        self.name = "triton"
        self.device, self.dtype = str(device), str(decoder.dtype).removeprefix("torch.")
        self.block_size, self.num_blocks = limits.block_size, num_blocks
        self.memory_bytes, self.swap_slots = memory_bytes, swap_slots
        self.weight_bytes = weight_bytes
        self.decoder = decoder
        self._buckets = buckets_for(limits.sequences)
        group = config.num_heads // config.num_kv_heads
        self._layouts = {b: make_layout(limits, group, b) for b in (None, *self._buckets)}
        self._metadata = Metadata(max(x.size for x in self._layouts.values()), device)
        self._choices = Choices(limits.tokens + limits.sequences, device)
        size = memory_bytes // ALIGNMENT * ALIGNMENT
        self._region = torch.zeros(size, dtype=torch.uint8, device=device)
        kv = decoder.kv_layout(limits.block_size, kv_dtype)
        self.block_bytes = kv.block_bytes
        blocks = self._region[: num_blocks * kv.block_bytes]
        self._blocks = blocks.view(num_blocks, kv.block_bytes)
        self._kv = kv.split(self._blocks)
        self._host = pinned_blocks(swap_slots, kv.block_bytes, device)
        widest = max((x.attention for x in self._layouts.values()), key=lambda x: x.partial_rows)
        self._partial = attention_scratch(widest, config.num_kv_heads, config.head_dim, device)
        self._images = DeviceImages(config, self._region)
        self.set_blocks(num_blocks)
        self.graphs: Graphs | NoGraphs = Graphs(self._outcome_room()) if graphs else NoGraphs()
        self._scratch = self._scratch_for(FIRST_RANKS)

    def set_blocks(self, count: int) -> None:
        """See `Executor`."""
        if count > self.num_blocks:
            raise ValueError(f"{count} blocks are more than {self.num_blocks}")
        self._images.set_floor(count * self.block_bytes)

    def prepare_image(self, header: ImageHeader, block: bytearray) -> StagedImage:
        """See `Executor`."""
        return self._images.stage(header, block)

    def add_image(self, digest: str, prepared: StagedImage) -> None:
        """See `Executor`."""
        ranks = largest_rank(prepared.header)
        if ranks > self._scratch.shape[2]:
            scratch = self._scratch_for(ranks)
            self.graphs.clear()
            self._scratch = scratch
        self._images.add(digest, prepared)

    def remove_image(self, digest: str) -> None:
        """See `Executor`."""
        self._images.remove(digest)

    def image_bytes(self, header: ImageHeader) -> int:
        """See `Executor`: its block, as it is."""
        return max(-(-header.block_bytes // ALIGNMENT), 1) * ALIGNMENT

    def copy_blocks(self, pairs: Pairs) -> None:
        """See `Executor`."""
        copy_blocks(self._blocks, self._blocks, pairs)

    def swap_out(self, pairs: Pairs) -> None:
        """See `Executor`."""
        copy_blocks(self._blocks, self._host, pairs)

    def swap_in(self, pairs: Pairs) -> None:
        """See `Executor`."""
        copy_blocks(self._host, self._blocks, pairs)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Outcome:
        """The outcome of the wanted rows; writes all rows' KV.

        Raises `DeviceLostError` when the device can do nothing any more.
        """
        with watched():
            return self._execute(batch)

    @torch.inference_mode()
    def rehearse(self, batch: Batch, kind: str) -> None:
        """Run a step of base rows with all that images of a dtype need, as if there were some."""
        with watched():
            self._execute(batch, (kind,))

    def _execute(self, batch: Batch, rehearsed: tuple[str, ...] = ()) -> Outcome:
        bucket = bucket_of(batch, self._buckets)
        if bucket is None:
            return self._compute(self.operators(batch, rehearsed))
        layout = self._layouts[bucket]
        kinds = self._send(batch, layout, rehearsed)
        outcome = self.graphs.run(
            (bucket, kinds),
            lambda: self._compute(self._operators(layout, bucket, bucket, kinds)),
        )
        wanted = len(batch.wanted)
        rows = (outcome.logits[:wanted], outcome.likeliest[:wanted], outcome.peak[:wanted])
        return Outcome(*rows, outcome.draw)

    @torch.inference_mode()
    def launch(self, batch: Batch, draws: Sequence[Draw | None]) -> Chosen:
        """See `AsyncExecutor`."""
        with watched():
            return self._choices.choose(self._execute(batch), draws)

    def wait(self) -> None:
        """See `AsyncExecutor`."""
        if self._region.is_cuda:
            with watched():
                torch.cuda.current_stream().synchronize()

    def operators(self, batch: Batch, rehearsed: tuple[str, ...] = ()) -> TritonOperators:
        """The operators of one step of just the batch's rows, valid until the next step."""
        layout = self._layouts[None]
        kinds = self._send(batch, layout, rehearsed)
        return self._operators(layout, len(batch.token_ids), len(batch.wanted), kinds)

    def _send(
        self, batch: Batch, layout: StepLayout, rehearsed: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Bring a step's metadata to the device; the dtypes of its images."""
        places, images = self._images.places, {segment.image for segment in batch.segments}
        kinds = kinds_of(images, places) or rehearsed
        self._images.wait_for(images)
        self._metadata.send(lambda buffer: layout.write(buffer, batch, places, kinds))
        if batch.token_ids.min(initial=0) < 0:
            self._choices.feed(self._metadata.ints[: len(batch.token_ids)])
        return kinds

    def _compute(self, operators: TritonOperators) -> Outcome:
        """Launch a step."""
        logits = self.decoder.forward(operators)
        return Outcome(logits, *row_peaks(logits), self._draw)

    @torch.inference_mode()
    def _draw(self, outcome: Outcome, draws: Sequence[Draw | None]) -> list[int | None]:
        return self._choices.choose(outcome, draws).result()

    def _operators(
        self, layout: StepLayout, rows: int, wanted: int, kinds: tuple[str, ...]
    ) -> TritonOperators:
        step = self._step(layout, rows, wanted, kinds)
        return TritonOperators(self.decoder, self._kv, self._images, step)

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

    def _outcome_room(self) -> Outcome:
        """Room for the outcome of the largest bucket."""
        rows, device = self._buckets[-1], self.decoder.device
        logits = torch.empty(rows, self.decoder.config.vocab_size, device=device)
        likeliest = torch.empty(rows, dtype=torch.int64, device=device)
        return Outcome(logits, likeliest, torch.empty(rows, device=device))

    def _scratch_for(self, ranks: int) -> Tensor:
        """Scratch for images of up to `ranks`, a power of two so that it rarely grows."""
        inputs = max(size for size, _ in projection_sizes(self.decoder.config).values())
        rounded = 1 << (ranks - 1).bit_length()
        rows = max(layout.rows for layout in self._layouts.values())
        return sgmv_scratch(rows, rounded, inputs, self.decoder.device)
