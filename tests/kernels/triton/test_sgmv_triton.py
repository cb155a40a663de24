"""SGMV in Triton against plain products, over dtypes, odd shapes and popularity of images."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from loraplex.kernels.triton.sgmv import Arena, SgmvStep, planes, sgmv_, sgmv_scratch
from loraplex.kernels.triton.sgmv_plan import Segment, SgmvLayout, no_record, record

IN = 96
FUSED = {"o": (96,), "gate_up": (80, 80), "qkv": (96, 32, 48), "odd": (33, 7)}
RANKS = (0, 1, 3, 5, 33, 64)
BASE, ROWS = -1, 24
POPULARITY = {
    "distinct": list(range(8)) * 3,
    "uniform": [row % 4 for row in range(ROWS)],
    "zipf": [0] * 12 + [1] * 6 + [2] * 4 + [3, 4],
    "identical": [0] * ROWS,
    "skewed": [0] * (ROWS - 1) + [5],
    "with base rows": [BASE] * 5 + [0] * 7 + [BASE] * 3 + [1] * 9,
    "base only": [BASE] * ROWS,
}
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}

Parts = list[tuple[Tensor, Tensor | None, Tensor | None]]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Image:
    """One projection of an adapter: A and B of the arena's dtype, the rest fp32."""

    a: Tensor
    scale: Tensor
    slices: Parts

    def row(self, y: Tensor, x: Tensor) -> Tensor:
        """What the image makes of one row, in fp64."""
        done, column, first = [], 0, 0
        for b, gain, bias in self.slices:
            rank, width = b.shape
            h = self.a[first : first + rank].double() @ x.double()
            h *= self.scale[first : first + rank].double()
            part = y[column : column + width].double() + h @ b.double()
            part = part if gain is None else part * gain.double()
            done.append(part if bias is None else part + bias.double())
            column, first = column + width, first + rank
        return torch.cat(done)


def image(
    ranks: Sequence[int], widths: Sequence[int], inputs: int = IN, dtype: torch.dtype =
    torch.float32, seed: int = 0, rows: bool = True,
) -> Image:  # fmt: skip
    total = sum(ranks)
    a, scale = randn(total, inputs, seed=seed) / inputs**0.5, randn(total, seed=seed + 1)
    parts: Parts = []
    for number, (rank, width) in enumerate(zip(ranks, widths, strict=True)):
        gain = randn(width, seed=seed + 2) if rows and (seed + number) % 3 == 0 else None
        bias = randn(width, seed=seed + 3) if rows and (seed + number) % 4 == 0 else None
        parts.append((stored(randn(rank, width, seed=seed + 4), dtype), gain, bias))
    return Image(stored(a, dtype), scale / (1 if dtype.itemsize > 1 else 100), parts)


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """X as the arena keeps it; the scales of rows of bytes are left out, being part of `scale`."""
    return x.mul(30).round().to(dtype) if dtype == torch.int8 else x.to(dtype)


class Device:
    """Images in an arena, the table of one projection, and poisoned scratch."""

    def __init__(self, images: Sequence[Image], dtype: torch.dtype = torch.float32) -> None:
        data, lines = bytearray(128), [no_record()]

        def place(array: Tensor | None) -> int:
            if array is None or not array.numel():
                return -1
            start = len(data)
            data.extend(array.contiguous().view(torch.uint8).numpy().tobytes())
            data.extend(bytes(-len(data) % 128))
            return start - 128

        for one in images:
            slices = [(len(b), place(b), place(gain), place(bias)) for b, gain, bias in one.slices]
            lines.append(record(128, place(one.a), place(one.scale), slices))
        self.images = images
        self.arena = Arena.of(torch.frombuffer(data, dtype=torch.uint8), dtype)
        self.table = torch.from_numpy(np.stack(lines))
        self.widths = tuple(b.shape[1] for b, _, _ in images[0].slices)

    def run(self, y: Tensor, x: Tensor, segments: Sequence[Segment], tile_rows: int = 16) -> Tensor:
        """Y after a step; segments name images."""
        layout = SgmvLayout(max(len(x), 1), len(self.images), tile_rows)
        plan = np.full(layout.size, 1 << 30, np.int32)
        layout.write(plan, [(start, end, slot + 1) for start, end, slot in segments])
        ranks = max(1, *(len(one.a) for one in self.images))
        scratch = sgmv_scratch(layout.rows, ranks, x.shape[1], "cpu").fill_(torch.nan)
        step = SgmvStep(layout, torch.from_numpy(plan), scratch)
        out = y.clone()
        sgmv_(out, x, self.arena, self.table, step, self.widths)
        return out

    def check(self, y: Tensor, x: Tensor, owners: Sequence[int]) -> None:
        """A step's rows against plain products; rows of the base must not change a bit."""
        out = self.run(y, x, segments_of(owners))
        for row, owner in enumerate(owners):
            if owner == BASE:
                assert torch.equal(out[row], y[row])
            else:
                expected = self.images[owner].row(y[row], x[row])
                error = (out[row].double() - expected).norm() / expected.norm()
                assert error < TOLERANCE[x.dtype], (row, owner)


def segments_of(owners: Sequence[int]) -> list[Segment]:
    """Runs of rows with one owner, base rows left out."""
    edges = [0, *(r for r in range(1, len(owners)) if owners[r] != owners[r - 1]), len(owners)]
    runs = [(a, b, owners[a]) for a, b in pairwise(edges)]
    return [run for run in runs if run[2] != BASE]


def mixed(widths: Sequence[int], count: int, dtype: torch.dtype = torch.float32) -> list[Image]:
    def ranks(seed: int) -> list[int]:
        return [RANKS[(seed + i) % len(RANKS)] for i in range(len(widths))]

    return [image(ranks(seed), widths, dtype=dtype, seed=seed) for seed in range(count)]


@pytest.mark.parametrize("popularity", POPULARITY)
@pytest.mark.parametrize("projection", ["o", "qkv"])
def test_popularity(popularity: str, projection: str) -> None:
    widths = FUSED[projection]
    device = Device(mixed(widths, 8))
    device.check(randn(ROWS, sum(widths)), randn(ROWS, IN), POPULARITY[popularity])


@pytest.mark.parametrize("rank", [*RANKS, 256])
@pytest.mark.parametrize("projection", ["gate_up", "odd"])
def test_ranks(rank: int, projection: str) -> None:
    widths = FUSED[projection]
    device = Device([image([rank] * 2, widths, seed=rank)])
    device.check(randn(3, sum(widths)), randn(3, IN), [0, 0, BASE])


@pytest.mark.parametrize("inputs", [1, 7, 130, 1024, 1100])
def test_inputs(inputs: int) -> None:
    """One and two planes, whole tiles of inputs and others."""
    assert planes(inputs) == 1 + (inputs >= 1024)
    device = Device([image([5, 3, 4], FUSED["qkv"], inputs)])
    device.check(randn(2, 176), randn(2, inputs), [0, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("activations", [torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype, activations: torch.dtype) -> None:
    """Weights of each dtype; Y in the activations' dtype, and in fp32 beside rounded ones."""
    widths = FUSED["gate_up"]
    device = Device(mixed(widths, 3, dtype), dtype)
    x, y = randn(5, IN).to(activations), randn(5, sum(widths))
    device.check(y if dtype == torch.int8 else y.to(activations), x, [0, 1, BASE, 2, 2])


@pytest.mark.usefixtures("even_products")
def test_company_changes_no_bit() -> None:
    """A row has the bits that it has alone, wherever it stands and whoever is there."""
    widths = FUSED["qkv"]
    device = Device([image([9, 5, 20], widths, 1100), image([3, 9, 1], widths, 1100, seed=3)])
    x, y = randn(24, 1100), randn(24, sum(widths))
    whole = device.run(y, x, [(0, 18, 0), (18, 24, 1)])
    for rows in ([7], [3, 23], [*range(5, 17), 20]):
        owners = [int(row >= 18) for row in rows]
        assert torch.equal(device.run(y[rows], x[rows], segments_of(owners)), whole[rows])
    scattered = device.run(y, x, [(22, 24, 1), (0, 4, 0), (18, 22, 1), (4, 18, 0)])
    assert torch.equal(scattered, whole)


@pytest.mark.usefixtures("even_products")
def test_tiles_of_32_rows_give_the_same_bits() -> None:
    device = Device(mixed(FUSED["o"], 2))
    x, y = randn(70, IN), randn(70, 96)
    segments = [(2, 40, 0), (40, 69, 1)]
    large, small = (device.run(y, x, segments, tile) for tile in (32, 16))
    assert torch.equal(large, small)
    assert torch.equal(large[:2], y[:2]) and torch.equal(large[69:], y[69:])


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nothing_leaks_to_neighbours() -> None:
    sound, broken = image([4], [96]), image([4], [96], seed=1)
    broken.a.fill_(torch.inf)
    device = Device([sound, broken])
    x, y = randn(6, IN), randn(6, 96)
    alone = device.run(y, x, [(3, 6, 0)])
    out = device.run(y, x, [(1, 3, 1), (3, 6, 0)])
    assert torch.equal(out[0], y[0]) and torch.equal(out[3:], alone[3:])
    assert not out[1:3].isfinite().any()
    x[4] = torch.nan
    assert torch.equal(device.run(y, x, [(3, 6, 0)])[[3, 5]], alone[[3, 5]])


def test_an_image_without_the_projection_changes_nothing() -> None:
    device = Device([image([4], [96])])
    y = randn(3, 96)
    assert torch.equal(device.run(y, randn(3, IN), [(0, 3, -1)]), y)
