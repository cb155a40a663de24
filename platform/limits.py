"""Holds each request to the limits of its tenant, its key and its adapters.

All limits of all buckets are one atomic decision in Redis (`admit.lua`), on Redis's own clock, so
any number of processes together never let more through than the limits say.

- *Requests*: the generic cell rate algorithm (GCRA, ITU-T I.371): a burst of the whole limit, then
  one each `60 / limit` seconds; one key a bucket.
- *Tokens*: a counter for each minute, UTC day and UTC month, named by it, so nothing ever has to be
  reset. `admit` reserves the estimate; `settle` puts the difference to the real use into the same
  windows.
- *At once*: a lease a request and bucket, which ends by `settle`, or `lease_s` after its last
  heartbeat.

Redis may lose its data. Then, and before anything is decided for who has a budget, the usage ledger
says what was used of it (`budget_seed.py`).

A request that nobody settles (its process was killed) is found by `abandoned` when its leases have
ended, with the tokens that were last heard of, and charged by `sweep`.

While Redis does not answer, requests with a budget are refused (`LimiterDown`); for others this
process alone holds its share of the rates (`degraded.py`). What could not be told to Redis then is
told by `catch_up`, once. Knows when which of the two decides; refuses to know the database, and
what tokens are.
"""

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from loraplex.platform.breaker import Breaker
from loraplex.platform.budget_seed import BudgetSeed, Spent
from loraplex.platform.degraded import Degraded
from loraplex.platform.errors import LimiterDown
from loraplex.platform.ids import new_id
from loraplex.platform.limit_scripts import (
    Abandoned,
    Asks,
    Decision,
    LimitScripts,
    NotTried,
    Refusal,
)
from loraplex.platform.limit_standing import Standing, check_fits, refusal
from loraplex.platform.pulse import Pulse
from loraplex.platform.quotas import Bucket

PERIOD_S: Final = 60.0
LEASE_S: Final = 45.0
TIMEOUT_S: Final = 0.25
HEARTBEAT_S: Final = 5.0  # at most; so long are the tokens that a killed server had not told of
MAX_OWED: Final = 10_000
_CONNECTIONS: Final = 32


@dataclass(frozen=True)
class Admission:
    """A request that was let in: to be settled, and kept alive by heartbeats until then.

    `known` says whether Redis may have heard of it; if not, this process alone let it in.
    """

    id: str
    tenant_id: str
    estimate: int
    standing: Standing
    known: bool = True

    @property
    def at(self) -> datetime:
        """When it was let in, by the counter's clock: what the ledger has to say, too."""
        return datetime.fromtimestamp(self.standing.now, UTC)

    @property
    def headers(self) -> dict[str, str]:
        """The response's headers about limits."""
        return self.standing.headers


class Limiter:
    """Admits, keeps and settles requests. `redis` comes from `connect`.

    `replicas` is how many processes share the rates while Redis is away. No call waits longer than
    `timeout_s`, by default the client's own. `spent` reads the usage ledger; without it, what Redis
    has lost is lost. Other periods and leases than the standard ones are for tests; all processes
    must agree.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        period_s: float = PERIOD_S,
        lease_s: float = LEASE_S,
        replicas: int = 1,
        timeout_s: float | None = None,
        spent: Spent | None = None,
    ) -> None:
        self._breaker, self._lease_s = Breaker(), lease_s
        self._scripts = LimitScripts(
            redis,
            period_us=round(period_s * 1e6),
            lease_us=round(lease_s * 1e6),
            timeout_s=timeout_s or redis.connection_pool.connection_kwargs["socket_timeout"],
            breaker=self._breaker,
        )
        self._seed = BudgetSeed(spent, self._scripts) if spent is not None else None
        self._here = Degraded(replicas, round(period_s * 1e6))
        self._owed: dict[str, tuple[str, int]] = {}  # id: its tenant, and the tokens it used

    @property
    def is_degraded(self) -> bool:
        """Whether Redis had no answer to the last call."""
        return not self._breaker.is_well

    async def admit(
        self,
        tenant_id: str,
        buckets: Sequence[Bucket],
        estimate: int,
        *,
        request_id: str | None = None,
        note: str = "",
    ) -> Admission:
        """Let a request in that may use up to `estimate` tokens, prompt and completion together.

        `note` is for whoever finds it abandoned. Raises, with nothing charged, `RateLimited`,
        `QuotaExceeded` where a budget is used up, `LimiterDown`, or `BadRequest` for an estimate
        that a bucket can never hold (see `cap_max_tokens`).
        """
        check_fits(buckets, estimate)
        id, known = request_id or new_id("adm"), True
        try:
            ask = partial(self._scripts.decide, tenant_id, id, buckets, estimate, note=note)
            standing = await self._decided(tenant_id, ask, Asks.BUDGETS)
        except LimiterDown as error:
            known = not isinstance(error, NotTried)
            standing = self._admit_here(tenant_id, id, buckets, estimate, known)
        if standing.refused_by is not None:
            raise refusal(standing, estimate)
        return Admission(id, tenant_id, estimate, standing, known)

    async def _decided(
        self, tenant_id: str, ask: Callable[..., Awaitable[Decision]], asks: Asks
    ) -> Standing:
        """Ask Redis, which is told first what it needs of the ledger; raises `LimiterDown`."""
        if self._seed is None:
            decision = await ask()
        else:
            decision = await self._seed.decided(tenant_id, partial(ask, asks=asks))
        if decision.standing is None:
            raise NotTried
        return decision.standing

    def _admit_here(
        self, tenant_id: str, id: str, buckets: Sequence[Bucket], estimate: int, known: bool
    ) -> Standing:
        """Decide without Redis; what that may have admitted all the same is given back later."""
        budgets = any(bucket.limits.has_budget for bucket in buckets)
        closed = budgets or not self._here.can_ever_hold(buckets, estimate)
        standing = None
        if not closed:
            standing = self._here.admit(tenant_id, id, buckets, estimate, _now_us())
        if known and (standing is None or standing.refused_by is not None):
            self._owe(tenant_id, id, 0)
        if standing is None:
            raise LimiterDown
        return standing

    async def settle(self, admission: Admission, used: int, *, note: str = "") -> None:
        """End a request that used so many tokens: the leases, and the difference to the estimate.

        With a `note` it can still be found, by `abandoned` once a lease has passed, until it is
        forgotten. A second call changes nothing. Where Redis is away, `catch_up` does it later.
        """
        self._here.settle(admission.id, used, _now_us())
        if not admission.known:
            return
        try:
            await self._scripts.settle(admission.tenant_id, admission.id, used, note)
        except LimiterDown:
            self._owe(admission.tenant_id, admission.id, used)

    async def forget(self, settled: Sequence[tuple[str, str]]) -> None:
        """Keep nothing of settled requests, by tenant and id; raises `LimiterDown`.

        Those that Redis has yet to be told of are forgotten when it is.
        """
        told = [(tenant_id, id) for tenant_id, id in settled if id not in self._owed]
        if told:
            await self._scripts.forget(told)

    async def heartbeat(self, admission: Admission, heard: int = 0) -> bool:
        """Keep the leases for another while, and say how many tokens were generated so far.

        False when a lease is gone. Raises `LimiterDown`.
        """
        if not admission.known:
            return False
        return await self._scripts.heartbeat(admission.tenant_id, admission.id, heard)

    @contextmanager
    def kept_alive(self, admission: Admission, heard: Callable[[], int]) -> Iterator[None]:
        """Send heartbeats while the block runs, at least three a lease; short blocks need none."""
        every_s = min(HEARTBEAT_S, self._lease_s / 3)
        pulse = Pulse(lambda: self._try_heartbeat(admission, heard()), every_s)
        try:
            yield
        finally:
            pulse.stop()

    async def _try_heartbeat(self, admission: Admission, heard: int) -> None:
        with suppress(LimiterDown):
            await self.heartbeat(admission, heard)

    async def look(
        self, tenant_id: str, buckets: Sequence[Bucket], estimate: int = 0, *, whole: bool = False
    ) -> Standing:
        """How buckets stand, and what would refuse such a request; raises `LimiterDown`.

        A `whole` look waits for the ledger even where there is no budget to hold.
        """
        ask = partial(self._scripts.decide, tenant_id, "", buckets, estimate, dry=True)
        return await self._decided(tenant_id, ask, Asks.ALL if whole else Asks.BUDGETS)

    async def refusals(self, tenant_id: str) -> list[Refusal]:
        """The last refusals of a tenant's requests, the newest first; raises `LimiterDown`."""
        return await self._scripts.refusals(tenant_id)

    async def abandoned(self, limit: int = 100) -> list[Abandoned]:
        """Some requests that no server has kept alive for a whole lease; raises `LimiterDown`."""
        return await self._scripts.abandoned(limit)

    async def sweep(self, gone: Abandoned, used: int) -> bool:
        """Charge an abandoned request so many tokens; raises `LimiterDown`.

        False where its server has spoken meanwhile: that one will settle it, and puts the charge
        right even later.
        """
        return await self._scripts.sweep(gone, used)

    async def catch_up(self) -> None:
        """Tell Redis of the requests that ended while it was away; raises `LimiterDown`.

        Those that it never heard of stay uncounted, so none is charged twice.
        """
        for id, (tenant_id, used) in list(self._owed.items()):
            await self._scripts.settle(tenant_id, id, used)
            self._owed.pop(id, None)

    async def close(self) -> None:
        """Give up what is being read of the ledger."""
        if self._seed is not None:
            await self._seed.close()

    async def ping(self) -> None:
        """Return when Redis answers; raises `LimiterDown`."""
        await self._scripts.ping()

    def _owe(self, tenant_id: str, id: str, used: int) -> None:
        """Remember to tell Redis; the oldest of too many is left to its lease's end."""
        if len(self._owed) >= MAX_OWED:
            del self._owed[next(iter(self._owed))]
        self._owed[id] = (tenant_id, used)


def _now_us() -> int:
    return time.time_ns() // 1000


def connect(url: str, *, timeout_s: float = TIMEOUT_S) -> Redis:
    """A client for `Limiter`: short timeouts, one retry on a fresh connection, no waiting.

    A retry is safe because a script that ran twice for one id charges once.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=_CONNECTIONS,
        timeout=4 * timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 1),
        protocol=2,
    )
    return Redis.from_pool(pool)
