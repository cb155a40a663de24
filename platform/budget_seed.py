"""Tells Redis what budgets had used before it began to count, after it lost its data.

Each tenant has a moment since which Redis counts its requests. Of those let in before it, in its
month, the ledger says what they used; of all others Redis does. So nothing counts twice, whatever
runs meanwhile, and the ledger may be read again and again: rows still come of requests that ran
while the data was lost. Redis says when, each time after twice as long.

Knows when the ledger is read, and by how many at once; refuses to know what is in it, and what is
admitted.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Final

import anyio

from loraplex.platform.breaker import Breaker
from loraplex.platform.errors import Unavailable
from loraplex.platform.limit_scripts import Decision, LimitScripts
from loraplex.platform.spending import Owner, Spending

WAIT_S: Final = 5.0  # that a request waits for the ledger
READ_S: Final = 120.0  # that reading it may take
AT_ONCE: Final = 4  # tenants; requests need the database too

Spent = Callable[[str, datetime], Awaitable[Mapping[Owner, Spending]]]

log = logging.getLogger(__name__)


class BudgetSeed:
    """Reads of the ledger for the scripts' counters: of one tenant one at a time.

    A read goes on when those who wait for it leave. After some that failed in a row none is tried
    for a moment.
    """

    def __init__(self, spent: Spent, scripts: LimitScripts) -> None:
        self._spent, self._scripts = spent, scripts
        self._breaker, self._at_once = Breaker(), asyncio.Semaphore(AT_ONCE)
        self._running: dict[str, asyncio.Task[None]] = {}

    async def decided(self, tenant_id: str, ask: Callable[[], Awaitable[Decision]]) -> Decision:
        """What Redis answers, once it was told what it asks for, if that can be read soon.

        What it only asks for again is told behind the answer.
        """
        decision = await ask()
        if decision.unread_us:
            reading = self._read(tenant_id, decision.unread_us)
            if reading is not None and decision.standing is None:
                await asyncio.wait([reading], timeout=WAIT_S)
                return await ask()
        return decision

    def _read(self, tenant_id: str, since_us: int) -> asyncio.Task[None] | None:
        """What reads a tenant's rows now; None right after some reads that failed."""
        if tenant_id not in self._running and self._breaker.allows(time.monotonic()):
            task = asyncio.create_task(self._seed(tenant_id, since_us))
            self._running[tenant_id] = task
            task.add_done_callback(lambda _: self._running.pop(tenant_id))
        return self._running.get(tenant_id)

    async def close(self) -> None:
        """Give up what is being read."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _seed(self, tenant_id: str, since_us: int) -> None:
        """Raises nothing: whoever waits asks Redis again, which knows whether it was told."""
        since = datetime.fromtimestamp(since_us / 1e6, UTC)
        try:
            async with self._at_once:
                with anyio.fail_after(READ_S):
                    spent = await self._spent(tenant_id, since)
            self._breaker.succeeded()
            if await self._scripts.seed(tenant_id, since_us, spent) and spent:
                log.info("Redis was told what tenant %s used until %s", tenant_id, since)
        except (Unavailable, TimeoutError) as error:
            self._breaker.failed(time.monotonic())
            log.warning("budgets of tenant %s are not told to Redis: %s", tenant_id, error)
        except Exception:
            self._breaker.failed(time.monotonic())
            log.exception("budgets of tenant %s are not told to Redis", tenant_id)
