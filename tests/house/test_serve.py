"""The main job from end to end: the command, the banner, the SDK, adapters in one batch."""

import asyncio
import re
import subprocess
from pathlib import Path

import openai
import pytest

pytestmark = pytest.mark.anyio
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "adapters"
NEVER_STOP = {"ignore_eos": True}


def client(served, key: str | None = None) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key=key or served.api_key, max_retries=0, timeout=240
    )


async def ask(sdk: openai.AsyncOpenAI, model: str, tokens: int = 24) -> str:
    answer = await sdk.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=tokens, temperature=0
    )
    return answer.choices[0].message.content


async def stream(sdk: openai.AsyncOpenAI, model: str, tokens: int) -> str:
    text = ""
    async with await sdk.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body=NEVER_STOP,
    ) as chunks:
        async for chunk in chunks:
            text += chunk.choices[0].delta.content or ""
    return text


def test_the_banner_has_one_line_each(served) -> None:
    labels = [line.partition(" ")[0] for line in served.lines]
    assert labels == ["API:", "API", "Operator", "Adapters:", "Admin:", "First", "curl"]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", served.url)
    for key in (served.api_key, served.operator_key):
        assert re.fullmatch(r"lpx_[0-9A-Za-z]{38}", key)
    assert served.adapters == sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())


def test_the_curl_line_works_when_pasted(served) -> None:
    done = subprocess.run(
        ["sh", "-c", served.lines[-1]], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '"object":"chat.completion"' in done.stdout


def test_no_secret_is_in_the_log_and_the_keys_are_for_their_owner_only(served) -> None:
    log = served.log.read_text()
    assert served.api_key not in log
    assert served.operator_key not in log
    assert (served.data_dir / "credentials.json").stat().st_mode & 0o077 == 0


def test_the_start_says_how_memory_was_divided(served) -> None:
    log = served.log.read_text()
    assert re.search(r"^  memory: .* of weights; .* were left, of which memory_utiliz", log, re.M)
    assert re.search(r"^  KV cache: [\d,]+ blocks of 16 tokens", log, re.M)
    assert re.search(r"^  at once: \d+ requests of [\d,]+ tokens", log, re.M)


async def test_the_base_and_every_demo_adapter_answer_each_in_its_way(served, demo_base) -> None:
    async with client(served) as sdk:
        listed = [model.id async for model in sdk.models.list()]
        assert {demo_base.name, *served.adapters} <= {*listed}
        answers = [await ask(sdk, name) for name in (demo_base.name, *served.adapters)]
    assert "Paris" in answers[0]
    assert len(set(answers)) == len(served.adapters) + 1


async def test_a_completion_continues_its_prompt_whole_and_streamed(served, demo_base) -> None:
    asked = {
        "model": demo_base.name,
        "prompt": "The days of the week are Monday,",
        "max_tokens": 8,
        "temperature": 0,
    }
    async with client(served) as sdk:
        whole = await sdk.completions.create(**asked)
        async with await sdk.completions.create(**asked, stream=True) as chunks:
            streamed = "".join([c.choices[0].text async for c in chunks])
    assert whole.choices[0].text == streamed != ""
    assert whole.usage.completion_tokens == 8


async def test_a_batch_of_base_and_adapters_gives_each_its_own_tokens(
    served, demo_base, house
) -> None:
    """Eight streams over base and three adapters share steps, and none notices the others."""
    names = [demo_base.name, *served.adapters]
    assert len(names) == 4
    async with client(served) as sdk:
        alone = {name: await stream(sdk, name, 16) for name in names}
        together = await asyncio.gather(*(stream(sdk, name, 16) for name in names * 2))
    assert together == [alone[name] for name in names * 2]
    await asyncio.to_thread(
        house.eventually,
        lambda: served.metric("loraplex_step_sequences_max") == 8,
        "a step of all eight sequences",
    )
    assert served.metric("loraplex_step_adapters_max") == 3


async def test_an_unknown_model_is_never_answered_by_the_base(served) -> None:
    async with client(served) as sdk:
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(sdk, "pirates")
        assert caught.value.code == "model_not_found"
    async with client(served, "lpx_" + "0" * 38) as sdk:
        with pytest.raises(openai.AuthenticationError):
            await ask(sdk, "pirate")
