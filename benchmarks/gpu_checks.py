"""Is every operator right on the device? Against the plain torch ones on the CPU, in fp32.

Both compute on the same numbers, rounded to bf16; the device rounds results to bf16 and sums in
fp32. And bits: codes of int8 KV are those of what else were kept, a row alone is the row in
company, a prompt in chunks is the prompt, a graph's step is the step. `gpu_moves.py` has what
changes between steps, `gpu_tokens.py` what is chosen.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from gpu_compare import (
    TOLERANCE,
    TOLERANCE_OF_CODES,
    TOLERANCE_OF_STEP,
    Check,
    difference,
    told,
    unequal,
)
from gpu_model import BLOCK_SIZE, RandomWeights, batch_of, model_config
from gpu_moves import KINDS, Moves, add
from gpu_tokens import Ahead, draws
from torch import Tensor

from loraplex.engine.batch import Batch, Segment, Span
from loraplex.engine.executor import TorchExecutor
from loraplex.engine.gpu.executor import GpuExecutor
from loraplex.engine.gpu.graphs import NoGraphs
from loraplex.engine.gpu.linear import TiledLinears
from loraplex.engine.gpu.operators import TritonOperators
from loraplex.engine.gpu.step_layout import Limits
from loraplex.engine.model.adapter import projection_sizes
from loraplex.engine.model.config import ModelConfig
from loraplex.engine.model.decoder import Decoder
from loraplex.engine.outcome import outcome_of
from loraplex.kernels.kv_cache import token_blocks
from loraplex.kernels.kv_rows import quantise

IMAGE_ROOM = 1 << 27  # bytes


@dataclass(frozen=True)
class Subject:
    """The same model, with the same images, on the CPU and on the device."""

    config: ModelConfig
    plain: TorchExecutor
    gpu: GpuExecutor

    @property
    def batch(self) -> Batch:
        """Decodes and prefills, of the base and of an image of each dtype."""
        spans = [(1, 1500), (300, 300), (1, 77), (90, 700)]
        if self.gpu.device == "cpu":
            spans = [(1, 20), (5, 9), (1, 33), (2, 2)]
        return batch_of(spans, (None, *KINDS), self.config.vocab_size)

    @property
    def is_int8(self) -> bool:
        """Whether KV is kept as int8."""
        return self.gpu._kv[1] is not None

    def both(self, *shape: int) -> tuple[Tensor, Tensor]:
        """The same random numbers on both."""
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        return x.float(), x.to(self.gpu.device, getattr(torch, self.gpu.dtype))


def check(device: str) -> list[Check]:
    """All checks of each model; in the interpreter each check once, as it takes its time."""
    found: list[Check] = []
    for name, (config, kv_dtype) in models(device).items():
        subject = load(config, kv_dtype, device)
        fill_caches(subject)
        groups = [attention, steps]
        if not subject.is_int8:
            groups.insert(0, operators)
        if subject.is_int8 or device != "cpu":
            groups += [moves]
        for group in groups:
            found += told(name, partial(group, subject))
    sizes = [(61, 16)] if device == "cpu" else [(4099, 64), (128256, 64)]
    for vocabulary, rows in sizes:
        found += told("all", partial(draws, vocabulary, rows, device))
    return found


def models(device: str) -> dict[str, tuple[ModelConfig, torch.dtype | None]]:
    """Models that between them need every path of the kernels, and what they keep KV as."""
    if device == "cpu":
        return {
            "tiny": (model_config(2, 32, 48, 4, 2, 16, 61, window=9, plain=False), None),
            "tiny, int8 KV": (model_config(1, 32, 48, 4, 2, 16, 61), torch.int8),
        }
    llama = model_config(2, 1024, 2816, 8, 2, 128, 4099)
    other = model_config(2, 960, 2560, 15, 5, 64, 4099, window=50, plain=False)
    return {
        "llama": (llama, None),
        "llama, int8 KV": (llama, torch.int8),
        "biases, norms, window": (other, None),
        "biases, norms, window, int8 KV": (other, torch.int8),
    }


def load(config: ModelConfig, kv_dtype: torch.dtype | None, device: str) -> Subject:
    """The same weights and images on both; room to swap two blocks."""
    dtype, limits, blocks = torch.bfloat16, Limits(32, 1024, 2048, 16), 600
    if device == "cpu":
        dtype, limits, blocks = torch.float32, Limits(4, 16, 64, 16), 12
    decoders = (
        Decoder(config, RandomWeights("cpu"), torch.float32, limits.length),
        Decoder(config, RandomWeights(device), dtype, limits.length, TiledLinears().prepare),
    )
    rooms = [
        blocks * decoder.kv_layout(BLOCK_SIZE, kv_dtype).block_bytes + IMAGE_ROOM
        for decoder in decoders
    ]
    plain = TorchExecutor(
        decoders[0], block_size=BLOCK_SIZE, num_blocks=blocks, memory_bytes=rooms[0],
        kv_dtype=kv_dtype,
    )  # fmt: skip
    gpu = GpuExecutor(
        decoders[1], limits, num_blocks=blocks, memory_bytes=rooms[1], swap_slots=2,
        kv_dtype=kv_dtype, graphs=device != "cpu",
    )  # fmt: skip
    for kind in KINDS:
        add(plain, config, kind)
        add(gpu, config, kind)
    return Subject(config, plain, gpu)


def fill_caches(subject: Subject) -> None:
    """The same keys and values of earlier tokens in both caches."""
    cache, generator = subject.plain._cache, torch.Generator().manual_seed(1)
    rows = torch.randn(cache.data.shape, generator=generator).bfloat16().float()
    kept, scales = subject.gpu._kv
    if scales is not None:
        rows, row_scales = quantise(rows)
        cache.scales.copy_(row_scales)
        scales.copy_(row_scales)
    cache.data.copy_(rows)
    kept.copy_(rows)


def operators(subject: Subject) -> Iterator[Check]:
    """All operators but attention, on random numbers."""
    config, plain, gpu = subject.config, subject.plain, subject.gpu
    batch, layer = subject.batch, config.num_layers - 1
    expected, found, rows = plain.operators(batch), gpu.operators(batch), len(batch.token_ids)
    weights, moved = plain._decoder.layers[layer], gpu.decoder.layers[layer]
    x, residual = (subject.both(rows, config.hidden_size) for _ in range(2))
    norms = (
        expected.add_norm(x[0], residual[0], weights.attention_norm),
        found.add_norm(x[1], residual[1], moved.attention_norm),
    )
    yield Check("norm", difference(*norms))
    for name, (size, _) in projection_sizes(config).items():
        x = subject.both(rows, size)
        products = (
            expected.project(x[0], getattr(weights, name), layer, name),
            found.project(x[1], getattr(moved, name), layer, name),
        )
        yield Check(name, difference(*products))
    x = subject.both(rows, 2 * config.intermediate_size)
    yield Check("gate", difference(expected.silu_mul(x[0]), found.silu_mul(x[1])))


def attention(subject: Subject) -> Iterator[Check]:
    """The write of KV, and attention over what was and is written."""
    config, plain, gpu = subject.config, subject.plain, subject.gpu
    batch, layer = subject.batch, config.num_layers - 1
    expected, found = plain.operators(batch), gpu.operators(batch)
    weights, moved = plain._decoder.layers[layer], gpu.decoder.layers[layer]
    x = subject.both(len(batch.token_ids), config.query_size + 2 * config.kv_size)
    heads = found.attend(x[1], moved.norms, layer)
    limit = TOLERANCE_OF_CODES if subject.is_int8 else TOLERANCE
    yield Check("attention", difference(expected.attend(x[0], weights.norms, layer), heads), limit)
    if subject.is_int8:
        own = gpu.decoder.kv_layout(BLOCK_SIZE)
        room = torch.zeros(gpu.num_blocks, own.block_bytes, dtype=torch.uint8, device=gpu.device)
        kept = own.split(room)
        TritonOperators(gpu.decoder, kept, gpu._images, found._step).attend(
            x[1], moved.norms, layer
        )
        codes, scales = quantise(rows_of(batch, kept[0], layer))
        yield Check("int8 codes", unequal(codes, rows_of(batch, gpu._kv[0], layer)))
        yield Check("int8 scales", unequal(scales, rows_of(batch, gpu._kv[1], layer)))


def rows_of(batch: Batch, kept: Tensor | None, layer: int) -> Tensor:
    """What a step wrote of a layer, `[rows, 2, kv heads, …]`, on the CPU."""
    assert kept is not None
    positions = [batch.positions[span.start : span.end] for span in batch.spans]
    blocks, offsets = token_blocks(batch.block_tables, positions, BLOCK_SIZE)
    return kept[:, layer].cpu()[torch.from_numpy(blocks), :, :, torch.from_numpy(offsets)]


def steps(subject: Subject) -> Iterator[Check]:
    """Whole steps; and whether company, chunks or a graph change a bit of the logits."""
    gpu, batch = subject.gpu, subject.batch
    outcome = gpu.execute(batch)
    together = outcome.logits.clone()
    yield Check("peak", difference(outcome_of(outcome.logits).peak.cpu(), outcome.peak))
    error = difference(subject.plain.execute(batch).logits, outcome.logits)
    yield Check("step", error, TOLERANCE_OF_STEP)
    for number, whose in ((0, "base"), (2, "image")):
        alone = gpu.execute(only(batch, number)).logits
        yield Check(f"company, {whose} row", unequal(alone[0], together[number]))
    prompt, cut = (300, 130) if gpu.device != "cpu" else (5, 2)
    whole = batch_of([(prompt, prompt)], [KINDS[0]], subject.config.vocab_size)
    at_once = gpu.execute(whole).logits.clone()
    gpu.execute(piece(whole, 0, cut))
    yield Check("chunks", unequal(gpu.execute(piece(whole, cut, prompt)).logits, at_once))
    decodes = batch_of([(1, 20)] * 3, (None, *KINDS[:2]), subject.config.vocab_size)
    replayed = gpu.execute(decodes).logits.clone()
    graphs, gpu.graphs = gpu.graphs, NoGraphs()
    yield Check("graph", unequal(gpu.execute(decodes).logits, replayed))
    gpu.graphs = graphs


def moves(subject: Subject) -> Iterator[Check]:
    """What changes between steps, then the order in which steps are given."""
    moved = Moves(subject.gpu, subject.config)
    yield from moved.blocks()
    yield from Ahead(subject.gpu, subject.config).checks()
    yield from moved.images()


def only(batch: Batch, number: int) -> Batch:
    """A sequence of one row, without the others."""
    span = batch.spans[number]
    row = slice(span.start, span.end)
    return Batch(
        batch.token_ids[row],
        batch.positions[row],
        (Span(0, 1, span.context),),
        (batch.block_tables[number],),
        tuple(Segment(s.image, 0, 1) for s in batch.segments if s.start == span.start),
        np.zeros(1, np.int32),
    )


def piece(prompt: Batch, start: int, end: int) -> Batch:
    """Rows `[start, end)` of a batch's one sequence, after those before; the last is wanted."""
    count, (segment,) = end - start, prompt.segments
    return Batch(
        prompt.token_ids[start:end],
        prompt.positions[start:end],
        (Span(0, count, end),),
        prompt.block_tables,
        (Segment(segment.image, 0, count),),
        np.array([count - 1], np.int32),
    )
