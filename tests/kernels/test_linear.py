"""`kernels.linear` and the padding that it falls back to."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loraplex.kernels import linear, rows
from loraplex.kernels.linear import PackedLinear, PaddedLinear, prepare_linear

SHAPES = [(33, 64), (960, 576), (576, 1536), (7, 100), (1, 5), (16, 385)]  # out, in
KINDS = [PackedLinear, PaddedLinear]

Randn = Callable[..., Tensor]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 3, 8, 61])
def test_product(randn: Randn, kind: type, shape: tuple[int, int], count: int) -> None:
    weight, x = randn(*shape), randn(count, shape[1])
    expected = torch.stack([(weight.double() * row.double()).sum(1) for row in x])
    y = kind(weight).apply(x)
    assert y.shape == (count, shape[0]) and y.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_alike(
    randn: Randn, same_rows: Callable[..., None], kind: type, shape: tuple[int, int]
) -> None:
    same_rows(kind(randn(*shape)).apply, randn(67, shape[1]))


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_widened(randn: Randn, kind: type) -> None:
    weight, x = randn(48, 96), randn(5, 96).bfloat16()
    assert torch.equal(kind(weight).apply(x), kind(weight).apply(x.float()))


def test_long_sums_are_as_exact_as_short_ones(randn: Randn) -> None:
    """One running sum over 3072 terms is off by 3.2e-5 on average."""
    weight, x = randn(64, 3072), randn(64, 3072)
    error = PackedLinear(weight).apply(x).double() - x.double() @ weight.double().t()
    assert error.square().mean().sqrt() < 1.6e-5


def test_falls_back_without_the_operator(randn: Randn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "packed_rows_agree", lambda *shape: False)
    assert isinstance(prepare_linear(randn(8, 8)), PaddedLinear)


def test_probe_sees_rows_that_differ(randn: Randn) -> None:
    def careless(x: Tensor) -> Tensor:
        return x + (1e-7 if len(x) % 4 else 0.0)

    x = randn(16, 4)
    assert rows.rows_agree(careless, x, [4, 8])
    assert not rows.rows_agree(careless, x, [4, 5])


def test_quantum_is_one_of_the_known() -> None:
    assert rows.row_quantum() in rows.QUANTA


@pytest.mark.parametrize("count", [1, 4, 5])
def test_padding_is_zero(randn: Randn, count: int) -> None:
    x = randn(count, 10)
    padded = rows.pad_columns(rows.pad_rows(x))
    assert padded.shape[0] % rows.row_quantum() == padded.shape[1] % rows.COLUMNS == 0
    assert torch.equal(padded[:count, :10], x)
    assert padded.count_nonzero() == x.count_nonzero()


@pytest.mark.parametrize(("work", "alone"), [(rows.SMALL_WORK - 1, True), (rows.SMALL_WORK, False)])
def test_threads_for_puts_the_number_back(threads: int, work: int, alone: bool) -> None:
    with pytest.raises(KeyError), rows.threads_for(work):
        assert torch.get_num_threads() == (1 if alone else threads)
        raise KeyError
    assert torch.get_num_threads() == threads
