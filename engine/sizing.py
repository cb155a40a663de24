"""How memory is divided, once the base is loaded: one region for KV blocks and images, and swap.

This file knows numbers of bytes and the settings; it refuses to know how memory is measured and
what is done with it.
"""

import math
from dataclasses import dataclass

from loraplex.engine.settings import EngineSettings, SettingsError

GIB = 1 << 30
IMAGES_PART = 4  # one in so many bytes of the region is never needed for a single sequence
CACHE_BLOCKS = 1 << 17  # blocks that a prefix cache can use, however few sequences run
SWAP_GIB = 4.0
SWAP_PART = 4  # one in so many bytes of what is left of the host's memory


@dataclass(frozen=True)
class Sizes:
    """The region of `memory_bytes`, and host slots of a block each.

    `num_blocks` is the most KV blocks that the region can hold and that can be of use.
    """

    num_blocks: int
    memory_bytes: int
    swap_slots: int


def divide(
    settings: EngineSettings, *, block_bytes: int, length: int, available: int, host: int | None
) -> Sizes:
    """Divide `available` bytes of the device; `host` is what its host has, None if it is the host.

    `length` is the most tokens of a sequence. Raises `SettingsError` for what cannot fit.
    """
    memory_bytes = int(available * settings.memory_utilization)
    num_blocks = count_blocks(settings, block_bytes, length, memory_bytes)
    spare = available - memory_bytes if host is None else host
    slots = min(_swap_bytes(settings, spare) // block_bytes, num_blocks)
    return Sizes(num_blocks, memory_bytes, slots)


def count_blocks(settings: EngineSettings, block_bytes: int, length: int, memory_bytes: int) -> int:
    """Blocks that fit: into `kv_cache_bytes`, or else into the whole region.

    There are no more than all sequences at full `length` can use, or a prefix cache.
    """
    useful = settings.max_num_seqs * math.ceil(length / settings.block_size)
    if settings.enable_prefix_caching:
        useful = max(useful, CACHE_BLOCKS)
    kv_bytes = memory_bytes if settings.kv_cache_bytes is None else settings.kv_cache_bytes
    if kv_bytes > memory_bytes:
        raise SettingsError(
            f"kv_cache_bytes is {kv_bytes}, but memory_utilization {settings.memory_utilization}"
            f" of what is left after loading is {memory_bytes} bytes, images among them: give at"
            f" most {sure_bytes(memory_bytes)}, or raise memory_utilization"
        )
    return min(kv_bytes // block_bytes, useful)


def sure_bytes(memory_bytes: int) -> int:
    """Bytes of the region that KV blocks can have whatever images need."""
    return memory_bytes - memory_bytes // IMAGES_PART


def sure_blocks(
    settings: EngineSettings, *, num_blocks: int, block_bytes: int, memory_bytes: int
) -> int:
    """Blocks that are there for one sequence whatever images need; all, if their bytes are set."""
    if settings.kv_cache_bytes is not None:
        return num_blocks
    return min(num_blocks, sure_bytes(memory_bytes) // block_bytes)


def _swap_bytes(settings: EngineSettings, spare: int) -> int:
    """Bytes of swap, of the `spare` ones of the host."""
    if settings.swap_space is None:
        return min(int(SWAP_GIB * GIB), spare // SWAP_PART)
    asked = settings.swap_space * GIB
    if asked > spare:
        fits = math.floor(spare / GIB * 10) / 10
        raise SettingsError(
            f"swap_space is {settings.swap_space} GiB, but {spare / GIB:.2f} GiB of the host's"
            f" memory are left: give at most {fits}"
        )
    return int(asked)
