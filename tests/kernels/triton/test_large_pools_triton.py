"""Pools of more elements than an int32 counts: what lies far up is found as what lies at the start.

The interpreter computes places in the integers that a device would. The region is memory that is
reserved and never touched but where a kernel writes; its start lies so that a place that overflows
is another place within it.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from loraplex.kernels.kv_cache import BlockLayout
from loraplex.kernels.triton.attention_work import AttentionLayout
from loraplex.kernels.triton.paged_attention import (
    AttentionStep,
    attention_scratch,
    paged_attention,
)
from loraplex.kernels.triton.rope_kv import rope_kv
from loraplex.kernels.triton.sgmv import Arena, SgmvStep, sgmv_, sgmv_scratch
from loraplex.kernels.triton.sgmv_plan import ALIGNMENT, SgmvLayout, record

Randn = Callable[..., Tensor]
REACH = 1 << 31  # of an int32, in bytes and so in elements of int8
SLACK = 1 << 16


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tensor]:
    """Bytes `[REACH + SLACK]` behind as many; the interpreter is kept from copying all of them."""
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *args: None)
    yield torch.empty(2 * REACH + SLACK, dtype=torch.uint8)[REACH:]


def test_kv_blocks(pool: Tensor, randn: Randn) -> None:
    """A sequence whose blocks lie far up has the bits of one whose blocks lie at the start."""
    layout = BlockLayout(2, 2, 16, 16, torch.int8)
    count = len(pool) // layout.block_bytes
    cache = layout.split(pool[: count * layout.block_bytes].view(count, layout.block_bytes))
    x, far = randn(20, 8 * 16), REACH // layout.block_bytes
    expected = attend(cache, x, [0, 1])
    assert torch.equal(attend(cache, x, [far, far + 1]), expected)
    assert torch.equal(cache[0][[far, far + 1], 1], cache[0][[0, 1], 1])


def attend(cache: tuple[Tensor, Tensor | None], x: Tensor, table: list[int]) -> Tensor:
    """Writes the KV of a prompt of one sequence and lets it look at it."""
    rows, (kept, scales) = len(x), cache
    positions = torch.arange(rows, dtype=torch.int32)
    slots = torch.tensor(table, dtype=torch.int32)[positions // 16] * 16 + positions % 16
    rotary = torch.randn(2, rows, 8, generator=torch.Generator().manual_seed(1)).unbind()
    q = rope_kv(
        x, kept, 1, rotary, None, 1e-5, positions, slots.int(), dtype=torch.bfloat16, scales=scales
    )
    layout = AttentionLayout(2, 1, rows, 0, len(table))
    work = np.zeros(layout.size, np.int32)
    layout.write(work, [(0, rows, rows)], [np.array(table, np.int32)])
    step = AttentionStep(layout, torch.from_numpy(work), *attention_scratch(layout, 2, 16, "cpu"))
    return paged_attention(q, kept, 1, step, 0.25, scales=scales)


def test_images(pool: Tensor, randn: Randn) -> None:
    """An image far up in the arena adds what it adds at the start."""
    x, rank, width = randn(3, 32), 5, 48
    a, b = ((randn(*shape) * 30).to(torch.int8) for shape in ((rank, 32), (rank, width)))
    pieces = [a, randn(rank), b, randn(width)]
    offsets = [n * 2 * ALIGNMENT for n in range(len(pieces))]
    found = []
    for block in (0, REACH // ALIGNMENT * ALIGNMENT):
        for piece, offset in zip(pieces, offsets, strict=True):
            content = piece.contiguous().view(torch.uint8).flatten()
            pool[block + offset : block + offset + len(content)] = content
        line = record(block, offsets[0], offsets[1], [(rank, offsets[2], offsets[3], -1)])
        found.append(adapted(x, Arena.of(pool, torch.int8), torch.from_numpy(line)[None], width))
    assert torch.equal(*found)
    assert found[0].std() > 1


def adapted(x: Tensor, arena: Arena, table: Tensor, width: int) -> Tensor:
    """What the image of the table's first line adds to zeros."""
    layout = SgmvLayout(len(x), 1)
    plan = np.zeros(layout.size, np.int32)
    layout.write(plan, [(0, len(x), 0)])
    step = SgmvStep(layout, torch.from_numpy(plan), sgmv_scratch(len(x), 16, x.shape[1], "cpu"))
    y = torch.ones(len(x), width)
    sgmv_(y, x, arena, table, step, (width,))
    return y
