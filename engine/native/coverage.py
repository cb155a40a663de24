"""What the native step can compute, and what is left to the torch executor.

This file knows a model's sizes and the engine's settings; it refuses to know torch, weights and
machines.
"""

from loraplex.engine.model.config import ModelConfig
from loraplex.engine.settings import EngineSettings

QUANTUM = 16  # of a head's columns
BLOCK_SIZES = (16, 32, 64, 128, 256, 512)  # those that cut attention's parts evenly


def covers(config: ModelConfig, settings: EngineSettings) -> str | None:
    """Why the native step cannot run this model with these settings; None when it can."""
    if config.head_dim % QUANTUM:
        return f"its heads of {config.head_dim} columns are no multiple of {QUANTUM}"
    if config.rotary_dim % 2:
        return f"its rotary embedding turns {config.rotary_dim} columns, an odd number"
    if settings.block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        return f"block_size {settings.block_size} is none of {sizes}"
    return None
