"""Depth on a running platform: guessed tokens, composed adapters, log-probabilities of prompts."""

import httpx
import pytest

RHYME = "The cat sat on the mat. The dog sat on the log. " * 3 + "The cat sat on"
BLOCK = 16  # tokens
DAYS = "The days of the week are Monday,"


def complete(served, model: str, key: str | None = None, **fields) -> httpx.Response:
    body = {"model": model, "prompt": DAYS, "max_tokens": 16, "temperature": 0} | fields
    with served.http(key or served.api_key) as client:
        return client.post("/v1/completions", json=body)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def composed(served, base: str, *parts: tuple[str, float], **fields) -> httpx.Response:
    adapters = [{"id": name, "weight": weight} for name, weight in parts]
    return complete(served, base, adapters=adapters, **fields)


def test_guessed_tokens_change_no_greedy_text(served, demo_base, house) -> None:
    asked = {"prompt": RHYME, "max_tokens": 24, "ignore_eos": True}
    plain = text_of(complete(served, demo_base.name, **asked, speculative_tokens=0))
    before = _accepted(served)
    guessed = complete(served, demo_base.name, **asked, speculative_tokens=6)
    assert text_of(guessed) == plain
    assert guessed.json()["usage"]["completion_tokens"] == 24
    house.eventually(lambda: _accepted(served) > before, "some guesses were right")


def _accepted(served) -> float:
    return served.metric("loraplex_spec_decode_num_accepted_tokens_total")


def test_a_composition_of_one_adapter_alone_is_that_adapter(served, demo_base) -> None:
    alone = complete(served, "pirate")
    answer = composed(served, demo_base.name, ("pirate", 1.0))
    assert text_of(answer) == text_of(alone)
    model = answer.json()["model"]
    assert model.startswith("composition-")
    assert answer.headers["x-loraplex-digest"].startswith(model.removeprefix("composition-"))


def test_an_adapter_that_weighs_nothing_is_the_base(served, demo_base) -> None:
    answer = composed(served, demo_base.name, ("pirate", 0.0))
    assert text_of(answer) == text_of(complete(served, demo_base.name))


def test_two_adapters_are_composed_in_any_order(served, demo_base) -> None:
    parts = [("pirate", 0.7), ("json", 0.4)]
    orders = parts, parts[::-1]
    one, other = (composed(served, demo_base.name, *each, prompt=RHYME) for each in orders)
    assert text_of(one) == text_of(other) != ""
    assert one.json()["model"] == other.json()["model"]
    cached = other.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (other.json()["usage"]["prompt_tokens"] - 1) // BLOCK * BLOCK


def test_a_composition_of_what_is_not_there_is_not_found(served, demo_base) -> None:
    answer = composed(served, demo_base.name, ("pirate", 1.0), ("pirates", 1.0))
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "adapters.1.id")


def test_another_tenants_adapter_is_not_found_either(served, demo_base) -> None:
    key = served.new_tenant("composing")
    answer = complete(served, demo_base.name, key, adapters=[{"id": "pirate"}])
    assert answer.status_code == 404


@pytest.mark.parametrize("beside", [(), (("pirate", 1.0),)], ids=["alone", "with another"])
def test_a_dora_adapter_is_refused_with_the_reason(served, demo_base, beside) -> None:
    answer = composed(served, demo_base.name, ("emoji", 1.0), *beside)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "adapters"
    assert "DoRA" in error["message"]


@pytest.mark.parametrize("model", ["base", "pirate"])
def test_prompt_logprobs_and_an_echo_agree(served, demo_base, model) -> None:
    """vLLM's way and OpenAI's: the same numbers for the same tokens, however they are asked for."""
    name = demo_base.name if model == "base" else model
    asked = {"prompt": RHYME, "max_tokens": 2}
    told = complete(served, name, **asked, prompt_logprobs=2).json()["choices"][0]
    echoed = complete(served, name, **asked, echo=True, logprobs=2).json()["choices"][0]
    assert echoed["text"] == RHYME + told["text"]
    first, *known = told["prompt_logprobs"]
    logprobs = echoed["logprobs"]
    assert first is None
    assert logprobs["token_logprobs"][0] is None
    for i, entries in enumerate(known, 1):
        own, *_ = entries.values()
        assert own["decoded_token"] == logprobs["tokens"][i]
        assert own["logprob"] == pytest.approx(logprobs["token_logprobs"][i], abs=1e-4)
        top = {each["decoded_token"]: each["logprob"] for each in entries.values()}
        assert top == pytest.approx(logprobs["top_logprobs"][i], abs=1e-4)
    assert len(logprobs["tokens"]) == len(known) + 1 + 2
