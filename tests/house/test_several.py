"""Several completions of one prompt on a running platform: `n`, `best_of`, beams and their ends."""

import json
from collections.abc import Iterator

PROMPT = "The days of the week are Monday,"
SEED = 11
SAMPLED = {"temperature": 0.8, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


def complete(served, model: str, **fields):
    with served.sdk() as sdk:
        return sdk.completions.create(model=model, prompt=PROMPT, **fields)


def texts(answer) -> list[str]:
    return [choice.text for choice in answer.choices]


def test_three_choices_are_those_of_three_requests_with_seeds_in_turn(served, demo_base) -> None:
    together = complete(served, demo_base.name, n=3, seed=SEED, **SAMPLED)
    alone = [
        text
        for i in range(3)
        for text in texts(complete(served, demo_base.name, seed=SEED + i, **SAMPLED))
    ]
    assert texts(together) == alone
    assert len({*alone}) == 3
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert together.usage.completion_tokens == 3 * 12
    single = complete(served, demo_base.name, max_tokens=1)
    assert together.usage.prompt_tokens == single.usage.prompt_tokens


def test_a_stream_of_two_choices_interleaves_them_and_ends_each_once(served, demo_base) -> None:
    whole = complete(served, demo_base.name, n=2, seed=SEED, **SAMPLED)
    asked = {"n": 2, "seed": SEED, "stream": True} | SAMPLED
    with (
        served.sdk() as sdk,
        sdk.completions.create(model=demo_base.name, prompt=PROMPT, **asked) as stream,
    ):
        heard = [choice for chunk in stream for choice in chunk.choices]
    for i, expected in enumerate(texts(whole)):
        own = [choice for choice in heard if choice.index == i]
        assert "".join(choice.text for choice in own) == expected
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["length"]
    first_end = next(i for i, choice in enumerate(heard) if choice.finish_reason)
    assert {choice.index for choice in heard[:first_end]} == {0, 1}


def test_best_of_is_the_likeliest_and_all_are_charged(served, demo_base) -> None:
    asked = {"seed": SEED, "logprobs": 0} | SAMPLED
    three = complete(served, demo_base.name, n=3, **asked).choices
    best = complete(served, demo_base.name, n=1, best_of=3, **asked)
    likeliest = max(three, key=lambda choice: sum(choice.logprobs.token_logprobs))
    assert texts(best) == [likeliest.text]
    assert best.usage.completion_tokens == 3 * 12


def test_beams_find_what_is_at_least_as_likely_as_the_greedy_answer(served, demo_base) -> None:
    greedy = complete(served, demo_base.name, max_tokens=8, temperature=0)
    search = {"use_beam_search": True}
    beams = complete(served, demo_base.name, n=2, best_of=4, max_tokens=8, extra_body=search)
    first, second = texts(beams)
    assert first != second
    ranked = [likelihood(served, demo_base.name, text) for text in (first, second)]
    assert ranked == sorted(ranked, reverse=True)
    assert ranked[0] >= likelihood(served, demo_base.name, texts(greedy)[0]) - 1e-3


def likelihood(served, model: str, text: str) -> float:
    """The log-probability of `text` after the prompt."""
    with served.sdk() as sdk:
        told = (
            sdk.completions.create(
                model=model, prompt=PROMPT + text, echo=True, logprobs=0, max_tokens=1
            )
            .choices[0]
            .logprobs
        )
    pairs = list(zip(told.text_offset, told.token_logprobs, strict=True))[:-1]
    return sum(logprob for offset, logprob in pairs if offset >= len(PROMPT))


def test_a_caller_who_leaves_in_the_middle_leaves_nothing_behind(served, demo_base, house) -> None:
    body = {
        "model": demo_base.name,
        "prompt": PROMPT,
        "n": 3,
        "stream": True,
        "max_tokens": 2000,
        "ignore_eos": True,
    }
    with (
        served.http(served.api_key) as client,
        client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        events = events_of(stream)
        heard: set[int] = set()
        while len(heard) < 3:
            heard |= {choice["index"] for choice in next(events)["choices"]}
        house.eventually(lambda: _running(served) == 3, "three sequences run")
        assert served.metric("loraplex_kv_cache_usage_perc") > 0
    house.eventually(lambda: _running(served) == 0, "nothing runs")
    house.eventually(
        lambda: served.metric("loraplex_kv_cache_usage_perc") == 0, "no block is in use"
    )
    assert served.metric("loraplex_num_requests_waiting") == 0


def _running(served) -> float:
    return served.metric("loraplex_num_requests_running")


def events_of(stream) -> Iterator[dict]:
    for line in stream.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))
