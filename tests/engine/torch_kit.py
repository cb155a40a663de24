"""Runs sequences through an executor, for tests; loaded by the fixture `torch_kit`."""

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loraplex.engine.batch import Batch, build
from loraplex.engine.executor import Executor, TorchExecutor
from loraplex.engine.image_builder import ImageBuilder, SliceData
from loraplex.engine.images import ImageHeader, read_image
from loraplex.engine.model.adapter import projection_sizes
from loraplex.engine.model.config import ModelConfig, read_model_config
from loraplex.engine.model.decoder import load_decoder
from loraplex.engine.model.weights import Checkpoint
from loraplex.engine.native.executor import NativeExecutor, Team
from loraplex.engine.native.weights import are_bf16, choose_precision, pack_base
from loraplex.kernels.cpu.library import load_library

BLOCK_SIZE, MAX_ROWS = 16, 512
IMAGE_ROOM = 1 << 30  # bytes of a region that are left to images: none are taken before their use


@dataclass(eq=False)
class Track:
    """A sequence and what is computed of it."""

    token_ids: list[int]
    image: str | None = None
    block_table: list[int] = field(default_factory=list)
    computed: int = 0
    adapter_start: int | None = 0
    drafts: list[int] = field(default_factory=list)


@dataclass
class Part:
    sequence: Track
    start: int
    count: int
    wanted: int


def load(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    blocks: int = 400,
    *,
    swap_slots: int = 0,
    room: int = IMAGE_ROOM,
    kv_dtype: torch.dtype | None = None,
) -> TorchExecutor:
    """An executor of `blocks` KV blocks, and `room` bytes for images."""
    config = read_model_config(directory)
    decoder = load_decoder(directory, config, dtype, config.max_positions)
    token_bytes = 2 * config.num_layers * config.kv_size * dtype.itemsize
    return TorchExecutor(
        decoder, block_size=BLOCK_SIZE, num_blocks=blocks, swap_slots=swap_slots,
        memory_bytes=blocks * BLOCK_SIZE * token_bytes + room, kv_dtype=kv_dtype,
    )  # fmt: skip


def load_native(
    directory: Path,
    blocks: int = 400,
    *,
    swap_slots: int = 0,
    room: int = IMAGE_ROOM,
    **asked: Any,
) -> NativeExecutor:
    """`asked` are the settings `dtype` and `quantization`, and `kv_dtype`."""
    config, library = read_model_config(directory), load_library()
    asked = {"dtype": "float32", "quantization": "none"} | asked
    precision = choose_precision(
        **asked, stored_bf16=are_bf16(directory), activations=library.activations
    )
    base = pack_base(Checkpoint(directory), config, precision, library, config.max_positions, 2)
    base.struct.block_size = BLOCK_SIZE
    return NativeExecutor(
        base, library, block_size=BLOCK_SIZE, num_blocks=blocks, swap_slots=swap_slots,
        memory_bytes=blocks * library.kv_block_bytes(base.struct) + room,
        max_rows=MAX_ROWS, max_wanted=MAX_ROWS, team=Team(2),
    )  # fmt: skip


LOAD: dict[str, Any] = {
    "torch": lambda directory, dtype: load(directory, getattr(torch, dtype)),
    "native": lambda directory, dtype: load_native(directory, dtype=dtype),
}


class Runner:
    """Gives each sequence blocks of its own, in no order; blocks may hold what others left."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.free = np.random.default_rng(0).permutation(executor.num_blocks).tolist()

    def step(self, *parts: tuple[Track, int]) -> list[Tensor]:
        """Run the next `count` tokens of each track; logits of all these tokens, by part."""
        batch, order, chosen = self.batch(*parts)
        logits = self.executor.execute(batch).logits.clone()
        spans = {id(p): logits[s.start : s.end] for p, s in zip(order, batch.spans, strict=True)}
        return [spans[id(part)] for part in chosen]

    def batch(self, *parts: tuple[Track, int]) -> tuple[Batch, list[Part], list[Part]]:
        """The next `count` tokens of each track, all wanted; parts in row order, and as given."""
        chosen = [Part(track, track.computed, count, count) for track, count in parts]
        for part in chosen:
            part.sequence.computed += part.count
            need = -(-part.sequence.computed // self.executor.block_size) - len(
                part.sequence.block_table
            )
            part.sequence.block_table += [self.free.pop() for _ in range(need)]
        return *build(chosen, self.executor.block_size), chosen

    def logits(self, token_ids: Sequences[int], image: str | None = None) -> Tensor:
        """Logits of all tokens `[T, vocabulary]`, in one step alone."""
        track = Track(list(token_ids), image)
        logits = self.step((track, len(track.token_ids)))[0]
        self.release(track)
        return logits

    def greedy(self, tracks: Sequences[Track], steps: int, chunks: Sequences[int] = ()) -> None:
        """Extend all tracks by `steps` tokens in common batches.

        Prompts run in pieces of the sizes in `chunks`, in turn, so that decodes run among prefills.
        """
        turn, lengths = 0, [len(t.token_ids) + steps for t in tracks]
        while unfinished := [
            t for t, n in zip(tracks, lengths, strict=True) if len(t.token_ids) < n
        ]:
            parts = []
            for track in unfinished:
                pending = len(track.token_ids) - track.computed
                size = chunks[turn % len(chunks)] if chunks else pending
                parts.append((track, min(pending, size)))
                turn += 1
            for (track, _), logits in zip(parts, self.step(*parts), strict=True):
                if track.computed == len(track.token_ids):
                    track.token_ids.append(int(logits[-1].argmax()))

    def release(self, *tracks: Track) -> None:
        for track in tracks:
            self.free += track.block_table
            track.block_table, track.computed = [], 0


def random_image(
    path: Path, config: ModelConfig, seed: int, scale: float = 0.1, projections: str = "qkv o"
) -> str:
    """Write an image with odd ranks, gains and biases in every other layer; its digest."""
    random = np.random.default_rng(seed)
    builder = ImageBuilder("f" * 64, "fp32")
    for layer in range(0, config.num_layers, 2):
        for name in projections.split():
            wide_in, outs = projection_sizes(config)[name]
            ranks = [(seed + i) % 4 for i in range(len(outs))]
            total = sum(ranks)
            slices = [
                SliceData(
                    rank,
                    out,
                    _bytes(random.normal(size=(rank, out))),
                    _bytes(random.uniform(0.9, 1.1, out)) if seed % 2 else None,
                    _bytes(random.normal(size=out) * scale) if seed % 3 == 0 else None,
                )
                for rank, out in zip(ranks, outs, strict=True)
            ]
            a = _bytes(random.normal(size=(total, wide_in)))
            builder.add(layer, name, wide_in, a, _bytes(np.full(total, scale)), slices)
    return builder.finish(path)


def add_image(executor: Executor, path: Path, digest: str) -> None:
    """Make the image of a file resident."""
    add(executor, digest, *read_image(path, digest))


def add(executor: Executor, name: str, header: ImageHeader, block: bytearray) -> None:
    """Make an image resident under `name`."""
    executor.add_image(name, executor.prepare_image(header, block))


def _bytes(array: np.ndarray) -> bytes:
    return array.astype(np.float32).tobytes()
