"""Products in tiles of rows: what they are, and which tiles are chosen."""

import pytest
import torch
from torch import Tensor

from loraplex.engine.gpu.linear import TILES, TiledLinear, TiledLinears, choose_tiles, cover

X = torch.randn(TILES[-1], 24, generator=torch.Generator().manual_seed(0))
W = torch.randn(7, 24, generator=torch.Generator().manual_seed(1))


def even(rows: Tensor) -> Tensor:
    """A product that treats all rows alike."""
    return (rows[:, None] * W).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 100])
def test_product(rows: int, dtype: torch.dtype) -> None:
    x, w = X[:rows].to(dtype), W.to(dtype)
    found = TiledLinear(w, (16, 64)).apply(x)
    assert (found.dtype, found.is_contiguous()) == (torch.float32, True)
    torch.testing.assert_close(found, x.float() @ w.float().t())


@pytest.mark.parametrize(
    ("rows", "tiles"),
    [
        (0, []),
        (1, [16]),
        (16, [16]),
        (17, [64]),
        (64, [64]),
        (65, [64, 16]),
        (200, [64] * 3 + [16]),
    ],
)
def test_cover(rows: int, tiles: list[int]) -> None:
    assert cover(rows, (16, 64)) == tiles


def test_all_tiles_serve_where_rows_agree() -> None:
    assert choose_tiles(even, X) == TILES


def test_tiles_that_agree_with_the_cheapest_steps_are_chosen() -> None:
    def changes_from(least: int) -> tuple[int, ...]:
        return choose_tiles(lambda x: even(x) * (1.0 if len(x) < least else 1.1), X)

    assert changes_from(64) == (64, 128, 256, 512)
    assert changes_from(512) == (16, 32, 64, 128, 256)
    assert changes_from(16) == TILES


def test_tiles_that_treat_places_differently_are_left_out() -> None:
    def product(x: Tensor) -> Tensor:
        y = even(x)
        if len(x) in (16, 512):
            y[3] *= 1.1
        return y

    assert choose_tiles(product, X) == (32, 64, 128, 256)


def test_some_tile_is_chosen_where_none_is_good() -> None:
    noise = torch.Generator().manual_seed(0)
    assert len(choose_tiles(lambda x: torch.randn(len(x), 3, generator=noise), X)) == 1


def test_products_of_fp32_are_not_rounded() -> None:
    """As NVIDIA's containers ask for, in their environment."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        TiledLinears()
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_shape_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def choose(compute: object, x: Tensor) -> tuple[int, ...]:
        measured.append(x.shape)
        return TILES

    monkeypatch.setattr("loraplex.engine.gpu.linear.choose_tiles", choose)
    linears = TiledLinears()
    for weight in (W, W + 1, W[:3]):
        torch.testing.assert_close(linears.prepare(weight).apply(X[:5]), X[:5] @ weight.t())
    assert len(measured) == 2
