"""Loads a base onto a GPU and divides the memory that is left."""

import math
from pathlib import Path

import torch

from loraplex.engine import report
from loraplex.engine.checkpoint import tensor_shapes
from loraplex.engine.gpu.executor import GpuExecutor
from loraplex.engine.gpu.linear import TiledLinears
from loraplex.engine.gpu.step_layout import Limits
from loraplex.engine.gpu.warm_up import warm_up
from loraplex.engine.images import BaseManifest
from loraplex.engine.memory import available_bytes
from loraplex.engine.model.config import ModelConfig, read_model_config
from loraplex.engine.model.decoder import Decoder
from loraplex.engine.model.weights import Checkpoint
from loraplex.engine.settings import EngineSettings
from loraplex.engine.sizing import Sizes, divide

DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def load_gpu_executor(
    manifest: BaseManifest, settings: EngineSettings, device: str = "cuda"
) -> GpuExecutor:
    """Load the base to a device; KV blocks and images share what settings allow.

    On the device "cpu" kernels run in Triton's interpreter, and steps are not captured in graphs.
    Raises `ModelError` when the decoder cannot run the model, `SettingsError` for what cannot fit,
    `OSError` when the model cannot be read.
    """
    directory = Path(manifest.path)
    config = read_model_config(directory)
    limits, dtype = _limits(config, settings), DTYPES[settings.dtype]
    own = str(dtype).removeprefix("torch.")
    kv_dtype = getattr(torch, settings.choose_kv_dtype("gpu", own, "int8"))
    decoder = Decoder(
        config, Checkpoint(directory, device), dtype, limits.length, TiledLinears().prepare
    )
    block_bytes = decoder.kv_layout(limits.block_size, kv_dtype).block_bytes
    sizes = _divide(settings, limits, block_bytes, _weight_bytes(config, dtype), device)
    executor = GpuExecutor(
        decoder,
        limits,
        num_blocks=sizes.num_blocks,
        memory_bytes=sizes.memory_bytes,
        swap_slots=sizes.swap_slots,
        weight_bytes=_weight_bytes(config, dtype),
        kv_dtype=kv_dtype,
        graphs=device != "cpu",
    )
    if device != "cpu":
        warm_up(executor, limits, settings.max_wanted)
    return executor


def _limits(config: ModelConfig, settings: EngineSettings) -> Limits:
    return Limits(
        sequences=settings.max_num_seqs,
        tokens=settings.max_num_batched_tokens,
        length=min(settings.max_model_len or config.max_positions, config.max_positions),
        block_size=settings.block_size,
    )


def _divide(
    settings: EngineSettings, limits: Limits, block_bytes: int, loaded: int, device: str
) -> Sizes:
    """Divide what is left of the device's memory beside `loaded` bytes of weights, and say so."""
    available = _free_bytes(device)
    sizes = divide(
        settings,
        block_bytes=block_bytes,
        length=limits.length,
        available=available,
        host=None if device == "cpu" else available_bytes(),
    )
    report.tell(report.describe_division(settings, sizes, loaded, available, block_bytes))
    return sizes


def _weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return dtype.itemsize * sum(math.prod(shape) for _, shape in tensor_shapes(config))


def _free_bytes(device: str) -> int:
    if device == "cpu":
        return available_bytes()
    torch.cuda.empty_cache()  # of what loading took for a while
    return torch.cuda.mem_get_info(device)[0]
