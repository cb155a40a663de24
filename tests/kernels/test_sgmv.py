"""`kernels.sgmv` against a loop, over odd ranks and the popularity of adapters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from loraplex.kernels.rows import SMALL_WORK
from loraplex.kernels.sgmv import LoraSlice, LoraWeights, Segment, lora_weights, sgmv_

Randn = Callable[..., Tensor]

IN = 96
FUSED = {"o": (96,), "qkv": (96, 32, 32), "odd": (33, 7)}
RANKS = [0, 1, 3, 5, 33, 64]
BASE = -1
ROWS = 24
POPULARITY = {
    "distinct": list(range(8)) * (ROWS // 8),
    "uniform": [row % 4 for row in range(ROWS)],
    "zipf": [0] * 12 + [1] * 6 + [2] * 4 + [3, 4],
    "identical": [0] * ROWS,
    "skewed": [0] * (ROWS - 1) + [5],
    "with base rows": [BASE] * 5 + [0] * 7 + [BASE] * 3 + [1] * 9,
    "base only": [BASE] * ROWS,
}


@dataclass(frozen=True)
class Raw:
    """An adapter's part as it is in an image: A, scale, and (B, gain, bias) of each slice."""

    a: Tensor
    scale: Tensor
    slices: list[tuple[Tensor | None, Tensor | None, Tensor | None]]


def raw(randn: Randn, outs: Sequence[int], seed: int) -> Raw:
    ranks = [RANKS[(seed + i) % len(RANKS)] for i in range(len(outs))]
    slices = [
        (
            randn(rank, out) if rank else None,
            randn(out) if (seed + i) % 3 == 0 else None,
            randn(out) if (seed + i) % 4 == 0 else None,
        )
        for i, (rank, out) in enumerate(zip(ranks, outs, strict=True))
    ]
    return Raw(randn(sum(ranks), IN), randn(sum(ranks)), slices)


def packed(adapter: Raw, outs: Sequence[int]) -> LoraWeights:
    slices, column, first = [], 0, 0
    for (b, gain, bias), out in zip(adapter.slices, outs, strict=True):
        rank = 0 if b is None else len(b)
        slices.append(LoraSlice(column, column + out, first, rank, b, gain, bias))
        column, first = column + out, first + rank
    return lora_weights(adapter.a, adapter.scale, slices)


def expected_row(y: Tensor, x: Tensor, adapter: Raw, outs: Sequence[int]) -> Tensor:
    """`gain · (y + scale · (x Aᵀ) B) + bias`, slice by slice, in fp64."""
    y, done, column, first = y.double(), [], 0, 0
    for (b, gain, bias), out in zip(adapter.slices, outs, strict=True):
        rank = 0 if b is None else len(b)
        part = y[column : column + out].clone()
        for r, row in enumerate([] if b is None else b.double()):
            h = (x.double() * adapter.a[first + r].double()).sum() * adapter.scale[first + r]
            part += h * row
        part = part if gain is None else part * gain.double()
        done.append(part if bias is None else part + bias.double())
        column, first = column + out, first + rank
    return torch.cat(done)


def segments(owners: list[int], adapters: list[LoraWeights]) -> list[Segment]:
    """Runs of rows with one owner, base rows left out."""
    found, start = [], 0
    for row in range(1, len(owners) + 1):
        if row == len(owners) or owners[row] != owners[start]:
            if owners[start] != BASE:
                found.append((start, row, adapters[owners[start]]))
            start = row
    return found


@pytest.mark.parametrize("popularity", POPULARITY)
@pytest.mark.parametrize("projection", ["o", "qkv"])
def test_rows(randn: Randn, popularity: str, projection: str) -> None:
    outs, owners = FUSED[projection], sorted(POPULARITY[popularity])
    raws = [raw(randn, outs, seed) for seed in range(8)]
    x, before = randn(ROWS, IN), randn(ROWS, sum(outs))
    y = before.clone()
    sgmv_(y, x, segments(owners, [packed(r, outs) for r in raws]))
    for row, owner in enumerate(owners):
        if owner == BASE:
            assert torch.equal(y[row], before[row])
        else:
            expected = expected_row(before[row], x[row], raws[owner], outs)
            torch.testing.assert_close(y[row].double(), expected, rtol=2e-6, atol=2e-3)


@pytest.mark.parametrize("rank", RANKS[1:])
@pytest.mark.parametrize("out", [96, 33, 7])
@pytest.mark.parametrize("count", [1, 3, 11])
def test_odd_shapes(randn: Randn, rank: int, out: int, count: int) -> None:
    adapter = Raw(randn(rank, IN), randn(rank), [(randn(rank, out), None, None)])
    x, before = randn(count, IN), randn(count, out)
    y = before.clone()
    sgmv_(y, x, [(0, count, packed(adapter, (out,)))])
    rows = zip(before, x, strict=True)
    expected = torch.stack([expected_row(b, r, adapter, (out,)) for b, r in rows])
    torch.testing.assert_close(y.double(), expected, rtol=2e-6, atol=1e-3)


@pytest.mark.parametrize("rank", RANKS[1:])
@pytest.mark.parametrize("outs", FUSED.values())
def test_rows_are_alike(
    randn: Randn, same_rows: Callable[..., None], rank: int, outs: tuple[int, ...]
) -> None:
    slices: list[tuple[Tensor | None, Tensor | None, Tensor | None]]
    slices = [(randn(rank, out), randn(out), randn(out)) for out in outs]
    weights = packed(Raw(randn(rank * len(outs), IN), randn(rank * len(outs)), slices), outs)

    def adapt(rows: Tensor) -> Tensor:
        y = rows[:, IN:].clone()
        sgmv_(y, rows[:, :IN], [(0, len(rows), weights)])
        return y

    same_rows(adapt, randn(67, IN + sum(outs)))


def test_many_rows_are_as_few(randn: Randn) -> None:
    """Enough rows to need all threads give the bits that a few rows give on one."""
    adapter = Raw(randn(24, IN), randn(24), [(randn(24, 96), None, None)])
    weights, x = packed(adapter, (96,)), randn(1000, IN)
    assert 3 * weights.work < SMALL_WORK < 1000 * weights.work
    whole, few = torch.zeros(1000, 96), torch.zeros(3, 96)
    sgmv_(whole, x, [(0, 1000, weights)])
    sgmv_(few, x[500:503], [(0, 3, weights)])
    assert torch.equal(whole[500:503], few)


def test_nothing_leaks_to_neighbours(randn: Randn) -> None:
    broken = Raw(randn(4, IN) * torch.inf, randn(4), [(randn(4, 96) * torch.nan, None, None)])
    sound = Raw(randn(4, IN), randn(4), [(randn(4, 96), None, None)])
    x, before = randn(6, IN), randn(6, 96)
    y, alone = before.clone(), before.clone()
    sgmv_(y, x, [(1, 3, packed(broken, (96,))), (3, 6, packed(sound, (96,)))])
    sgmv_(alone, x, [(3, 6, packed(sound, (96,)))])
    assert torch.equal(y[0], before[0]) and torch.equal(y[3:], alone[3:])
    assert y[1:3].isnan().all()


def test_bytes_count_what_is_kept(randn: Randn) -> None:
    weights = packed(Raw(randn(3, IN), randn(3), [(randn(3, 33), randn(33), None)]), (33,))
    assert weights.nbytes == 4 * (16 * IN + 16 + 3 * 48 + 33)
