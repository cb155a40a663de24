"""Log-probabilities against float64, row by row and in any batch."""

import math

import numpy as np
import pytest
import torch

from loraplex.engine.logprobs import ROWS, prompt_logprobs, tops

VOCABULARY = 700


def noise(rows: int) -> torch.Tensor:
    values = np.random.default_rng(rows).standard_normal((rows, VOCABULARY)) * 3
    return torch.from_numpy(values.astype(np.float32))


def reference(row: torch.Tensor) -> np.ndarray:
    exact = row.numpy().astype(np.float64)
    return exact - np.log(np.exp(exact).sum())


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("rows", [0, 1, ROWS, 2 * ROWS + 3])
def test_a_prompts_are_those_of_the_tokens_that_came(rows: int, count: int) -> None:
    logits, tokens = noise(rows), [(37 * row) % VOCABULARY for row in range(rows)]
    found = prompt_logprobs(logits, tokens, count)
    assert [each.token_id for each in found] == tokens
    for row, each in zip(logits, found, strict=True):
        exact = reference(row)
        assert each.logprob == pytest.approx(exact[each.token_id], abs=1e-5)
        assert [token for token, _ in each.top] == np.argsort(-exact)[:count].tolist()
        highest = np.sort(exact)[::-1][:count]
        assert [value for _, value in each.top] == pytest.approx(highest, abs=1e-5)


def test_a_row_does_not_know_its_neighbours() -> None:
    logits, tokens = noise(2 * ROWS), list(range(2 * ROWS))
    together = prompt_logprobs(logits, tokens, 4)
    for row, token in enumerate(tokens):
        assert prompt_logprobs(logits[row : row + 1], [token], 4) == together[row : row + 1]
        assert tops(logits, row, 4) == list(together[row].top)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_no_tops(bad: float) -> None:
    logits = noise(2)
    logits[0, 3] = bad
    assert tops(logits, 0, 4) == []
    assert len(tops(logits, 1, VOCABULARY + 9)) == VOCABULARY
