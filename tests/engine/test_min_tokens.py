"""No end before `min_tokens`: as Transformers' `min_new_tokens`, and the same in any company."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from loraplex.engine.ahead import may_fly
from loraplex.engine.outcome import Outcome, outcome_of
from loraplex.engine.plan import Plan, Scheduled
from loraplex.engine.protocol import Beams, Finished, Generate, Guide, Sampling
from loraplex.engine.sampler import Row, draw_on_host, sample
from loraplex.engine.sequence import from_request

Start = Callable[..., Any]
STOPS = tuple(range(1, 40))  # of the stand-in's 64 tokens, with its EOS 0
BARRED = (*STOPS, 0)
SHORT = {"stop_token_ids": STOPS, "min_tokens": 6, "max_tokens": 20}
ASKED = [{}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.3, "top_k": 9, "seed": 6}]
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def model() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("penalty", [1.0, 1.4])
@pytest.mark.parametrize("least", [0, 1, 5, 12])
@torch.no_grad()
def test_greedy_equals_transformers(
    model: transformers.LlamaForCausalLM, least: int, penalty: float
) -> None:
    free = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=3, do_sample=False, repetition_penalty=penalty
    )
    ends = sorted(set(free[0, len(PROMPT) :].tolist()))
    expected = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=12, min_new_tokens=least or None, do_sample=False,
        repetition_penalty=penalty, eos_token_id=ends, pad_token_id=ends[0],
    )[0].tolist()  # fmt: skip
    sampling = Sampling(12, 0.0, repetition_penalty=penalty, min_tokens=least)
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + 12 and not set(tokens[-1:]) & set(ends) - set(PROMPT[-1:]):
        logits = model(torch.tensor([tokens])).logits[:, -1].float()
        (choice,) = sample(outcome_of(logits), [Row(sampling, tokens, 5, 0, None, ends)])
        assert choice is not None
        tokens.append(choice.token_id)
    assert tokens == expected


def tokens_of(rig: Start, requests: list[Generate], **options: Any) -> list[list[int]]:
    subject = rig(**options)
    subject.add(*requests)
    subject.step()  # a guide comes in beside the first
    subject.drain()
    assert subject.holds_nothing()
    assert all(isinstance(subject.end(each.request_id), Finished) for each in requests)
    return [subject.tokens(each.request_id) for each in requests]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_before_it_tokens_are_those_of_a_model_that_has_no_ends(
    rig: Start, stand_in: ModuleType, asked: dict[str, Any]
) -> None:
    subject = stand_in.request("r", 7, **SHORT, **asked)
    never = {"logit_bias": tuple((token, -1e9) for token in BARRED), "max_tokens": 6}
    (found,) = tokens_of(rig, [subject])
    (first,) = tokens_of(rig, [stand_in.request("r", 7, **never, **asked)])
    assert found[:6] == first and not set(first) & set(BARRED)
    assert 6 < len(found) < 20 and found[-1] in BARRED
    if not asked:
        rest = stand_in.request("r", 7, *first, stop_token_ids=STOPS, max_tokens=14)
        assert tokens_of(rig, [rest]) == [found[6:]]


@pytest.mark.parametrize(
    "options",
    [{}, {"late": True}, {"num_blocks": 33}, {"speculative_tokens": 3}],
    ids=["together", "ahead", "preempting", "guessing"],
)
def test_company_changes_nothing(rig: Start, stand_in: ModuleType, options: dict[str, Any]) -> None:
    requests = [
        stand_in.request(str(i), i, i, **{**SHORT, "min_tokens": i % 8}, **ASKED[i % 3])
        for i in range(12)
    ]
    alone = [tokens_of(rig, [each])[0] for each in requests]
    assert tokens_of(rig, requests, **options) == alone
    for each, tokens in zip(requests, alone, strict=True):
        assert not set(tokens[: each.sampling.min_tokens]) & set(BARRED)
        assert tokens[-1] in BARRED or len(tokens) == 20


def test_a_sequence_flies_once_it_is_long_enough(rig: Start, stand_in: ModuleType) -> None:
    subject = rig(late=True)
    subject.add(stand_in.request("r", 7, ignore_eos=True, min_tokens=4, max_tokens=9))
    subject.drain()
    assert len(subject.tokens("r")) == 9 and subject.executor.launched == 5
    assert 0 not in subject.tokens("r")[:4]


def test_tokens_on_their_way_count() -> None:
    asked = Generate("r", (1,), Sampling(9, min_tokens=2, stop_token_ids=(5,)))
    sequence = from_request(asked, 0.0, (), 100)
    for ahead, flies in ((0, False), (1, False), (2, True)):
        sequence.ahead = ahead
        assert may_fly(Plan((Scheduled(sequence, 0, 1, 1),))) == flies


def test_a_device_draws_rows_that_are_too_short_without_what_is_barred() -> None:
    heard: list[tuple[Outcome, Any]] = []

    def draw(outcome: Outcome, draws: Any) -> list[int | None]:
        heard.append((outcome, draws))
        return draw_on_host(outcome, draws)

    logits = torch.zeros(2, 8)
    logits[:, 5] = 50.0
    asked = Sampling(9, min_tokens=2)
    short, long = (Row(asked, tokens, 1, 0, None, (5,)) for tokens in ((1, 2), (1, 2, 3)))
    found = sample(replace(outcome_of(logits), draw=draw), [short, long])
    (_, plain), (barred, again) = heard
    assert plain[0] is None and plain[1] is not None and len(again) == 1
    assert barred.logits.isneginf().tolist() == [[token == 5 for token in range(8)]]
    assert found[0] is not None and found[0].token_id != 5
    assert found[1] is not None and found[1].token_id == 5


@pytest.mark.parametrize(
    ("text", "stops", "tokens"),
    [
        ("3 4", (), [3, 4]),  # complete
        ("3 4 5", (4,), [3, 4]),  # its only way on
        ("3,4 5,6 7", (3, 6), [4, 5, 7]),
    ],
)
def test_a_guide_goes_before(
    rig: Start, stand_in: ModuleType, text: str, stops: tuple[int, ...], tokens: list[int]
) -> None:
    guide = Guide("grammar", text)
    bias = ((3, 9.0), (6, 9.0))
    asked = stand_in.request("r", guide=guide, stop_token_ids=stops, min_tokens=8, logit_bias=bias)
    assert tokens_of(rig, [asked]) == [tokens]


def test_ends_that_the_base_does_not_have_harm_nobody(rig: Start, stand_in: ModuleType) -> None:
    odd = stand_in.request("odd", 7, stop_token_ids=(-1, 64, 1 << 40), min_tokens=3)
    plain = stand_in.request("plain", 7)
    assert tokens_of(rig, [odd, plain])[1:] == tokens_of(rig, [plain])


def test_where_all_tokens_are_ends_one_comes(rig: Start, stand_in: ModuleType) -> None:
    everything = {"stop_token_ids": tuple(range(64)), "min_tokens": 4}
    plain, ends = stand_in.request("plain", 7, max_tokens=1), stand_in.request("r", 7, **everything)
    assert tokens_of(rig, [ends]) == tokens_of(rig, [plain])


def test_each_beam_and_each_choice_is_long_enough(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    subject.add(
        stand_in.request("beams", 7, **SHORT, beams=Beams(3), choices=3),
        stand_in.request("choices", 7, **SHORT, temperature=1.0, choices=3),
    )
    subject.drain()
    for tokens in (subject.tokens(name, i) for name in ("beams", "choices") for i in range(3)):
        assert len(tokens) > 6 and not set(tokens[:6]) & set(BARRED)
    assert len({tuple(subject.tokens("choices", i)) for i in range(3)}) > 1
    assert subject.holds_nothing()
