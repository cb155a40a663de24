"""How memory is divided: KV blocks and images in one region, swap beside it."""

import re
from typing import Any

import pytest

from loraplex.engine.settings import EngineSettings, SettingsError
from loraplex.engine.sizing import (
    CACHE_BLOCKS,
    GIB,
    Sizes,
    count_blocks,
    divide,
    sure_blocks,
)


def sizes(available: int, host: int | None = None, **settings: Any) -> Sizes:
    return divide(
        EngineSettings(**settings), block_bytes=1000, length=512, available=available, host=host
    )


def test_the_region_is_a_share_of_what_is_left() -> None:
    assert sizes(80_000, memory_utilization=0.25) == Sizes(20, 20_000, 15)


def test_swap_lies_beside_the_region_or_on_the_host() -> None:
    assert sizes(80_000).swap_slots == 40_000 // 4 // 1000
    assert sizes(80_000, host=1 << 40).swap_slots == 40
    assert sizes(80_000, memory_utilization=1.0).swap_slots == 0
    wide = divide(EngineSettings(), block_bytes=1 << 20, length=512, available=GIB << 6, host=None)
    assert wide.swap_slots == 4 * GIB >> 20
    assert sizes(80_000, swap_space=0).swap_slots == 0
    assert sizes(8 * GIB, swap_space=0.05).swap_slots == int(0.05 * GIB) // 1000


def test_swap_that_does_not_fit_is_refused() -> None:
    words = "swap_space is 3.0 GiB, but 2.00 GiB of the host's memory are left: give at most 2.0"
    with pytest.raises(SettingsError, match=re.escape(words)):
        sizes(4 * GIB, swap_space=3.0)
    with pytest.raises(SettingsError, match=r"give at most 0\.0$"):
        sizes(4000, swap_space=float("inf"))


def test_the_bytes_of_blocks_may_be_set() -> None:
    assert sizes(80_000, kv_cache_bytes=7999) == Sizes(7, 40_000, 7)
    words = "kv_cache_bytes is 50000, but memory_utilization 0.5 of what is left after loading is"
    with pytest.raises(SettingsError, match=f"{words} 40000 bytes.*give at most 30000"):
        sizes(80_000, kv_cache_bytes=50_000)
    assert sizes(80_000, kv_cache_bytes=30_000).num_blocks == 30


def test_there_are_no_more_blocks_than_can_be_used() -> None:
    settings = EngineSettings(max_num_seqs=2, enable_prefix_caching=False)
    assert count_blocks(settings, 1000, 512, 4999) == 4
    assert count_blocks(settings, 1000, 33, 1 << 40) == 6
    assert count_blocks(EngineSettings(max_num_seqs=2), 1000, 33, 1 << 40) == CACHE_BLOCKS
    assert count_blocks(EngineSettings(), 1000, 1 << 17, 1 << 40) == 64 << 13


def test_what_a_sequence_can_count_on() -> None:
    def sure(**settings: Any) -> int:
        found = EngineSettings(**settings)
        return sure_blocks(found, num_blocks=20, block_bytes=1000, memory_bytes=20_000)

    assert sure() == 15
    assert sure(kv_cache_bytes=20_000) == 20
