"""What tests of budgets after a loss share: a ledger in memory, budgets, and a second look."""

import asyncio
from collections.abc import Mapping
from datetime import datetime

from limit_kit import of_all
from redis.asyncio import Redis

from loraplex.platform.limits import Limiter
from loraplex.platform.quotas import UNLIMITED, Limits
from loraplex.platform.spending import Owner, Spending, by_bucket

HELD = of_all(Limits(tokens_per_month=1000), UNLIMITED)
UNHELD = of_all(UNLIMITED, UNLIMITED)
MONTH = "tokens_per_month"


class Ledger:
    """A ledger in memory, of one tenant: how often it was read, and what holds a reader up."""

    def __init__(self) -> None:
        self.rows: list[tuple[datetime, str, str | None, int]] = []
        self.reads = 0
        self.error: Exception | None = None
        self.reading = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    def add(self, at: datetime, tokens: int, key: str = "k", adapter: str | None = None) -> None:
        self.rows.append((at, key, adapter, tokens))

    async def spent(self, tenant_id: str, moment: datetime) -> Mapping[Owner, Spending]:
        self.reads += 1
        self.reading.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return by_bucket(
            tenant_id,
            [(key, adapter, Spending(n, n)) for at, key, adapter, n in self.rows if at < moment],
        )


async def read_again(redis: Redis, limiter: Limiter, tenant: str) -> None:
    """Have the ledger read as if the time for it had come."""
    await redis.hset(f"limits:{{{tenant}}}:ledger", "again", 0)
    await limiter.look(tenant, HELD)
    await asyncio.gather(*limiter._seed._running.values())
    assert await redis.hget(f"limits:{{{tenant}}}:ledger", "again") != b"0"
