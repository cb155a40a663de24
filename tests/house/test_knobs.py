"""The engine's knobs as options of `loraplex serve`: each arrives, and shows in what it bounds."""

import asyncio
from collections.abc import Iterator

import openai
import pytest

OPTIONS = (
    *("--max-model-len", "512"),
    *("--max-num-seqs", "4"),
    *("--block-size", "32"),
    *("--gpu-memory-utilization", "0.3"),
    *("--swap-space", "0"),
    "--no-enable-prefix-caching",
    *("--speculative-tokens", "4"),
)
COUNT = "One, two, three, four, five, six, seven, eight, nine, ten, " * 3


@pytest.fixture(scope="module")
def tuned(house, demo_base, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A platform that was started with these options."""
    data_dir = tmp_path_factory.mktemp("tuned") / "data"
    with house.serving(demo_base, data_dir, *OPTIONS) as running:
        yield running


def test_the_start_says_what_was_asked_for(tuned) -> None:
    log = tuned.log.read_text()
    assert "of which memory_utilization 0.3 gives" in log
    assert "memory: none for swap" in log
    assert "blocks of 32 tokens" in log
    assert "at once: 4 requests of 512 tokens" in log


def test_a_request_over_the_length_is_refused_with_it(tuned, demo_base) -> None:
    with tuned.sdk() as sdk, pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model=demo_base.name, prompt="a", max_tokens=512)
    assert caught.value.code == "context_length_exceeded"
    assert "512" in caught.value.message


@pytest.mark.anyio
async def test_no_step_has_more_sequences_and_all_are_served(tuned, demo_base, house) -> None:
    async with tuned.async_sdk() as sdk:
        asked = {"model": demo_base.name, "prompt": COUNT, "max_tokens": 12, "temperature": 0}
        answers = await asyncio.gather(*(sdk.completions.create(**asked) for _ in range(6)))
        again = await sdk.completions.create(**asked)
    assert len({answer.choices[0].text for answer in (*answers, again)}) == 1
    assert again.usage.prompt_tokens_details.cached_tokens == 0
    await asyncio.to_thread(
        house.eventually,
        lambda: tuned.metric("loraplex_step_sequences_max") == 4,
        "a step of all four sequences that may run",
    )
    await asyncio.to_thread(
        house.eventually,
        lambda: tuned.metric("loraplex_spec_decode_num_draft_tokens_total") > 0,
        "tokens are guessed, though no request asked for it",
    )
    assert tuned.metric("loraplex_kv_blocks_cached") == 0


def test_more_choices_than_sequences_are_refused(tuned, demo_base) -> None:
    with tuned.sdk() as sdk, pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model=demo_base.name, prompt="a", n=5, max_tokens=1)
    assert "between 1 and 4 choices" in caught.value.message
