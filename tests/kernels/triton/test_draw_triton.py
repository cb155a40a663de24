"""`kernels.triton.draw` against the host's draw: the same token, but where rounding may decide."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from loraplex.engine.draw import Drawer
from loraplex.engine.protocol import Sampling
from loraplex.kernels.triton.draw import BLOCK, FIELDS, draw_rows, feed
from loraplex.kernels.triton.sampling import row_peaks

Randn = Callable[..., Tensor]
SHARES = (0.0, 0.1, 0.37, 0.5, 0.86, 0.999, 1 - 2**-53)
LIMITS = {
    "none": {},
    "hot": {"temperature": 3.0},
    "cold": {"temperature": 0.02},
    "top-k": {"top_k": 5},
    "top-k of all": {"top_k": 100_000},
    "top-p": {"top_p": 0.6},
    "the likeliest alone": {"top_p": 1e-6},
    "min-p": {"min_p": 0.2},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7},
}


def limited(**limits: float) -> Sampling:
    return Sampling(**{"max_tokens": 1, "temperature": 1.0, **limits})


def draw(logits: Tensor, *asked: tuple[Sampling, float] | None) -> list[int]:
    parameters = torch.zeros(len(asked), FIELDS)
    for row, each in zip(parameters, asked, strict=True):
        if each:
            s, share = each
            row[:] = torch.tensor([1 / s.temperature, s.top_k, s.top_p, s.min_p, share])
    chosen = torch.full((len(asked),), 12345, dtype=torch.int32)
    draw_rows(logits, *row_peaks(logits), parameters, chosen)
    return chosen.tolist()


def shares(logits: Tensor, sampling: Sampling, token: int) -> tuple[float, float]:
    """Between which shares the host draws a token, to a two-thousandth."""
    row, found = logits.numpy(), []
    for share in np.linspace(0, 0.9995, 2000):
        found.append(Drawer(len(row)).draw(row, float(row.max()), sampling, float(share)))
    places = np.flatnonzero(np.array(found) == token) / 2000
    return places.min(initial=2), places.max(initial=-1)


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("size", [1, 53, BLOCK + 77])
def test_draws_what_the_host_draws(randn: Randn, size: int, limits: dict[str, float]) -> None:
    logits, sampling = randn(1, size) * 2, limited(**limits)
    rows = logits.expand(len(SHARES), size).contiguous()
    found = draw(rows, *((sampling, share) for share in SHARES))
    drawer, row = Drawer(size), logits[0].numpy()
    expected = [drawer.draw(row, float(row.max()), sampling, share) for share in SHARES]
    for token, other, share in zip(found, expected, SHARES, strict=True):
        if token != other:  # the running sums are of fp32 in another order
            first, last = shares(logits[0], sampling, token)
            assert first - 1e-3 <= share <= last + 1e-3


def test_ties_with_the_last_that_a_limit_keeps_are_kept() -> None:
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, 1.0, 2.0, 1.0]])
    for limits, kept in (
        ({"top_k": 1}, {1, 3, 5}),
        ({"top_k": 4}, {1, 3, 4, 5, 6}),
        ({"top_k": 6}, set(range(7))),
        ({"top_p": 0.5}, {1, 3, 5}),
        ({"min_p": 0.36}, {1, 3, 4, 5, 6}),
        ({"min_p": 0.37}, {1, 3, 5}),
    ):
        asked = [(limited(**limits), n / 32) for n in range(32)]
        assert set(draw(logits.expand(32, 7).contiguous(), *asked)) == kept, limits


def test_rows_do_not_know_each_other(randn: Randn) -> None:
    logits = randn(5, 300)
    logits[3, 7] = torch.nan
    sampling = limited(temperature=0.8, top_p=0.95, top_k=40)
    asked = [None, (sampling, 0.3), (sampling, 0.7), (sampling, 0.3), None]
    together = draw(logits, *asked)
    assert together[3] == -1
    assert together[0] == int(logits[0].argmax()) and together[4] == int(logits[4].argmax())
    for row in range(5):
        assert draw(logits[row : row + 1].contiguous(), asked[row]) == [together[row]]


def test_draws_follow_the_distribution(randn: Randn) -> None:
    """A draw at each of many evenly spread shares gives a token as often as it is likely."""
    logits, count = randn(1, 6), 100
    asked = [(limited(), (n + 0.5) / count) for n in range(count)]
    found = torch.tensor(draw(logits.expand(count, 6).contiguous(), *asked))
    parts = torch.bincount(found, minlength=6) / count
    assert torch.allclose(parts, logits[0].softmax(0), atol=2 / count)


@pytest.mark.parametrize("count", [1, 300])
def test_feed(count: int) -> None:
    chosen = torch.tensor([7, -1, 9], dtype=torch.int32)
    ids = torch.tensor([5, -1, -2, -3, 0] * (count // 5 + 1), dtype=torch.int32)[:count]
    expected = torch.tensor([5, 7, 0, 9, 0] * (count // 5 + 1), dtype=torch.int32)[:count]
    feed(ids, chosen)
    assert torch.equal(ids, expected)


def test_no_rows() -> None:
    assert draw(torch.empty(0, 9)) == []
