"""The door, field by field: what is at a limit comes in, what is past it hears why not."""

import math
from typing import Any

import msgspec
import pytest

from loraplex.engine.protocol import (
    Beams,
    Generate,
    Guide,
    Part,
    Policy,
    Sampling,
    composition_digest,
)
from loraplex.engine.validate import refusal

A, B = "a" * 64, "b" * 64
PARTS = (Part(A, 0.5), Part(B, -1.0))
COMPOSED = {"image": composition_digest(PARTS), "parts": PARTS}


def request(sampling: dict[str, Any] | None = None, **fields: Any) -> Generate:
    plain = Generate("r", (1, 2), Sampling(4, **(sampling or {})))
    return msgspec.structs.replace(plain, **fields)


def judge(made: Generate) -> str | None:
    return refusal(made, vocab_size=64, max_model_len=128, max_num_seqs=8)


@pytest.mark.parametrize(
    "made",
    [
        request(),
        request(token_ids=(63,) * 127),
        request(choices=8),
        request({"prompt_logprobs": 20, "logprobs": 20, "draft_tokens": 16}),
        request({"prompt_logprobs": 0, "draft_tokens": 0}),
        request({"min_tokens": 4}),
        request({"guide": Guide("regex", "é" * (128 << 10))}),
        request(policy=Policy(weight=1e-9, max_running=1, kv_share=1.0, resident_bytes=1)),
        request({"temperature": 0.0}, beams=Beams(8), choices=8),
        request(**COMPOSED),
        request(image=composition_digest(PARTS), parts=PARTS[::-1]),
    ],
)
def test_what_is_within_limits_comes_in(made: Generate) -> None:
    assert judge(made) is None


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (request(token_ids=()), "no tokens"),
        (request(token_ids=(1,) * 128), "at most 127 leave room"),
        (request(token_ids=(64,)), "outside the vocabulary of 64"),
        (request({"prompt_logprobs": 21}), "prompt_logprobs must"),
        (request({"prompt_logprobs": -1}), "prompt_logprobs must"),
        (request({"min_tokens": 5}), "min_tokens must be between 0 and max_tokens"),
        (request({"min_tokens": -1}), "min_tokens must"),
        (request({"logprobs": 21}), "logprobs must"),
        (request({"draft_tokens": 17}), "draft_tokens must"),
        (request({"draft_tokens": -1}), "draft_tokens must"),
        (request({"guide": Guide("regex", "é" * (128 << 10) + "a")}), "262145 bytes"),
        (request(choices=0), "between 1 and 8 choices"),
        (request(choices=9), "between 1 and 8 choices"),
        (request(image="a"), "64 hexadecimal digits"),
        (request(policy=Policy(weight=0.0)), "weight must"),
        (request(policy=Policy(weight=math.inf)), "weight must"),
        (request(policy=Policy(weight=math.nan)), "weight must"),
        (request(policy=Policy(max_running=0)), "max_running must"),
        (request(policy=Policy(kv_share=0.0)), "kv_share must"),
        (request(policy=Policy(kv_share=1.01)), "kv_share must"),
        (request(policy=Policy(resident_bytes=0)), "resident_bytes must"),
        (request(policy=Policy(kv_share=math.nan)), "kv_share must"),
    ],
)
def test_what_is_past_them_hears_why_not(made: Generate, words: str) -> None:
    assert words in (judge(made) or "")


@pytest.mark.parametrize(
    ("sampling", "fields", "words"),
    [
        ({}, {"beams": Beams(1)}, "between 2 and 8 beams"),
        ({}, {"beams": Beams(9)}, "between 2 and 8 beams"),
        ({}, {"beams": Beams(2), "choices": 3}, "more choices than"),
        ({}, {"beams": Beams(2, length_penalty=math.nan)}, "length_penalty"),
        ({"temperature": 1.0}, {}, "temperature must be 0"),
        ({"guide": Guide("regex", "a")}, {}, "follow a guide"),
        ({"draft_tokens": 3}, {}, "no drafts"),
        ({"logprobs": 0}, {}, "no logprobs"),
    ],
)
def test_beam_search_goes_with_little(
    sampling: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    made = request({"temperature": 0.0} | sampling, **{"beams": Beams(4)} | fields)
    assert words in (judge(made) or "")


@pytest.mark.parametrize(
    ("image", "parts", "words"),
    [
        (A, PARTS, "not the digest"),
        (None, PARTS, "not the digest"),
        (A, (Part("a", 1.0),), "64 hexadecimal digits"),
        (composition_digest((Part(A, math.nan),)), (Part(A, math.nan),), "must be finite"),
        (composition_digest(PARTS[:1] * 17), PARTS[:1] * 17, "at most 16 parts"),
    ],
)
def test_a_composition_is_what_its_digest_says(
    image: str | None, parts: tuple[Part, ...], words: str
) -> None:
    assert words in (judge(request(image=image, parts=parts)) or "")
