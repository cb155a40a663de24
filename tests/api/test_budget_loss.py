"""A budget seen from outside, when Redis has lost its data."""

import asyncio
from functools import partial

import pytest

from loraplex.platform.limits import Limiter
from loraplex.platform.quotas import TenantLimits
from loraplex.platform.spent_before import spent_before

pytestmark = pytest.mark.anyio
CHAT = {"model": "tiny-base", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
PATH = "/v1/chat/completions"
ASKED = {"model": "tiny-base", "prompt_tokens": 10, "max_tokens": 10}


@pytest.fixture(autouse=True)
async def counting(world, redis):
    """The server's limiter, with the ledger behind it."""
    limiter = Limiter(redis, spent=partial(spent_before, world.db))
    world.hold_to(limiter)
    yield
    await limiter.close()


async def test_a_spent_budget_stays_spent(world, redis):
    await world.add_tenant("spent", TenantLimits(tokens_per_month=60))
    async with world.client("spent") as client:
        for _ in range(2):
            assert (await client.post(PATH, json=CHAT)).status_code == 200
        before = (await client.get("/v1/quota")).json()["buckets"]
        assert {used for _, _, used, _ in budgets(before)} == {50}
        await world.app.state.context.books.flush()
        await redis.flushall()
        refused = await client.post(PATH, json=CHAT)
        assert refused.status_code == 429
        assert (
            "tokens per month does not suffice: 50 are used" in refused.json()["error"]["message"]
        )
        await redis.flushall()
        assert budgets((await client.get("/v1/quota")).json()["buckets"]) == budgets(before)
        await redis.flushall()
        told = await client.post("/v1/quota/explain", json=ASKED)
        assert (told.json()["admitted"], told.json()["binding"]["used"]) == (False, 50)


async def test_what_was_let_in_since_counts_once(world, redis):
    """Its rows come into the ledger, which is read again."""
    tenant_id = await world.add_tenant("new", TenantLimits(tokens_per_month=1000))
    context = world.app.state.context
    async with world.client("new") as client:
        for expected in (75, 150):
            answers = await asyncio.gather(*(client.post(PATH, json=CHAT) for _ in range(3)))
            assert [answer.status_code for answer in answers] == [200] * 3
            await context.books.flush()
            await redis.hset(f"limits:{{{tenant_id}}}:ledger", "again", 0)
            await client.get("/v1/quota")
            await asyncio.gather(*context.limiter._seed._running.values())
            assert await redis.hget(f"limits:{{{tenant_id}}}:ledger", "again") != b"0"
            told = budgets((await client.get("/v1/quota")).json()["buckets"])
            assert {used for _, _, used, _ in told} == {expected}


def budgets(buckets):
    """What is told of them; their ends come nearer."""
    return [
        (bucket["kind"], limit["name"], limit["used"], limit["remaining"])
        for bucket in buckets
        for limit in bucket["limits"]
        if limit["name"] in ("tokens_per_day", "tokens_per_month")
    ]
