"""Draws of the native step against the same in fp64, and in any company."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from loraplex.engine.draw import HOTTEST, Draw
from loraplex.engine.native.draws import draw_rows
from loraplex.engine.outcome import Outcome
from loraplex.kernels.cpu.library import Library, Model, load_library

NEAR = 1e-5  # of a mass: where fp32 and fp64 may rightly differ
LAST = 1 - 2.0**-53
UNLIMITED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

Logits = NDArray[np.float32]
DrawAll = Callable[[Logits, Sequence[Draw | None]], list[int | None]]
Drawers = Callable[[int, int], DrawAll]  # by vocabulary and threads


@pytest.fixture(scope="module")
def drawer(isa: str) -> Iterator[Drawers]:
    """Makes what draws rows of a vocabulary on some threads: a model's that is never run."""
    library, handles = load_library(isa), []

    @functools.cache
    def start(vocabulary: int, threads: int) -> DrawAll:
        model = Model(vocab=vocabulary, heads=1, kv_heads=1, head_dim=16, hidden=16, inner=16)
        handles.append(library.start(model, 1, 1, threads, ()))
        return functools.partial(draw, library, handles[-1])

    yield start
    for handle in handles:
        library.stop(handle)


def draw(
    library: Library, handle: int, logits: Logits, draws: Sequence[Draw | None]
) -> list[int | None]:
    matrix = torch.from_numpy(logits)
    peak, likeliest = matrix.max(1)
    return draw_rows(library, handle, Outcome(matrix, likeliest, peak), draws)


def limits(**changes: Any) -> Any:
    return SimpleNamespace(**{**UNLIMITED, **changes})


def weigh(row: Logits, sampling: Any) -> NDArray[np.float64]:
    """Weights fp64 of what top-k keeps, 0 elsewhere."""
    logits = row.astype(np.float64)
    weights = np.exp((logits - logits.max()) / min(sampling.temperature, HOTTEST))
    if 0 < sampling.top_k < len(row):
        weights[logits < np.sort(logits)[-sampling.top_k]] = 0
    return weights


def least(weights: NDArray[np.float64], top_p: float) -> float:
    """The least weight that top-p keeps."""
    if top_p >= 1:
        return 0.0
    ordered = np.sort(weights)[::-1]
    last = int(np.searchsorted(np.cumsum(ordered), top_p * weights.sum()))
    return float(ordered[min(last, len(ordered) - 1)])


def may_come(
    row: Logits, weights: NDArray[np.float64], floor: float, share: float, token: int
) -> bool:
    """Whether `share` draws `token` of what is no less than `floor`, give or take a rounding.

    Tokens whose weights are as good as the floor may be kept or not, unless they are all the same.
    """
    edge = np.abs(weights - floor) <= NEAR * floor
    certain = floor == 0 or (floor in weights and len({*row[edge]}) == 1)
    kept = np.where((weights >= floor) | edge, weights, 0)
    whole, sums = kept.sum(), np.cumsum(kept)
    near = NEAR + (0 if certain else kept[edge].sum() / whole)
    after, before = sums[token] / whole, (sums[token] - kept[token]) / whole
    return bool(kept[token] > 0 and before - near <= share <= after + near)


def is_right(row: Logits, draw: Draw, token: int | None) -> bool:
    """Whether `token` is what fp64 draws, with this top-p or one very near."""
    weights = weigh(row, draw.sampling)
    floors = [
        max(least(weights, draw.sampling.top_p * by), draw.sampling.min_p)
        for by in (1, 1 - NEAR, 1 + NEAR)
    ]
    return token is not None and any(
        may_come(row, weights, floor, draw.share, token) for floor in floors
    )


VOCABULARIES = (1, 7, 8, 33, 513, 1031, 2500)
SHARES = st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 0.5, LAST])
SAMPLINGS = st.builds(
    limits,
    temperature=st.sampled_from([1e-5, 0.3, 0.8, 1.0, 2.0, 1e4, 1e30, 1e35]),
    top_k=st.sampled_from([0, 0, 1, 2, 50, 1024, 1025, 5000]),
    top_p=st.sampled_from([1.0, LAST, 0.999, 0.9, 0.5, 1e-12]),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.05, 1.0]),
)


def noise(seed: int, shape: tuple[int, ...], shape_of: str) -> Logits:
    """Random logits: wide, narrow, all the same, with ties, or most of them -inf."""
    values = np.random.default_rng(seed).standard_normal(shape)
    spread = {"wide": 4.0, "narrow": 0.02, "same": 0.0, "tied": 3.0, "masked": 3.0}[shape_of]
    logits = (values * spread + 3).astype(np.float32)
    if shape_of == "tied":
        logits = logits.round()
    if shape_of == "masked":
        logits[:, 1:][values[:, 1:] < 1] = -np.inf
    return logits


ROWS = st.tuples(SAMPLINGS, SHARES)
KINDS = st.sampled_from(["wide", "narrow", "same", "tied", "masked"])


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.integers(0, 2**32), KINDS, st.sampled_from(VOCABULARIES), st.sampled_from([1, 2, 3]),
    st.lists(st.none() | ROWS, min_size=1, max_size=64),
)  # fmt: skip
def test_draws_what_fp64_draws(
    drawer: Drawers, seed: int, kind: str, vocabulary: int, threads: int, asked: list[Any]
) -> None:
    logits = noise(seed, (len(asked), vocabulary), kind)
    draws = [each and Draw(*each) for each in asked]
    tokens = drawer(vocabulary, threads)(logits, draws)
    for row, draw, token in zip(logits, draws, tokens, strict=True):
        if draw is None:
            assert token == row.argmax()
        else:
            assert is_right(row, draw, token), (draw, token)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 2**32), KINDS, st.lists(ROWS, min_size=2, max_size=32), st.data())
def test_a_row_does_not_know_its_neighbours(
    drawer: Drawers, seed: int, kind: str, asked: list[Any], data: st.DataObject
) -> None:
    """Nor how many threads there are."""
    logits, draws = noise(seed, (len(asked), 1031), kind), [Draw(*each) for each in asked]
    alone = [drawer(1031, 1)(logits[i : i + 1], [draws[i]])[0] for i in range(len(asked))]
    order = data.draw(st.permutations(range(len(asked))))
    for threads in (1, 2, 3):
        tokens = drawer(1031, threads)(logits[order], [draws[i] for i in order])
        assert tokens == [alone[i] for i in order]


@pytest.mark.parametrize("at", [0, 511, 512, 700])
@pytest.mark.parametrize("share", [0.0, 0.5, LAST])
@pytest.mark.parametrize(
    "limit", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_p": 0.1, "top_k": 2}, {}]
)
def test_the_only_token_that_is_left(
    drawer: Drawers, at: int, share: float, limit: dict[str, float]
) -> None:
    row = np.full((1, 701), 0.0 if limit else -500.0, np.float32)
    row[0, at] = 5.0
    assert drawer(701, 1)(row, [Draw(limits(**limit), share)]) == [at]


def test_the_ends_of_what_is_kept(drawer: Drawers) -> None:
    row = np.full((1, 1500), -np.inf, np.float32)
    row[0, [3, 40, 900]] = 1.0
    for limit in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.5}, {"temperature": 1e35}):
        for share, token in ((0.0, 3), (0.3, 3), (0.34, 40), (0.67, 900), (LAST, 900)):
            assert drawer(1500, 1)(row, [Draw(limits(**limit), share)]) == [token]


def test_top_p_keeps_the_shortest_prefix(drawer: Drawers) -> None:
    """Of tokens in falling order the last share draws the last that is kept."""
    row = (-0.003 * np.arange(1031, dtype=np.float32))[None]
    sums = np.cumsum(np.exp(row[0].astype(np.float64)))
    for top_p in np.linspace(0.01, 0.99, 50):
        (token,) = drawer(1031, 1)(row, [Draw(limits(top_p=float(top_p)), LAST)])
        assert token == np.searchsorted(sums, top_p * sums[-1])


def test_top_p_keeps_what_is_much_less_likely_than_the_first(drawer: Drawers) -> None:
    row = np.linspace(-9, -9.5, 50_000, dtype=np.float32)[None]
    row[0, 0] = 0.0
    sums = np.cumsum(np.exp(row[0].astype(np.float64)))
    for top_p in (0.5, 0.9, 0.99):
        (token,) = drawer(50_000, 1)(row, [Draw(limits(top_p=top_p), LAST)])
        assert token is not None
        assert sums[token] / sums[-1] == pytest.approx(top_p, rel=NEAR)


def test_rows_that_are_not_finite_have_no_token(drawer: Drawers) -> None:
    logits = noise(0, (3, 33), "wide")
    logits[1, 5] = math.nan
    draw = Draw(limits(top_p=0.9), 0.4)
    first, none, last = drawer(33, 2)(logits, [draw, draw, None])
    assert none is None and last == logits[2].argmax()
    assert first == drawer(33, 2)(logits[:1], [draw])[0]


def test_the_least_weights_are_not_lost(drawer: Drawers) -> None:
    """A sum of many small weights beside a large one, block by block."""
    row = np.full((1, 50_000), -12.0, np.float32)
    row[0, 49_999] = 0.0
    lesser = 49_999 * math.exp(-12)
    for share in np.linspace(0, LAST, 64):
        draw = Draw(limits(), float(share))
        (token,) = drawer(50_000, 1)(row, [draw])
        assert token is not None
        expected = share * (1 + lesser) / math.exp(-12)
        assert abs(token - min(expected, 49_999)) <= 2
