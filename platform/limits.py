"""Holds each tenant to its limits: requests a minute, tokens a minute, requests at once.

All three are one atomic decision in Redis (`admit.lua`), on Redis's own clock, so any number of
processes together never let more through than the limits say.

- *Requests*: the generic cell rate algorithm (GCRA, ITU-T I.371): a burst of the whole limit, then
  one each `60 / limit` seconds; one key a tenant.
- *Tokens*: a counter for each minute. `admit` reserves the estimate; `settle` puts the difference
  to the real use into the same minute. A reservation that nobody settles (a crashed process, an
  answer that came too late) stays charged at its estimate until its minute ends, so the limit
  holds even then.
- *At once*: a lease a request, which ends by `settle`, or 45 s after its last `heartbeat`.

Knows Redis; refuses to know the database and what the tokens are. When Redis does not answer,
nothing is let through: `LimiterDown`.
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import anyio
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from loraplex.platform.errors import BadRequest, LimiterDown, LimitKind, RateLimited
from loraplex.platform.ids import new_id
from loraplex.platform.quotas import TenantLimits

log = logging.getLogger(__name__)

PERIOD_S: Final = 60.0
LEASE_S: Final = 45.0
TIMEOUT_S: Final = 0.25
_CONNECTIONS: Final = 32
_REFUSED_BY: Final[dict[int, LimitKind]] = {1: "concurrency", 2: "requests", 3: "tokens"}


@dataclass(frozen=True)
class Budget:
    """One limit as it stands; `reset_s` seconds from now all of it is there again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True)
class Standing:
    """How a tenant stands after a decision; a budget of None is no limit."""

    requests: Budget | None
    tokens: Budget | None
    running: int

    @property
    def headers(self) -> dict[str, str]:
        """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}`, where there is a limit."""
        headers = {}
        for kind, budget in (("requests", self.requests), ("tokens", self.tokens)):
            if budget is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(budget.limit)
                headers[f"x-ratelimit-remaining-{kind}"] = str(budget.remaining)
                headers[f"x-ratelimit-reset-{kind}"] = _duration(budget.reset_s)
        return headers


@dataclass(frozen=True)
class Admission:
    """A request that was let in: to be settled, and kept alive by heartbeats until then."""

    id: str
    tenant_id: str
    estimate: int
    standing: Standing
    window: int = field(repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """The response's `x-ratelimit-*` headers."""
        return self.standing.headers


class Limiter:
    """Admits, keeps and settles requests. `redis` comes from `connect`.

    Other periods and leases than the standard ones are for tests; all processes must agree.
    """

    def __init__(
        self, redis: Redis, *, period_s: float = PERIOD_S, lease_s: float = LEASE_S
    ) -> None:
        self._redis, self._down = redis, False
        self._period_us, self._lease_us = round(period_s * 1e6), round(lease_s * 1e6)
        self._admit, self._settle, self._heartbeat = (
            redis.register_script(Path(__file__).with_name(f"{name}.lua").read_text())
            for name in ("admit", "settle", "heartbeat")
        )

    async def admit(self, tenant_id: str, limits: TenantLimits, estimate: int) -> Admission:
        """Let a request in that may use up to `estimate` tokens, prompt and completion together.

        Raises `RateLimited` (with nothing charged), `LimiterDown`, or `BadRequest` for an estimate
        that no minute can hold (see `cap_max_tokens`).
        """
        _check_fits(limits, estimate)
        admission_id = new_id("adm")
        bounds = (limits.max_concurrency, limits.requests_per_minute, limits.tokens_per_minute)
        reply: list[int] = await self._run(
            self._admit,
            tenant_id,
            admission_id,
            self._period_us,
            self._lease_us,
            *(-1 if bound is None else bound for bound in bounds),
            estimate,
        )
        refused_by, wait_us, window, *_ = reply
        standing = _standing(limits, reply)
        if refused_by:
            raise _refusal(_REFUSED_BY[refused_by], wait_us / 1e6, limits, standing)
        return Admission(admission_id, tenant_id, estimate, standing, window)

    async def settle(self, admission: Admission, used: int) -> None:
        """End a request that used so many tokens: the lease, and the difference to the estimate.

        A second call changes nothing. Raises `LimiterDown`; the lease then ends by itself, and the
        estimate stays charged until its minute ends.
        """
        await self._run(self._settle, admission.tenant_id, admission.id, admission.window, used)

    async def heartbeat(self, admission: Admission) -> bool:
        """Keep the lease for another while; False when it is gone. Raises `LimiterDown`."""
        reply = await self._run(self._heartbeat, admission.tenant_id, admission.id, self._lease_us)
        return bool(reply)

    async def keep_alive(self, admission: Admission) -> NoReturn:
        """Send heartbeats until cancelled, three a lease; run it in a task beside the request."""
        while True:
            await anyio.sleep(self._lease_us / 3e6)
            with contextlib.suppress(LimiterDown):
                await self.heartbeat(admission)

    async def ping(self) -> None:
        """Return when Redis answers; raises `LimiterDown`."""
        with self._fail_closed():
            await self._redis.ping()

    async def _run(self, script: AsyncScript, tenant_id: str, *args: str | int) -> Any:
        """Run a script to its end even if the caller is cancelled, so that none half-knows."""
        with anyio.CancelScope(shield=True), self._fail_closed():
            return await script(keys=[f"limits:{{{tenant_id}}}"], args=args)

    @contextlib.contextmanager
    def _fail_closed(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError) as error:
            if not self._down:
                log.warning("limits fail closed: %s: %s", type(error).__name__, error)
            self._down = True
            raise LimiterDown from error
        if self._down:
            log.warning("limits work again")
        self._down = False


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


def cap_max_tokens(
    limits: TenantLimits, prompt_tokens: int, max_tokens: int | None, room: int, choices: int = 1
) -> int:
    """How many tokens each of `choices` completions may have: what was asked for, or what fits.

    `room` is what the context leaves beside the prompt. When `max_tokens` is None the answer also
    fits the tenant's tokens per minute, so a default never makes a request fail that could run.
    Raises `BadRequest` when the request is larger than any minute can hold.
    """
    if max_tokens is None:
        whole = limits.tokens_per_minute
        share = room if whole is None else (whole - prompt_tokens) // choices
        max_tokens = max(1, min(room, share))
    _check_fits(limits, prompt_tokens + choices * max_tokens)
    return max_tokens


def _check_fits(limits: TenantLimits, estimate: int) -> None:
    whole = limits.tokens_per_minute
    if whole is not None and estimate > whole:
        raise BadRequest(
            f"The prompt and max_tokens together are {estimate} tokens, more than this tenant's "
            f"limit of {whole} tokens per minute can ever hold. Shorten the prompt or lower "
            "max_tokens.",
            param="max_tokens",
        )


def _standing(limits: TenantLimits, reply: list[int]) -> Standing:
    _, _, _, requests, requests_us, tokens, tokens_us, running = reply
    return Standing(
        _budget(limits.requests_per_minute, requests, requests_us),
        _budget(limits.tokens_per_minute, tokens, tokens_us),
        running,
    )


def _budget(limit: int | None, remaining: int, reset_us: int) -> Budget | None:
    return None if limit is None else Budget(limit, remaining, reset_us / 1e6)


def _refusal(
    kind: LimitKind, wait_s: float, limits: TenantLimits, standing: Standing
) -> RateLimited:
    budget = {"requests": standing.requests, "tokens": standing.tokens}.get(kind)
    if budget is None:
        return RateLimited(kind, wait_s, limits.max_concurrency or 0, headers=standing.headers)
    return RateLimited(kind, wait_s, budget.limit, budget.remaining, headers=standing.headers)


def _duration(seconds: float) -> str:
    """As OpenAI writes it: `250ms`, `1.5s`, `6m0s`; rounded up to the millisecond."""
    milliseconds = -int(-seconds * 1000 // 1)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    rest = f"{milliseconds / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
