"""Is every operator right on the device? Against the plain torch ones on the CPU, in fp32.

Both compute on the same numbers, rounded to bf16; the device rounds results to bf16 and sums in
fp32. And bits: a row alone is the row in company, and a graph's step is the step.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import torch
from gpu_model import (
    BLOCK_SIZE,
    RandomWeights,
    batch_of,
    block_bytes,
    model_config,
    random_image,
)
from torch import Tensor

from loraplex.engine.batch import Batch, Segment, Span
from loraplex.engine.draw import Draw, Drawer
from loraplex.engine.executor import TorchExecutor
from loraplex.engine.gpu.choices import Choices
from loraplex.engine.gpu.executor import GpuExecutor
from loraplex.engine.gpu.graphs import NoGraphs
from loraplex.engine.gpu.linear import TiledLinears
from loraplex.engine.gpu.step_layout import Limits
from loraplex.engine.model.adapter import projection_sizes
from loraplex.engine.model.config import ModelConfig
from loraplex.engine.model.decoder import Decoder
from loraplex.engine.outcome import Outcome, outcome_of
from loraplex.kernels.triton.sampling import row_peaks

TOLERANCE = 8e-3  # of an error's norm, relative; bf16 has 8 bits
TOLERANCE_OF_STEP = 4e-2  # all operators of two layers one after the other
KINDS = ("bf16", "int8", "fp32")

DRAWN = [
    SimpleNamespace(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.9, 0.0), (30, 0.95, 0.01))
]
IMAGE_ROOM = 1 << 27  # bytes


def check(device: str) -> tuple[dict[str, float], list[str]]:
    """Errors by operator and model, and the names of those that are wrong."""
    errors: dict[str, float] = {}
    for name, config in models(device).items():
        plain, gpu = executors(config, device)
        for operator, error in operator_errors(plain, gpu, config):
            errors[f"{name} {operator}"] = error
        for what, differs in different_bits(gpu, config):
            errors[f"{name} {what}"] = differs
        errors[f"{name} draws"] = different_draws(config, device)
    for what, error in errors.items():
        print(f"{what}: {error:.1e}", flush=True)
    wrong = [
        what
        for what, error in errors.items()
        if not error < (TOLERANCE_OF_STEP if what.endswith("step") else TOLERANCE)
    ]
    return errors, wrong


def models(device: str) -> dict[str, ModelConfig]:
    """Models that between them need every path of the kernels."""
    if device == "cpu":
        return {"tiny": model_config(2, 32, 48, 4, 2, 16, 61, window=9, plain=False)}
    return {
        "llama": model_config(2, 1024, 2816, 8, 2, 128, 4099),
        "biases, norms, window": model_config(
            2, 960, 2560, 15, 5, 64, 4099, window=50, plain=False
        ),
    }


def executors(config: ModelConfig, device: str) -> tuple[TorchExecutor, GpuExecutor]:
    """The same weights and images on the CPU and on the device."""
    limits, blocks = (
        (Limits(4, 16, 64, 16), 12) if device == "cpu" else (Limits(32, 1024, 2048, 16), 600)
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    plain = TorchExecutor(
        Decoder(config, RandomWeights("cpu"), torch.float32, limits.length),
        block_size=BLOCK_SIZE,
        num_blocks=blocks,
        memory_bytes=blocks * block_bytes(config, torch.float32) + IMAGE_ROOM,
    )
    decoder = Decoder(config, RandomWeights(device), dtype, limits.length, TiledLinears().prepare)
    gpu = GpuExecutor(
        decoder,
        limits,
        num_blocks=blocks,
        memory_bytes=blocks * block_bytes(config, dtype) + IMAGE_ROOM,
        graphs=device != "cpu",
    )
    for seed, kind in enumerate(KINDS):
        image = random_image(config, kind, (3, 0, 16, 33), seed, rows=kind == "bf16")
        for executor in (plain, gpu):
            executor.add_image(kind, executor.prepare_image(*image))
    return plain, gpu


def mixed(config: ModelConfig, tiny: bool) -> Batch:
    """Decodes and prefills, of the base and of an image of each dtype."""
    spans = (
        [(1, 20), (5, 9), (1, 33), (2, 2)] if tiny else [(1, 1500), (300, 300), (1, 77), (90, 700)]
    )
    return batch_of(spans, (None, *KINDS), config.vocab_size)


def operator_errors(
    plain: TorchExecutor, gpu: GpuExecutor, config: ModelConfig
) -> Iterator[tuple[str, float]]:
    """Relative error of each operator on random numbers, then of a whole step."""
    batch = mixed(config, gpu.device == "cpu")
    fill_caches(plain, gpu)
    expected, found = plain.operators(batch), gpu.operators(batch)
    rows, layer = len(batch.token_ids), config.num_layers - 1
    weights, moved = plain._decoder.layers[layer], gpu.decoder.layers[layer]

    def both(*shape: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        return x.float(), x.to(gpu.device, getattr(torch, gpu.dtype))

    x, residual = both(rows, config.hidden_size), both(rows, config.hidden_size)
    yield (
        "norm",
        difference(
            expected.add_norm(x[0], residual[0], weights.attention_norm),
            found.add_norm(x[1], residual[1], moved.attention_norm),
        ),
    )
    for name in ("qkv", "o", "gate_up", "down"):
        x = both(rows, projection_sizes(config)[name][0])
        yield (
            name,
            difference(
                expected.project(x[0], getattr(weights, name), layer, name),
                found.project(x[1], getattr(moved, name), layer, name),
            ),
        )
    x = both(rows, config.query_size + 2 * config.kv_size)
    yield (
        "attention",
        difference(
            expected.attend(x[0], weights.norms, layer), found.attend(x[1], moved.norms, layer)
        ),
    )
    x = both(rows, 2 * config.intermediate_size)
    yield "gate", difference(expected.silu_mul(x[0]), found.silu_mul(x[1]))
    outcome = gpu.execute(batch)
    yield "peak", difference(outcome_of(outcome.logits).peak, outcome.peak)
    yield "step", difference(plain.execute(batch).logits, outcome.logits)


def fill_caches(plain: TorchExecutor, gpu: GpuExecutor) -> None:
    """The same keys and values of earlier tokens in both caches."""
    values = torch.randn(plain._cache.data.shape, generator=torch.Generator().manual_seed(1))
    plain._cache.data.copy_(values.bfloat16())
    gpu._kv[0].copy_(values.bfloat16())


def different_bits(gpu: GpuExecutor, config: ModelConfig) -> Iterator[tuple[str, float]]:
    """Whether company, or a graph, changes a bit of the logits: 0 is right."""
    decodes = batch_of([(1, 20)] * 3, (None, "bf16", "int8"), config.vocab_size)
    replayed = gpu.execute(decodes).logits.clone()
    graphs, gpu.graphs = gpu.graphs, NoGraphs()
    yield "graph", unequal(gpu.execute(decodes).logits, replayed)
    gpu.graphs = graphs
    batch = mixed(config, gpu.device == "cpu")
    together = gpu.execute(batch).logits.clone()
    for number in (0, 2):  # of the base, of an image
        alone = gpu.execute(only(batch, number)).logits
        yield f"company of row {number}", unequal(alone[0], together[number])


def different_draws(config: ModelConfig, device: str) -> float:
    """Share of rows for which the device draws another token than the host, from equal logits."""
    logits = torch.randn(32, config.vocab_size, generator=torch.Generator().manual_seed(3)) * 3
    on_device = logits.to(device)
    outcome = Outcome(on_device, *row_peaks(on_device))
    draws = [Draw(DRAWN[row % len(DRAWN)], row / 32) for row in range(32)]
    found = Choices(32, on_device.device).choose(outcome, draws).result()
    drawer = Drawer(config.vocab_size)
    expected = [
        drawer.draw(row.numpy(), float(row.max()), *draw)
        for row, draw in zip(logits, draws, strict=True)
    ]
    return sum(a != b for a, b in zip(found, expected, strict=True)) / 32


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


def unequal(a: Tensor, b: Tensor) -> float:
    """1 when a number differs, else 0."""
    return float(not torch.equal(a, b))


def difference(expected: Tensor, found: Tensor) -> float:
    """Norm of the error over the norm of what is right."""
    error = found.detach().to("cpu", torch.float64) - expected.double()
    return float(error.norm() / expected.double().norm())
