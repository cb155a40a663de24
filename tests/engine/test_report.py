"""What a start says of its memory, and its advice."""

import dataclasses
from typing import Any

import pytest

from loraplex.engine.report import (
    MIB,
    Capacity,
    advise,
    describe_capacity,
    describe_division,
    nbytes,
    tell,
)
from loraplex.engine.settings import EngineSettings
from loraplex.engine.sizing import GIB, Sizes

BLOCK = 16 * 24_000
PLENTY = Capacity(
    block_size=16, block_bytes=BLOCK, blocks=5400, memory_bytes=5400 * BLOCK + GIB,
    swap_slots=100, model_len=8192, base_len=8192,
)  # fmt: skip


def test_the_division() -> None:
    lines = describe_division(EngineSettings(), Sizes(900, 10 * GIB, 50), 257 * MIB, 20 * GIB, MIB)
    assert lines == [
        "memory: 257 MiB of weights; 20.0 GiB were left, of which memory_utilization 0.5 gives"
        " 10.0 GiB to KV blocks and images",
        "memory: 50 MiB of the host's for swap",
    ]


def test_the_division_without_swap() -> None:
    lines = describe_division(EngineSettings(), Sizes(900, GIB, 0), MIB, GIB, MIB)
    assert lines[-1] == "memory: none for swap; preempted requests are computed again"


def test_the_capacity() -> None:
    assert describe_capacity(EngineSettings(), PLENTY) == [
        "KV cache: 5,400 blocks of 16 tokens (86,400 tokens, 1.9 GiB); images: 1.0 GiB;"
        " each takes from the other what it needs",
        "at once: 42 requests of 2,048 tokens, or 10 of 8,192",
    ]


def test_the_capacity_of_few_and_short_requests() -> None:
    settings = EngineSettings(kv_cache_bytes=GIB, max_num_seqs=8)
    first, last = describe_capacity(settings, dataclasses.replace(PLENTY, model_len=500))
    assert first.endswith("; as kv_cache_bytes says")
    assert last == "at once: 8 requests of 500 tokens"


def test_lines_are_logged_and_advice_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    tell(["100% of it"], ["set it"])
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("loraplex.engine.report", "INFO", "100% of it"),
        ("loraplex.engine.report", "WARNING", "set it"),
    ]


def test_bytes_in_words() -> None:
    assert [nbytes(n) for n in (0, 2048, 3 * MIB, GIB + GIB // 2)] == [
        "0 KiB", "2 KiB", "3 MiB", "1.5 GiB",
    ]  # fmt: skip


def test_no_advice_is_needed() -> None:
    assert advise(EngineSettings(), PLENTY) == []


@pytest.mark.parametrize(
    ("settings", "capacity", "said"),
    [
        (
            {},
            {"model_len": 5000},
            "requests have at most 5,000 tokens, though the base was made for 8,192:"
            " raise memory_utilization to have more",
        ),
        (
            {},
            {"blocks": 513},
            "only one request of 8,192 tokens fits at once: set max_model_len to 4096,"
            " or raise memory_utilization",
        ),
        (
            {},
            {"blocks": 40, "model_len": 64, "base_len": 64},
            "max_num_seqs is 64, but there are 40 KV blocks, and each sequence needs one:"
            " set it to 40",
        ),
        (
            {"max_num_batched_tokens": 100},
            {},
            "max_num_batched_tokens 100 leaves prompts 36 tokens a step beside 64 sequences:"
            " set it to 512",
        ),
        (
            {"kv_cache_bytes": 5400 * BLOCK},
            {"memory_bytes": 5400 * BLOCK + MIB},
            "kv_cache_bytes 2073600000 leaves 1 MiB for images: set it to 1555986432,"
            " or raise memory_utilization",
        ),
        (
            {"kv_cache_bytes": 10 * BLOCK},
            {"blocks": 10, "memory_bytes": 10 * BLOCK, "model_len": 80, "base_len": 80},
            "max_num_seqs is 64, but there are 10 KV blocks, and each sequence needs one:"
            " set it to 10\n"
            "kv_cache_bytes 3840000 leaves 0 KiB for images: leave it out,"
            " or raise memory_utilization",
        ),
        (
            {"swap_space": 4.0},
            {"swap_slots": 5400},
            "swap_space is 4.0 GiB, but 1.9 GiB hold all KV blocks that there can be:"
            " set it to 2.0",
        ),
    ],
)
def test_advice(settings: dict[str, Any], capacity: dict[str, Any], said: str) -> None:
    found = advise(EngineSettings(**settings), dataclasses.replace(PLENTY, **capacity))
    assert "\n".join(found) == said
