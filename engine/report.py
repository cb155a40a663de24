"""What a start says of its memory: how it is divided, what fits at once, and what to set otherwise.

This file turns numbers into lines of the log; it refuses to know where the numbers come from. Its
logger's name tells whoever started the engine which lines to show.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from loraplex.engine.settings import EngineSettings
from loraplex.engine.sizing import GIB, Sizes

MIB = 1 << 20
LENGTHS = (2048, 8192)  # tokens of the requests that are counted, besides the longest
FEW_IMAGE_BYTES = 16 * MIB  # no room for an adapter of rank 16 on a small base

log = logging.getLogger(__name__)


def tell(lines: Iterable[str], advice: Iterable[str] = ()) -> None:
    """Log lines, and pieces of advice as warnings."""
    for line in lines:
        log.info("%s", line)
    for line in advice:
        log.warning("%s", line)


@dataclass(frozen=True)
class Capacity:
    """An engine that is ready: `blocks` of the region hold KV now, images have the rest."""

    block_size: int  # tokens
    block_bytes: int
    blocks: int
    memory_bytes: int
    swap_slots: int  # blocks
    model_len: int  # most tokens of a request
    base_len: int  # those that the base was made for

    @property
    def image_bytes(self) -> int:
        """Bytes of the region that images may take now."""
        return self.memory_bytes - self.blocks * self.block_bytes

    def requests(self, tokens: int) -> int:
        """Requests of so many tokens that fit at once."""
        return self.blocks // -(-tokens // self.block_size)


def describe_division(
    settings: EngineSettings, sizes: Sizes, weights: int, available: int, block_bytes: int
) -> list[str]:
    """How memory was divided: `weights` bytes are loaded, `available` bytes were left then."""
    return [
        f"memory: {nbytes(weights)} of weights; {nbytes(available)} were left, of which"
        f" memory_utilization {settings.memory_utilization} gives {nbytes(sizes.memory_bytes)}"
        " to KV blocks and images",
        f"memory: {nbytes(sizes.swap_slots * block_bytes)} of the host's for swap"
        if sizes.swap_slots
        else "memory: none for swap; preempted requests are computed again",
    ]


def describe_capacity(settings: EngineSettings, capacity: Capacity) -> list[str]:
    """What the region holds now, and how many requests of what length fit at once."""
    kv_bytes, tokens = capacity.blocks * capacity.block_bytes, capacity.blocks * capacity.block_size
    fixed = settings.kv_cache_bytes is not None
    how = "as kv_cache_bytes says" if fixed else "each takes from the other what it needs"
    first, *others = _lengths(capacity.model_len)
    fit = f"{_at_once(settings, capacity, first)} requests of {first:,} tokens"
    for length in others:
        fit += f", or {_at_once(settings, capacity, length)} of {length:,}"
    return [
        f"KV cache: {capacity.blocks:,} blocks of {capacity.block_size} tokens ({tokens:,} tokens,"
        f" {nbytes(kv_bytes)}); images: {nbytes(capacity.image_bytes)}; {how}",
        f"at once: {fit}",
    ]


def advise(settings: EngineSettings, capacity: Capacity) -> list[str]:
    """What could be set better, each with a value that is."""
    rules = (_length_is_cut, _one_at_a_time, _few_blocks, _few_tokens, _few_images, _much_swap)
    return [said for rule in rules if (said := rule(settings, capacity))]


def nbytes(count: float) -> str:
    """A number of bytes in words: 1.5 GiB, 380 MiB, 12 KiB."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{count / MIB:.0f} MiB" if count >= MIB else f"{count / 1024:.0f} KiB"


def _lengths(model_len: int) -> list[int]:
    return sorted({*(length for length in LENGTHS if length < model_len), model_len})


def _at_once(settings: EngineSettings, capacity: Capacity, tokens: int) -> int:
    return min(settings.max_num_seqs, capacity.requests(tokens))


def _length_is_cut(settings: EngineSettings, capacity: Capacity) -> str | None:
    if settings.max_model_len is not None or capacity.model_len >= capacity.base_len:
        return None
    return (
        f"requests have at most {capacity.model_len:,} tokens, though the base was made for"
        f" {capacity.base_len:,}: raise memory_utilization to have more"
    )


def _one_at_a_time(settings: EngineSettings, capacity: Capacity) -> str | None:
    if settings.max_num_seqs == 1 or capacity.requests(capacity.model_len) > 1:
        return None
    half = capacity.blocks // 2 * capacity.block_size
    return (
        f"only one request of {capacity.model_len:,} tokens fits at once: set max_model_len to"
        f" {half}, or raise memory_utilization"
    )


def _few_blocks(settings: EngineSettings, capacity: Capacity) -> str | None:
    if capacity.blocks >= settings.max_num_seqs:
        return None
    return (
        f"max_num_seqs is {settings.max_num_seqs}, but there are {capacity.blocks} KV blocks, and"
        f" each sequence needs one: set it to {capacity.blocks}"
    )


def _few_tokens(settings: EngineSettings, capacity: Capacity) -> str | None:
    left = settings.max_num_batched_tokens - settings.max_num_seqs
    if settings.max_num_seqs == 1 or left >= settings.max_num_seqs:
        return None
    return (
        f"max_num_batched_tokens {settings.max_num_batched_tokens} leaves prompts {left} tokens a"
        f" step beside {settings.max_num_seqs} sequences: set it to"
        f" {8 * settings.max_num_seqs}"
    )


def _few_images(settings: EngineSettings, capacity: Capacity) -> str | None:
    if capacity.image_bytes >= FEW_IMAGE_BYTES or settings.kv_cache_bytes is None:
        return None
    lower = capacity.memory_bytes - max(FEW_IMAGE_BYTES, capacity.memory_bytes // 4)
    return (
        f"kv_cache_bytes {settings.kv_cache_bytes} leaves {nbytes(capacity.image_bytes)} for"
        f" images: {f'set it to {lower}' if lower > 0 else 'leave it out'}, or raise"
        " memory_utilization"
    )


def _much_swap(settings: EngineSettings, capacity: Capacity) -> str | None:
    usable = capacity.swap_slots * capacity.block_bytes
    if settings.swap_space is None or settings.swap_space * GIB < usable + capacity.block_bytes:
        return None
    return (
        f"swap_space is {settings.swap_space} GiB, but {nbytes(usable)} hold all KV blocks that"
        f" there can be: set it to {round(usable / GIB + 0.05, 1)}"
    )
