"""The sampler against plain maths, one rule at a time and all together, and in any batch."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine import sampler
from loraplex.engine.draw import BLOCK, Draw
from loraplex.engine.outcome import Outcome, outcome_of
from loraplex.engine.philox import uniform
from loraplex.engine.protocol import Sampling
from loraplex.engine.sampler import Choice, Row

VOCABULARY = 700  # no multiple of a block


def row_of(
    sampling: Sampling,
    prompt: tuple[int, ...] = (1,),
    generated: tuple[int, ...] = (),
    mask: np.ndarray | None = None,
) -> Row:
    return Row(sampling, prompt + generated, len(prompt), sampling.seed, mask)


def sample(logits: torch.Tensor, owners: list[Row]) -> list[Choice | None]:
    return sampler.sample(outcome_of(logits), owners)


def choose(row: np.ndarray, sampling: Sampling, **fields: Any) -> int:
    (choice,) = sample(torch.from_numpy(row)[None], [row_of(sampling, **fields)])
    assert choice is not None
    return choice.token_id


def noise(seed: int, *, spread: float = 3.0, rows: int | None = None) -> np.ndarray:
    shape = (VOCABULARY,) if rows is None else (rows, VOCABULARY)
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(np.float32)


def reference_logits(row: np.ndarray, owner: Row) -> np.ndarray:
    """Penalties and biases, a token at a time."""
    s, adjusted = owner.sampling, row.astype(np.float64)
    generated = owner.token_ids[owner.prompt_len :]
    for token in set(owner.token_ids):
        factor = s.repetition_penalty
        adjusted[token] = (
            adjusted[token] / factor if adjusted[token] > 0 else adjusted[token] * factor
        )
    for token in generated:
        adjusted[token] -= s.frequency_penalty
    for token in set(generated):
        adjusted[token] -= s.presence_penalty
    for token, bias in s.logit_bias:
        adjusted[token] += bias
    if owner.mask is not None:
        adjusted[[t for t in range(VOCABULARY) if not owner.mask[t // 32] >> t % 32 & 1]] = -np.inf
    return adjusted


def mask_of(tokens: set[int]) -> np.ndarray:
    words = [sum(1 << t % 32 for t in tokens if t // 32 == w) for w in range(-(-VOCABULARY // 32))]
    return np.array(words, np.uint32).view(np.int32)


def reference_distribution(row: np.ndarray, owner: Row) -> np.ndarray:
    """The probabilities that a token is drawn with, by the textbook."""
    s = owner.sampling
    scaled = reference_logits(row, owner) / s.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    if s.top_k:
        p[p < np.sort(p)[::-1][min(s.top_k, len(p)) - 1]] = 0
        p /= p.sum()
    if s.top_p < 1:
        ordered = np.sort(p)[::-1]
        last = int(np.argmax(np.cumsum(ordered) >= s.top_p))
        p[p < ordered[last]] = 0
        p /= p.sum()
    p[p < s.min_p * p.max()] = 0
    return p / p.sum()


def reference_token(row: np.ndarray, owner: Row) -> tuple[int, float]:
    """The token that the reference draws, and how far the draw was from another one."""
    cumulative = np.cumsum(reference_distribution(row, owner))
    u = uniform(owner.seed, len(owner.token_ids) - owner.prompt_len)
    return int(np.searchsorted(cumulative, u, side="right")), float(np.abs(cumulative - u).min())


SAMPLINGS = st.builds(
    Sampling,
    max_tokens=st.just(8),
    temperature=st.floats(0.2, 3.0),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 2, 5, BLOCK, VOCABULARY - 1, VOCABULARY, VOCABULARY * 2]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    presence_penalty=st.sampled_from([0.0, 1.5, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.sampled_from([(), ((5, 4.0), (6, -100.0))]),
    seed=st.integers(-(2**63), 2**64 - 1),
)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12).map(tuple)
MASKS = st.none() | st.sets(st.integers(0, VOCABULARY - 1), min_size=1).map(mask_of)


@settings(max_examples=150, deadline=None)
@given(SAMPLINGS, TOKENS, TOKENS, st.integers(0, 50), st.sampled_from([0.3, 3.0]), MASKS)
def test_draws_what_the_reference_draws(
    sampling: Sampling,
    prompt: tuple[int, ...],
    generated: tuple[int, ...],
    seed: int,
    spread: float,
    mask: np.ndarray | None,
) -> None:
    row, owner = noise(seed, spread=spread), row_of(sampling, prompt, generated, mask)
    expected, margin = reference_token(row, owner)
    token = choose(row, sampling, prompt=prompt, generated=generated, mask=mask)
    if margin > 1e-5:  # else float32 and float64 may rightly differ
        assert token == expected
    else:
        assert reference_distribution(row, owner)[token] > 0


@pytest.mark.parametrize("sampling", [Sampling(8, 0.0), Sampling(8), Sampling(8, top_k=9)])
def test_what_a_mask_leaves_out_never_comes(sampling: Sampling) -> None:
    row = noise(9)
    best, second = (int(token) for token in np.argsort(row)[::-1][:2])
    assert choose(row, sampling, mask=mask_of({5})) == 5
    assert choose(row, Sampling(8, 0.0), mask=mask_of({*range(VOCABULARY)} - {best})) == second
    heavy = Sampling(8, sampling.temperature, logit_bias=((best, 99.0),), logprobs=1)
    (choice,) = sample(torch.from_numpy(row)[None], [row_of(heavy, mask=mask_of({5}))])
    assert choice is not None and choice.token_id == 5
    assert choice.logprob is not None and choice.logprob.top[0][0] == best


def test_a_mask_without_tokens_leaves_no_choice_and_harms_nobody() -> None:
    logits = torch.from_numpy(noise(6, rows=2))
    nothing, free = row_of(Sampling(8), mask=mask_of(set())), row_of(Sampling(8))
    assert sample(logits, [nothing, free]) == [None, *sample(logits[1:], [free])]
    greedy = row_of(Sampling(8, 0.0), mask=mask_of(set()))
    assert sample(logits, [greedy, free])[0] is None


def test_the_seed_is_the_rows_own() -> None:
    row = torch.from_numpy(noise(3, spread=1.0))[None]
    asked = Sampling(8, seed=1)
    tokens = {sample(row, [Row(asked, (1,), 1, seed)])[0] for seed in range(20)}
    assert len(tokens) > 10


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_is_the_argmax_after_penalties(temperature: float) -> None:
    row = noise(1)
    best, second = np.argsort(row)[::-1][:2]
    greedy = Sampling(8, temperature)
    assert choose(row, greedy) == best
    banned = Sampling(8, temperature, logit_bias=((int(best), -100.0),))
    assert choose(row, banned) == second
    tired = Sampling(8, temperature, frequency_penalty=2.0)
    assert choose(row, tired, generated=(int(best),) * 9) == second
    assert choose(row, tired, prompt=(int(best),) * 9) == best


def test_a_greedy_row_without_penalties_is_the_outcomes_likeliest() -> None:
    nothing = torch.empty(2, 0)
    outcome = Outcome(nothing, torch.tensor([7, 8]), torch.tensor([1.0, math.nan]))
    greedy = row_of(Sampling(8, 0.0))
    assert sampler.sample(outcome, [greedy, greedy]) == [Choice(7, None), None]


def test_what_a_device_draws_is_not_drawn_again() -> None:
    """Rows whose logits are changed are drawn by the device too, once they are; greedy ones not."""
    heard: list[tuple[Outcome, list[Draw | None]]] = []
    told = iter([[3, 4, 5, None, 6], [7, 8]])

    def draw(outcome: Outcome, draws: Sequence[Draw | None]) -> list[int | None]:
        heard.append((outcome, [*draws]))
        return next(told)

    logits = torch.from_numpy(noise(5, rows=5))
    plain, warm = Sampling(8, 0.0), Sampling(8, 0.7, seed=6, logprobs=0)
    tired, banned = Sampling(8, presence_penalty=0.5), Sampling(8, 0.0, logit_bias=((9, -50.0),))
    owners = [
        Row(each, (1, 2, 3), 2, each.seed) for each in (plain, warm, tired, Sampling(8), banned)
    ]
    subject = replace(outcome_of(logits), draw=draw)
    found = sampler.sample(subject, owners)
    free, changed = heard
    assert free == (
        subject,
        [None, Draw(warm, uniform(6, 1)), None, Draw(Sampling(8), uniform(0, 1)), None],
    )
    assert changed[1] == [Draw(tired, uniform(0, 1)), None]
    assert [c and c.token_id for c in found] == [3, 4, 7, None, 8]
    assert found[1] and found[1].logprob
    expected = logits[[2, 4]].clone()
    expected[0, 3] -= 0.5
    expected[1, 9] -= 50.0
    assert torch.equal(changed[0].logits, expected)
    assert torch.equal(changed[0].likeliest, expected.argmax(1))
    assert torch.equal(changed[0].peak, expected.amax(1))


def test_greedy_rows_are_not_drawn_once_they_are_changed() -> None:
    def draw(outcome: Outcome, draws: Sequence[Draw | None]) -> list[int | None]:
        assert outcome is subject
        return [1]

    row = noise(1)
    subject = replace(outcome_of(torch.from_numpy(row)[None]), draw=draw)
    best, second = (int(token) for token in np.argsort(row)[::-1][:2])
    banned = row_of(Sampling(8, 0.0, logit_bias=((best, -99.0),)))
    assert sampler.sample(subject, [banned]) == [Choice(second, None)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_outcome_has_the_first_of_the_highest(bad: float) -> None:
    logits = torch.from_numpy(noise(8, rows=3))
    logits[0, [5, 9]] = 99.0
    logits[1, 17] = bad
    outcome = outcome_of(logits)
    assert (outcome.likeliest[0], outcome.peak[0]) == (5, 99.0)
    assert outcome.peak[1].isnan()
    assert outcome.peak[2] == logits[2, outcome.likeliest[2]] == logits[2].max()
    assert outcome_of(logits[:0]).likeliest.shape == outcome_of(logits[:0]).peak.shape == (0,)


def test_repetition_penalty_looks_at_the_prompt_and_presence_does_not() -> None:
    row = np.zeros(VOCABULARY, np.float32)
    row[3], row[4] = 2.0, 1.9
    assert choose(row, Sampling(8, 0.0, repetition_penalty=1.5), prompt=(3,)) == 4
    assert choose(row, Sampling(8, 0.0, presence_penalty=1.0), prompt=(3,)) == 3
    assert choose(row, Sampling(8, 0.0, presence_penalty=1.0), generated=(3,)) == 4


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(8),
        Sampling(8, temperature=0.7),
        Sampling(8, temperature=1.5, top_p=0.8),
        Sampling(8, top_k=4),
        Sampling(8, top_k=6, top_p=0.7),
        Sampling(8, min_p=0.2),
    ],
    ids=["plain", "cool", "top_p", "top_k", "top_k and top_p", "min_p"],
)
def test_frequencies_are_those_of_the_distribution(sampling: Sampling) -> None:
    """Pearson's χ² of 2000 draws, one a seed; the bound is passed by chance once in 10⁴."""
    draws, row = 2000, noise(2, spread=2.0)[:12].copy()
    owners = [
        row_of(Sampling(8, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p,
                          seed=seed))
        for seed in range(draws)
    ]  # fmt: skip
    logits = torch.from_numpy(row).expand(draws, -1)
    counts = np.bincount([c.token_id for c in sample(logits, owners) if c], minlength=len(row))
    expected = reference_distribution(row, owners[0]) * draws
    assert counts.sum() == draws
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi2 = float((((counts - expected) ** 2)[kept] / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi2 < bound


def test_a_seed_gives_the_same_text_and_another_seed_another() -> None:
    rows = noise(3, rows=32, spread=1.0)

    def text(seed: int) -> list[int]:
        tokens: tuple[int, ...] = ()
        for row in rows:
            tokens += (choose(row, Sampling(64, seed=seed), generated=tokens),)
        return list(tokens)

    assert text(7) == text(7)
    assert text(7) != text(8)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    text(7)
    assert torch.equal(before, torch.random.get_rng_state())


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40))
def test_uniform_is_numpys(seed: int, position: int) -> None:
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=[0, position, 0, 0])
    assert uniform(seed, position) == np.random.Generator(bits).random()


def test_uniform_is_uniform_over_seeds_and_over_positions() -> None:
    for values in ([uniform(s, 0) for s in range(4000)], [uniform(0, p) for p in range(4000)]):
        assert min(values) >= 0 and max(values) < 1
        assert abs(np.mean(values) - 0.5) < 0.02
        assert np.histogram(values, 10, (0, 1))[0].min() > 320


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(SAMPLINGS, TOKENS, MASKS, st.booleans()), min_size=2, max_size=9), st.data()
)
def test_a_row_does_not_know_its_neighbours(
    asked: list[tuple[Sampling, tuple[int, ...], np.ndarray | None, bool]], data: st.DataObject
) -> None:
    logits = torch.from_numpy(noise(len(asked), rows=len(asked)))
    owners = []
    for sampling, generated, mask, greedy in asked:
        temperature = 0.0 if greedy else sampling.temperature
        changed = Sampling(8, temperature, *list_fields(sampling)[2:-1], 5)
        owners.append(row_of(changed, generated=generated, mask=mask))
    together = sample(logits, owners)
    order = data.draw(st.permutations(range(len(owners))))
    shuffled = sample(logits[order], [owners[i] for i in order])
    for position, i in enumerate(order):
        assert shuffled[position] == together[i]
        assert sample(logits[i : i + 1], [owners[i]]) == [together[i]]


def list_fields(sampling: Sampling) -> list[object]:
    return [getattr(sampling, name) for name in sampling.__struct_fields__]


def test_logits_are_left_as_they_were() -> None:
    logits = torch.from_numpy(noise(4, rows=2))
    before = logits.clone()
    heavy = Sampling(8, 0.5, top_p=0.5, frequency_penalty=1.0, logit_bias=((1, 3.0),))
    sample(logits, [row_of(heavy, generated=(2, 2)), row_of(Sampling(8, 0.0))])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_those_of_the_model(count: int) -> None:
    row = noise(5)
    sampling = Sampling(8, 0.3, top_k=2, logit_bias=((9, 50.0),), logprobs=count)
    (choice,) = sample(torch.from_numpy(row)[None], [row_of(sampling)])
    expected = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    assert choice is not None and choice.logprob is not None
    assert choice.token_id == choice.logprob.token_id == 9
    assert choice.logprob.logprob == pytest.approx(expected[9], abs=1e-5)
    likeliest = np.argsort(row)[::-1][:count].tolist()
    assert [token for token, _ in choice.logprob.top] == likeliest
    assert [value for _, value in choice.logprob.top] == pytest.approx(
        expected[likeliest], abs=1e-5
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_no_choice_and_harms_nobody(bad: float) -> None:
    logits = torch.from_numpy(noise(6, rows=3))
    alone = sample(logits[::2], [row_of(Sampling(8)), row_of(Sampling(8))])
    logits[1, 17] = bad
    choices = sample(logits, [row_of(Sampling(8)) for _ in range(3)])
    assert choices[1] is None
    assert choices[::2] == alone


@pytest.mark.parametrize("at", [9, 0, BLOCK - 1, VOCABULARY - 1])
@pytest.mark.parametrize("limits", [{"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.5}, {}])
def test_a_token_without_probability_is_never_drawn(
    at: int, limits: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = np.full(VOCABULARY, 0.0 if limits else -500.0, np.float32)
    row[at] = 5.0
    for share in (0.0, 1 - 2.0**-53):
        monkeypatch.setattr(sampler, "uniform", lambda *_, share=share: share)
        assert choose(row, Sampling(8, **limits)) == at


def test_limits_that_keep_all_but_rounding_keep_a_token() -> None:
    for limits in ({"top_p": 1e-12}, {"top_p": 1 - 2.0**-53}, {"min_p": 1.0}, {"top_k": 1}):
        assert 0 <= choose(np.zeros(VOCABULARY, np.float32), Sampling(8, **limits)) < VOCABULARY


def test_extreme_temperatures_are_finite() -> None:
    row = noise(7, spread=50.0)
    assert choose(row, Sampling(8, temperature=1.1e-5)) == int(row.argmax())
    assert 0 <= choose(row, Sampling(8, temperature=1e30)) < VOCABULARY
