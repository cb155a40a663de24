"""How long operators and decode steps take on the device, beside the bytes that they must move.

Operators are timed over all layers in turn, so that no weight is in a cache. `share` is of the
bandwidth that a large copy reaches in the same run. A step's time is that of `execute` in a row,
without waiting for its results in between.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gpu_model import (
    BLOCK_SIZE,
    LLAMA_8B,
    RandomWeights,
    batch_of,
    block_bytes,
    model_config,
    random_image,
)

from loraplex.engine.batch import Batch
from loraplex.engine.draw import Draw
from loraplex.engine.gpu.executor import GpuExecutor
from loraplex.engine.gpu.graphs import NoGraphs
from loraplex.engine.gpu.linear import TiledLinears
from loraplex.engine.gpu.step_layout import Limits
from loraplex.engine.model.adapter import projection_sizes
from loraplex.engine.model.config import ModelConfig
from loraplex.engine.model.decoder import Decoder

Results = dict[str, Any]
DRAWN = SimpleNamespace(temperature=0.8, top_k=50, top_p=0.95, min_p=0.0)


@dataclass(frozen=True)
class Work:
    """What to measure: a model on a device, its adapters, and a sequence's tokens in the cache."""

    config: ModelConfig
    device: str
    dtype: torch.dtype
    rank: int
    rows: tuple[int, ...]
    adapters: tuple[int, ...]
    context: int
    prefill: int
    trials: int
    repeats: int
    copy_bytes: int


FULL = Work(
    LLAMA_8B, "cuda", torch.bfloat16, rank=16, rows=(1, 32, 64), adapters=(0, 1, 8, 32, 64),
    context=512, prefill=512, trials=3, repeats=20, copy_bytes=1 << 30,
)  # fmt: skip
DRY = Work(
    model_config(1, 32, 48, 4, 2, 16, 61), "cpu", torch.float32, rank=3, rows=(2,),
    adapters=(0, 2), context=9, prefill=4, trials=1, repeats=1, copy_bytes=1 << 10,
)  # fmt: skip


def measure(work: Work) -> Results:
    """Times of operators and steps."""
    executor = load(work)
    copy = copy_bandwidth(work)
    print(f"copy: {copy / 1e12:.2f} TB/s", flush=True)
    return {
        "copy_bytes_per_second": copy,
        "operators": operators(executor, work, copy),
        "prefill": prefill(executor, work),
        "decode": decode(executor, work),
        "choices": choices(executor, work),
    }


def load(work: Work) -> GpuExecutor:
    """The model with all adapters resident."""
    config, rows = work.config, max(work.rows)
    blocks = rows * -(-(work.context + work.prefill) // BLOCK_SIZE)
    images = [random_image(config, "bf16", (work.rank,), 0)] * max(work.adapters)
    decoder = Decoder(
        config, RandomWeights(work.device), work.dtype, work.context + work.prefill,
        TiledLinears().prepare,
    )  # fmt: skip
    limits = Limits(rows, max(work.prefill, rows), work.context + work.prefill, BLOCK_SIZE)
    executor = GpuExecutor(
        decoder,
        limits,
        num_blocks=blocks,
        memory_bytes=blocks * block_bytes(config, work.dtype)
        + sum(len(block) for _, block in images)
        + 128,
        graphs=work.device == "cuda",
    )
    for number, image in enumerate(images):
        executor.add_image(f"image {number:02d}", executor.prepare_image(*image))
    return executor


def decode_batch(work: Work, rows: int, adapters: int) -> Batch:
    """One token of each of `rows` sequences, under `adapters` images in equal shares, or none."""
    names = [f"image {n * adapters // rows:02d}" if adapters else None for n in range(rows)]
    return batch_of([(1, work.context)] * rows, names, work.config.vocab_size)


def operators(executor: GpuExecutor, work: Work, copy: float) -> Results:
    """Microseconds of each operator in one layer, at each number of rows and adapters."""
    found = {}
    for rows in work.rows:
        for adapters in work.adapters:
            if adapters <= rows:
                for name, (run, size) in launches(executor, work, rows, adapters).items():
                    seconds = timed(run, work) / work.config.num_layers
                    entry = {"microseconds": round(seconds * 1e6, 2), "bytes": size}
                    entry["share"] = round(size / seconds / copy, 3)
                    found[f"{name}, {rows} rows, {adapters} adapters"] = entry
    for name, entry in found.items():
        print(f"{name}: {entry['microseconds']} us, {entry['share']:.0%} of copy", flush=True)
    return found


def launches(
    executor: GpuExecutor, work: Work, rows: int, adapters: int
) -> dict[str, tuple[Callable[[], None], int]]:
    """By operator: its run over all layers, and the bytes that one layer must move."""
    config, ops = work.config, executor.operators(decode_batch(work, rows, adapters))
    layers, item = list(enumerate(executor.decoder.layers)), work.dtype.itemsize
    found: dict[str, tuple[Callable[[], None], int]] = {}

    def tensor(*shape: int, dtype: torch.dtype = work.dtype) -> torch.Tensor:
        return torch.randn(*shape, device=work.device).to(dtype)

    for name, (size, outs) in projection_sizes(config).items():
        x, out = tensor(rows, size), sum(outs)
        base = size * out * item + rows * (size * item + out * 4)
        lora = adapters * work.rank * (len(outs) * size + out) * 2 + rows * out * 8
        found[f"project {name}"] = (
            lambda x=x, name=name: (
                [ops.project(x, getattr(layer, name), n, name) for n, layer in layers] and None
            ),
            base + (lora if adapters else 0),
        )
    if not adapters:
        qkv = tensor(rows, config.query_size + 2 * config.kv_size, dtype=torch.float32)
        found["attend"] = (
            lambda: [ops.attend(qkv, None, n) for n, _ in layers] and None,
            rows * work.context * 2 * config.kv_size * item,
        )
        x, residual = tensor(rows, config.hidden_size), tensor(rows, config.hidden_size)
        found["add_norm"] = (
            lambda: [ops.add_norm(x, residual, w.mlp_norm) for _, w in layers] and None,
            4 * rows * config.hidden_size * item,
        )
        gate_up = tensor(rows, 2 * config.intermediate_size, dtype=torch.float32)
        found["silu_mul"] = (
            lambda: [ops.silu_mul(gate_up) for _ in layers] and None,
            rows * config.intermediate_size * (8 + item),
        )
    return found


def decode(executor: GpuExecutor, work: Work) -> Results:
    """Tokens per second of decode steps, with graphs and launch by launch."""
    graphs, found = executor.graphs, {}
    for way, executor.graphs in (("graph", graphs), ("launches", NoGraphs())):
        for rows in work.rows:
            for adapters in (n for n in work.adapters if n <= rows):
                batch = decode_batch(work, rows, adapters)
                seconds = step_seconds(executor, batch, work)
                name = f"{rows} rows, {adapters} adapters, {way}"
                found[name] = {
                    "milliseconds": round(seconds * 1e3, 3),
                    "tokens_per_second": round(rows / seconds, 1),
                }
                print(f"decode {name}: {rows / seconds:.0f} tokens/s", flush=True)
    executor.graphs = graphs
    return found


def choices(executor: GpuExecutor, work: Work) -> Results:
    """Tokens per second when the device chooses and the host reads each token."""
    found = {}
    for way, draw in (("likeliest", None), ("drawn", Draw(DRAWN, 0.5))):
        for rows in work.rows:
            batch, draws = decode_batch(work, rows, 0), [draw] * rows
            batch = replace(batch, token_ids=-1 - np.arange(rows, dtype=np.int32))
            run_steps(executor, batch, draws, 1, ahead=False)
            for order in ("in turn", "ahead"):
                started = time.perf_counter()
                run_steps(executor, batch, draws, work.repeats, ahead=order == "ahead")
                rate = rows * work.repeats / (time.perf_counter() - started)
                found[f"{rows} rows, {way}, {order}"] = round(rate, 1)
                print(f"choices {rows} rows, {way}, {order}: {rate:.0f} tokens/s", flush=True)
    return found


def run_steps(
    executor: GpuExecutor, batch: Batch, draws: Sequence[Draw | None], steps: int, *, ahead: bool
) -> None:
    """Run steps on the tokens of the one before, which are read before the launch or after it."""
    flight = executor.launch(batch, draws)
    for _ in range(steps - 1):
        if not ahead:
            flight.result()
        flight, before = executor.launch(batch, draws), flight
        if ahead:
            before.result()
    flight.result()


def prefill(executor: GpuExecutor, work: Work) -> Results:
    """Tokens per second of one sequence's chunk of tokens."""
    found = {}
    for image in (None, "image 00"):
        batch = batch_of([(work.prefill, work.prefill)], [image], work.config.vocab_size)
        seconds = step_seconds(executor, batch, work)
        found["adapter" if image else "base"] = round(work.prefill / seconds, 1)
    print(f"prefill: {found} tokens/s", flush=True)
    return found


def step_seconds(executor: GpuExecutor, batch: Batch, work: Work) -> float:
    """Of one step among many."""
    executor.execute(batch).likeliest.tolist()
    times = []
    for _ in range(work.trials):
        started = time.perf_counter()
        for _ in range(work.repeats):
            outcome = executor.execute(batch)
        outcome.likeliest.tolist()
        times.append((time.perf_counter() - started) / work.repeats)
    return statistics.median(times)


def timed(run: Callable[[], None], work: Work) -> float:
    """Seconds of one run, as a graph where there are graphs."""
    with torch.inference_mode():
        run()
        if work.device == "cpu":
            return wall(run)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        return statistics.median(device_seconds(graph.replay) for _ in range(5))


def wall(run: Callable[[], None]) -> float:
    """Seconds by the wall's clock."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def device_seconds(run: Callable[[], None]) -> float:
    """Seconds by the device's clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def copy_bandwidth(work: Work) -> float:
    """Bytes read and written a second by a large copy."""
    source = torch.zeros(work.copy_bytes, dtype=torch.uint8, device=work.device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * work.copy_bytes / timed(copy, work)
