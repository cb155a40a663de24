"""Loads the base into the executor that runs it here, and sizes its memory.

This file knows the executors and how much memory is left for them. It refuses to know what they
compute.
"""

import logging
import math
import os
from pathlib import Path

import torch

from loraplex.engine import report
from loraplex.engine.checkpoint import tensor_shapes
from loraplex.engine.choice import Choice, choose_executor, refuse_quantization
from loraplex.engine.cores import available_cores
from loraplex.engine.executor import DTYPES, Executor, TorchExecutor
from loraplex.engine.images import BaseManifest
from loraplex.engine.memory import available_bytes
from loraplex.engine.model.config import ModelConfig, read_model_config
from loraplex.engine.model.decoder import load_decoder
from loraplex.engine.model.weights import Checkpoint
from loraplex.engine.native.executor import NativeExecutor, Team
from loraplex.engine.native.weights import are_bf16, choose_precision, pack_base
from loraplex.engine.settings import EngineSettings, SettingsError
from loraplex.engine.sizing import Sizes, divide
from loraplex.kernels.cpu.build import BuildError
from loraplex.kernels.cpu.library import Library, load_library
from loraplex.kernels.dispatch import LOSS, BackendError, is_insisted_on

TOUCHED_BYTES = 1 << 30  # of KV blocks, at start: whoever first writes a page waits for it

log = logging.getLogger(__name__)


def load_executor(manifest: BaseManifest, settings: EngineSettings) -> Executor:
    """Load the base and size KV blocks, images and swap by what memory is left.

    Raises `ModelError` when the model cannot be run, `SettingsError` or `BackendError` when what
    was asked for is not there, `OSError` when the model cannot be read.
    """
    directory = Path(manifest.path)
    config = read_model_config(directory)
    choice, library = _choose(config, settings)
    level = logging.WARNING if choice.executor == "torch" else logging.INFO
    log.log(level, "the %s executor runs: %s", choice.executor, choice.why)
    if choice.executor == "gpu":
        return _load_gpu(manifest, settings)
    if library is not None:
        return load_native(directory, config, settings, library)
    return load_torch(directory, config, settings)


def _choose(config: ModelConfig, settings: EngineSettings) -> tuple[Choice, Library | None]:
    """The executor, and its library where it is the native one, built if need be."""
    choice = choose_executor(config, settings)
    if choice.executor != "native":
        return choice, None
    try:
        return choice, load_library()
    except BuildError as error:
        if is_insisted_on():
            raise BackendError(f"the native step is asked for, but {error}") from error
        instead = Choice("torch", f"{error}; {LOSS}")
        refuse_quantization(settings, instead)
        return instead, None


def load_native(
    directory: Path, config: ModelConfig, settings: EngineSettings, library: Library
) -> NativeExecutor:
    """The native executor of a model directory."""
    team, length = choose_team(settings), _length(config, settings)
    name = "bfloat16" if settings.dtype == "auto" else settings.dtype
    precision = choose_precision(
        name,
        settings.quantization,
        stored_bf16=are_bf16(directory),
        activations=library.activations,
        w8a8_kind=library.w8a8_kind,
        kv_dtype=getattr(torch, settings.choose_kv_dtype("native", name, "int8")),
    )
    weights = Checkpoint(directory)
    base = pack_base(weights, config, precision, library, length, team.threads)
    base.struct.block_size = settings.block_size
    block_bytes = library.kv_block_bytes(base.struct)
    sizes = _divide_host(settings, block_bytes, length, base.arena.used)
    executor = NativeExecutor(
        base,
        library,
        block_size=settings.block_size,
        num_blocks=sizes.num_blocks,
        memory_bytes=sizes.memory_bytes,
        swap_slots=sizes.swap_slots,
        max_rows=settings.max_num_batched_tokens,
        max_wanted=settings.max_wanted,
        team=team,
    )
    executor.touch_blocks(TOUCHED_BYTES)
    return executor


def load_torch(directory: Path, config: ModelConfig, settings: EngineSettings) -> TorchExecutor:
    """The torch executor of a model directory, on a CPU."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    name = "float32" if settings.dtype == "auto" else settings.dtype
    kv_dtype = getattr(torch, settings.choose_kv_dtype("torch", name, "int8"))
    length = _length(config, settings)
    decoder = load_decoder(directory, config, DTYPES[name], length)
    block_bytes = decoder.kv_layout(settings.block_size, kv_dtype).block_bytes
    sizes = _divide_host(settings, block_bytes, length, fp32_bytes(config))
    return TorchExecutor(
        decoder,
        block_size=settings.block_size,
        num_blocks=sizes.num_blocks,
        memory_bytes=sizes.memory_bytes,
        swap_slots=sizes.swap_slots,
        weight_bytes=fp32_bytes(config),
        kv_dtype=kv_dtype,
    )


def choose_team(settings: EngineSettings) -> Team:
    """The threads of the native step; raises `SettingsError` for cores that are not ours."""
    if settings.cores is None:
        return Team(settings.threads or available_cores())
    allowed = os.sched_getaffinity(0)
    if not allowed.issuperset(settings.cores):
        names = ",".join(map(str, sorted(allowed)))
        raise SettingsError(f"cores is {settings.cores}, but this process may use {names}")
    return Team(len(settings.cores), settings.cores)


def fp32_bytes(config: ModelConfig) -> int:
    """Bytes of a model's weights as fp32."""
    return 4 * sum(math.prod(shape) for _, shape in tensor_shapes(config))


def _divide_host(settings: EngineSettings, block_bytes: int, length: int, weights: int) -> Sizes:
    """Divide what is left of this machine's memory, and say so."""
    available = available_bytes()
    sizes = divide(settings, block_bytes=block_bytes, length=length, available=available, host=None)
    report.tell(report.describe_division(settings, sizes, weights, available, block_bytes))
    return sizes


def _length(config: ModelConfig, settings: EngineSettings) -> int:
    return min(settings.max_model_len or config.max_positions, config.max_positions)


def _load_gpu(manifest: BaseManifest, settings: EngineSettings) -> Executor:
    from loraplex.engine.gpu.load import load_gpu_executor

    return load_gpu_executor(manifest, settings)
