"""The engine's process is killed under load: one clear error each, then service, nothing lost."""

import asyncio
import os
import signal
from dataclasses import dataclass

import httpx
import openai
import pytest
from openai.types import CompletionUsage

pytestmark = pytest.mark.anyio
STREAMS, TOKENS = 6, 400
RECOVERY_S = 120.0
LIMIT = 1_000_000
QUESTION = [{"role": "user", "content": "Count to one hundred."}]


@dataclass
class Outcome:
    """What one stream saw: how many tokens, and the errors that ended it."""

    tokens: int = 0
    errors: tuple[str, ...] = ()


@pytest.fixture
def tenant_key(served) -> str:
    """A key of a tenant of its own, whose limits would show a leak."""
    limits = {"max_concurrency": STREAMS, "tokens_per_minute": LIMIT}
    with served.http(served.operator_key) as operator:
        tenant = operator.post("/v1/tenants", json={"name": "survivor", **limits}).json()
        body = {"name": "test", "tenant_id": tenant["id"], "scopes": ["infer"]}
        return str(operator.post("/v1/keys", json=body).json()["secret"])


async def stream(sdk: openai.AsyncOpenAI, model: str, begun: asyncio.Event) -> Outcome:
    outcome = Outcome()
    try:
        async with await sdk.chat.completions.create(
            model=model,
            messages=QUESTION,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            logprobs=True,
            extra_body={"ignore_eos": True},
        ) as chunks:
            async for chunk in chunks:
                logprobs = chunk.choices[0].logprobs
                outcome.tokens += len(logprobs.content) if logprobs else 0
                if outcome.tokens:
                    begun.set()
    except openai.APIError as error:
        outcome.errors += (str(error.code),)
    return outcome


async def ask_until_answered(sdk: openai.AsyncOpenAI, model: str) -> tuple[CompletionUsage, int]:
    """What the first request that is served used, and how many were refused before it.

    A refusal must say that it is worth coming back.
    """
    refused = 0
    async with asyncio.timeout(RECOVERY_S):
        while True:
            try:
                answer = await sdk.chat.completions.create(
                    model=model, messages=QUESTION, max_tokens=4, temperature=0
                )
                return answer.usage, refused
            except openai.InternalServerError as error:
                assert error.code in ("engine_unavailable", "engine_restarted")
                assert "retry-after" in error.response.headers
                refused += 1
                await asyncio.sleep(float(error.response.headers["retry-after-ms"]) / 1000)


async def test_requests_in_flight_fail_once_and_new_ones_are_served(
    served, demo_base, tenant_key
) -> None:
    before = served.engine_pid
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key=tenant_key, max_retries=0, timeout=RECOVERY_S
    ) as sdk:
        begun = [asyncio.Event() for _ in range(STREAMS)]
        running = [asyncio.create_task(stream(sdk, demo_base.name, event)) for event in begun]
        async with asyncio.timeout(RECOVERY_S):
            await asyncio.gather(*(event.wait() for event in begun))
            os.kill(before, signal.SIGKILL)
            outcomes = await asyncio.gather(*running)
        assert [outcome.errors for outcome in outcomes] == [("engine_restarted",)] * STREAMS
        usage, refused = await ask_until_answered(sdk, demo_base.name)
        assert served.engine_pid != before
        await assert_leases_are_free(sdk, demo_base.name)
    streamed = sum(outcome.tokens for outcome in outcomes)
    with served.http(tenant_key) as tenant:
        assert_ledger(tenant, usage.prompt_tokens, streamed + usage.completion_tokens, refused)
        assert_window(tenant, demo_base.name)


async def assert_leases_are_free(sdk: openai.AsyncOpenAI, model: str) -> None:
    """As many requests at once as the tenant may have: a leaked lease would refuse one."""
    answers = [
        sdk.chat.completions.create(model=model, messages=QUESTION, max_tokens=1)
        for _ in range(STREAMS)
    ]
    await asyncio.gather(*answers)


def assert_ledger(tenant: httpx.Client, prompt: int, generated: int, refused: int) -> None:
    """Each request is there once; one that failed is charged what it generated, not its prompt."""
    (total,) = tenant.get("/v1/usage").json()["data"]
    served_in_full = 1 + STREAMS  # asked again, and the ones that tried the leases
    assert total["requests"] == STREAMS + refused + served_in_full
    assert total["prompt_tokens"] == served_in_full * prompt
    assert total["completion_tokens"] == generated + STREAMS


def assert_window(tenant: httpx.Client, model: str) -> None:
    """The minute's window holds no more than the ledger says, plus this one request."""
    (total,) = tenant.get("/v1/usage").json()["data"]
    body = {"model": model, "messages": QUESTION, "max_tokens": 1}
    answer = tenant.post("/v1/chat/completions", json=body)
    last = answer.json()["usage"]["total_tokens"]
    remaining = int(answer.headers["x-ratelimit-remaining-tokens"])
    assert remaining >= LIMIT - total["total_tokens"] - last
