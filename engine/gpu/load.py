"""Loads a base onto a GPU and shares out the memory that is left."""

import logging
import math
from pathlib import Path

import torch

from loraplex.engine.gpu.executor import GpuExecutor
from loraplex.engine.gpu.linear import TiledLinears
from loraplex.engine.gpu.step_layout import Limits
from loraplex.engine.images import BaseManifest
from loraplex.engine.memory import available_bytes
from loraplex.engine.model.config import ModelConfig, read_model_config
from loraplex.engine.model.decoder import Decoder
from loraplex.engine.model.weights import Checkpoint
from loraplex.engine.settings import EngineSettings

DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}

log = logging.getLogger(__name__)


def load_gpu_executor(
    manifest: BaseManifest, settings: EngineSettings, device: str = "cuda"
) -> GpuExecutor:
    """Load the base to a device; its KV cache and images take what settings allow.

    On the device "cpu" kernels run in Triton's interpreter, and steps are not captured in graphs.
    Raises `ModelError` when the decoder cannot run the model, `OSError` when it cannot be read.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    directory = Path(manifest.path)
    config = read_model_config(directory)
    limits = Limits(
        sequences=settings.max_num_seqs,
        tokens=settings.max_num_batched_tokens,
        length=min(settings.max_model_len or config.max_positions, config.max_positions),
        block_size=settings.block_size,
    )
    weights, dtype = Checkpoint(directory, device), DTYPES[settings.dtype]
    decoder = Decoder(config, weights, dtype, limits.length, TiledLinears().prepare)
    kv_bytes, image_bytes = settings.memory_shares(_free_bytes(device))
    blocks = fit_blocks(config, dtype, limits, kv_bytes)
    log.info("%d KV blocks and %d MB for images on %s", blocks, image_bytes >> 20, device)
    return GpuExecutor(decoder, limits, blocks, image_bytes, graphs=device != "cpu")


def fit_blocks(config: ModelConfig, dtype: torch.dtype, limits: Limits, kv_bytes: int) -> int:
    """Blocks that fit `kv_bytes`, and no more than all sequences at full length can use."""
    token_bytes = 2 * config.num_layers * config.kv_size * dtype.itemsize
    useful = limits.sequences * math.ceil(limits.length / limits.block_size)
    return min(kv_bytes // (token_bytes * limits.block_size), useful)


def _free_bytes(device: str) -> int:
    return available_bytes() if device == "cpu" else torch.cuda.mem_get_info(device)[0]
