"""Products with constant weights by the library of the device, in tiles of rows that agree.

*Semantics*, as in `kernels/linear.py`: `Y[t, o] = Σ_i X[t, i] · W[o, i]`, sums and Y in fp32; X and
W of one float dtype.

A library picks its inner loops from the number of rows, so a row's bits may depend on its
neighbours' number. They do not among the row counts found, once a shape, to give the same bits:
rows are cut into such tiles, the last one padded.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

TILES = (16, 32, 64, 128, 256, 512)
BOUND_ROWS = 256  # below these rows a product takes as long as reading its weight
DECODES_PER_PREFILL = 8  # steps of few rows for one of many, where a choice must be made

Product = Callable[[Tensor], Tensor]


class TiledLinear:
    """The weight as it is, on its device."""

    def __init__(self, weight: Tensor, tiles: Sequence[int]) -> None:
        self._weight, self._tiles = weight, tiles

    def apply(self, x: Tensor) -> Tensor:
        """Y `[T, out]` fp32 of X `[T, in]`."""
        tiles = cover(x.shape[0], self._tiles)
        if len(tiles) == 1:
            return self._product(x, tiles[0])
        y, start = x.new_empty(x.shape[0], self._weight.shape[0], dtype=torch.float32), 0
        for tile in tiles:
            part = x[start : start + tile]
            y[start : start + tile] = self._product(part, tile)
            start += tile
        return y

    def _product(self, x: Tensor, tile: int) -> Tensor:
        """Y of up to `tile` rows."""
        rows = x.shape[0]
        padded = pad(x, (0, 0, 0, tile - rows)) if rows < tile else x
        return product(padded, self._weight)[:rows]


class TiledLinears:
    """Makes weights ready; shapes are measured once each.

    Has the library sum in fp32, and multiply fp32 as it is: NVIDIA's containers ask for TF32.
    """

    def __init__(self) -> None:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self._tiles: dict[tuple[torch.Size, torch.dtype], tuple[int, ...]] = {}

    def prepare(self, weight: Tensor) -> TiledLinear:
        """Make W `[out, in]` ready, where it lies."""
        key = (weight.shape, weight.dtype)
        if key not in self._tiles:
            generator = torch.Generator(weight.device).manual_seed(0)
            x = torch.randn(
                TILES[-1], weight.shape[1], generator=generator, device=weight.device
            ).to(weight.dtype)
            self._tiles[key] = choose_tiles(lambda rows: product(rows, weight), x)
        return TiledLinear(weight, self._tiles[key])


def product(x: Tensor, weight: Tensor) -> Tensor:
    """`X Wᵀ` in fp32, not rounded; except on ROCm, whose library rounds to X's dtype."""
    if x.dtype is torch.float32:
        return x @ weight.t()
    if torch.version.hip:
        return (x @ weight.t()).float()
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.t().float()


def choose_tiles(compute: Product, x: Tensor) -> tuple[int, ...]:
    """The row counts to use: of the families that agree, the one with which steps cost least.

    X `[TILES[-1], in]` are rows to try them with.
    """
    results = {tile: compute(x[:tile]) for tile in TILES}
    steady = [tile for tile in TILES if _any_place(compute, x[:tile], results[tile])]
    families = {_family(tile, steady or list(TILES), results) for tile in steady or TILES}
    return min(families, key=cost)


def cover(rows: int, tiles: Sequence[int]) -> list[int]:
    """Tiles that hold `rows` rows together: whole ones of the largest, then the least that fits."""
    whole, rest = divmod(rows, tiles[-1])
    last = [next(tile for tile in tiles if tile >= rest)] if rest else []
    return [tiles[-1]] * whole + last


def cost(tiles: Sequence[int]) -> int:
    """Rows that steps of few and of many rows pay for."""
    few, many = (sum(max(BOUND_ROWS, t) for t in cover(n, tiles)) for n in (TILES[0], TILES[-1]))
    return DECODES_PER_PREFILL * few + many


def _any_place(compute: Product, x: Tensor, result: Tensor) -> bool:
    """Whether a row has the same bits wherever in the tile it stands."""
    return torch.equal(compute(x.flip(0)).flip(0), result)


def _family(tile: int, steady: Sequence[int], results: dict[int, Tensor]) -> tuple[int, ...]:
    """The steady tiles whose rows have the bits that they have in `tile`."""
    return tuple(
        other
        for other in steady
        if torch.equal(results[other][: min(tile, other)], results[tile][: min(tile, other)])
    )
