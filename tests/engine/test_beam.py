"""Beam search equals Transformers' on a tiny random model, and ends as it says."""

import math
from itertools import product

import pytest
import torch
import transformers

from loraplex.engine.beam import BeamSearch, Candidate, Hypothesis
from loraplex.engine.protocol import Beams

VOCAB, PROMPT = 24, [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def model() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def run(model: transformers.LlamaForCausalLM, search: BeamSearch) -> list[Hypothesis]:
    """Every live beam's likeliest tokens, computed anew from its whole text at every step."""
    beams: list[list[int]] = [[]]
    while beams:
        logits = model(torch.tensor([PROMPT + beam for beam in beams])).logits[:, -1].float()
        best = logits.log_softmax(-1).topk(search.tops)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        chosen = search.advance([list(zip(*pair, strict=True)) for pair in pairs])
        beams = [[*beams[candidate.beam], candidate.token] for candidate in chosen]
    return search.results()


def generate(
    model: transformers.LlamaForCausalLM,
    beams: Beams,
    choices: int,
    ends: list[int],
    most: int,
    least: int,
) -> tuple[list[tuple[int, ...]], list[float]]:
    """Transformers' hypotheses, without the padding behind their ends, and their scores."""
    found = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        num_beams=beams.width,
        num_return_sequences=choices,
        length_penalty=beams.length_penalty,
        early_stopping=beams.early_stopping,
        do_sample=False,
        max_new_tokens=most,
        min_new_tokens=least or None,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    texts = [cut(row[len(PROMPT) :], ends) for row in found.sequences.tolist()]
    return texts, found.sequences_scores.tolist()


def cut(tokens: list[int], ends: list[int]) -> tuple[int, ...]:
    last = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tuple(tokens[: last + 1])


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("ends", [[], [13], [15, 11], [22, 19, 4, 9, 3]])
def test_equals_transformers(model, ends, early_stopping):
    reasons = set()
    for (width, choices), penalty in product([(2, 1), (3, 3), (5, 4)], [-0.5, 0.0, 1.0, 2.0]):
        beams = Beams(width, penalty, early_stopping)
        for most, least in ((1, 0), (9, 0), (9, 4), (9, 9)):
            barred = {"barred": frozenset(ends), "min_tokens": least}
            found = run(model, BeamSearch(beams, choices, tuple(ends), most, **barred))
            tokens, scores = generate(model, beams, choices, ends, most, least)
            assert [hypothesis.tokens for hypothesis in found] == tokens
            assert [hypothesis.score for hypothesis in found] == pytest.approx(scores, rel=1e-5)
            for hypothesis in found:
                assert (hypothesis.reason == "stop") == (hypothesis.tokens[-1] in ends)
                reasons.add(hypothesis.reason)
    assert reasons == ({"stop", "length"} if ends else {"length"})


A, B, END = 1, 2, 0


def logs(*pairs: tuple[int, float]) -> list[tuple[int, float]]:
    return [(token, math.log(probability)) for token, probability in pairs]


def test_beams_name_their_parents():
    search = BeamSearch(Beams(2), 1, (END,), 5)
    first = search.advance([logs((A, 0.6), (B, 0.3), (END, 0.1))])
    assert [(beam, token) for beam, token, _ in first] == [(0, A), (0, B)]
    second = search.advance([logs((A, 0.5), (B, 0.4), (END, 0.1)), logs((B, 0.9), (A, 0.1))])
    assert second == [
        Candidate(0, A, pytest.approx(math.log(0.6 * 0.5))),
        Candidate(1, B, pytest.approx(math.log(0.3 * 0.9))),
    ]


def test_an_end_outside_the_best_is_dropped():
    search = BeamSearch(Beams(1), 1, (END,), 5)
    search.advance([logs((A, 0.6), (END, 0.4))])
    assert search.results() == []


def test_early_stopping_ends_once_all_are_complete():
    search = BeamSearch(Beams(1, early_stopping=True), 1, (END,), 5)
    assert search.advance([logs((END, 0.6), (A, 0.4))]) == []
    assert search.results() == [((END,), pytest.approx(math.log(0.6)), "stop")]


def test_the_search_goes_on_while_a_beam_may_beat_the_worst():
    search = BeamSearch(Beams(2), 2, (END,), 3)
    assert len(search.advance([logs((END, 0.5), (A, 0.3), (B, 0.2))])) == 2
    assert len(search.advance([logs((A, 0.9), (END, 0.1)), logs((A, 0.9), (END, 0.1))])) == 2
    assert search.advance([logs((A, 0.9), (END, 0.1)), logs((A, 0.9), (END, 0.1))]) == []
    assert [found.reason for found in search.results()] == ["length", "length"]


def test_a_barred_token_that_is_no_end_comes_later():
    search = BeamSearch(Beams(2), 1, (), 5, barred=frozenset({A}), min_tokens=1)
    assert search.tops == 3
    likeliest = logs((A, 0.6), (B, 0.3), (END, 0.1))
    assert [token for _, token, _ in search.advance([likeliest])] == [B, END]
    assert [token for _, token, _ in search.advance([likeliest] * 2)] == [A, B]


def test_ends_alone_leave_no_beam():
    search = BeamSearch(Beams(2), 2, (END,), 5)
    assert search.advance([logs((END, 1.0))]) == []
    assert [found.tokens for found in search.results()] == [(END,)]
