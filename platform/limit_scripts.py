"""The scripts of limits in Redis: called, bounded in time, and read.

Knows the scripts' arguments and answers, and the breaker that keeps callers from waiting for a
Redis that does not answer; refuses to know what is done about it. Every call raises `LimiterDown`
for one that does not.

All keys of a tenant share the hash tag `{tenant}`. The index of all tenants' open requests is one
key beside them, so that abandoned ones are found without a scan; a Redis Cluster is not served.
"""

import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from loraplex.platform.breaker import Breaker
from loraplex.platform.errors import LimiterDown
from loraplex.platform.limit_standing import NAMES, Counted, Standing
from loraplex.platform.quotas import Bucket, BucketKind
from loraplex.platform.redis_line import RedisLine, Script
from loraplex.platform.spending import Owner, Spending

OPEN: Final = "limits:open"
_FACTS, _EACH = 8, 6  # numbers of an answer's head, and of each bucket

log = logging.getLogger(__name__)


class NotTried(LimiterDown):
    """Redis has let nothing in: the circuit is open, or the ledger is to be read first."""


class Asks(IntEnum):
    """Who needs what the ledger says of requests before Redis counted: nobody where none is."""

    NOBODY, BUDGETS, ALL = range(3)


@dataclass(frozen=True)
class Decision:
    """How a request's buckets stand, if that can be said before the ledger is read.

    `unread_us` is the moment before which it is to be read, now or (where there is a standing)
    again; 0 if it is not. Microseconds since the epoch.
    """

    standing: Standing | None
    unread_us: int


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """A request that was refused: when, by which bucket's limit, and for how long.

    `at` is in seconds since the epoch, `bucket` its name in Redis, and `limit` the place of its
    limit in `NAMES`, from 1; `estimate` are the tokens that were asked for.
    """

    request_id: str
    at: int
    bucket: str
    limit: int
    estimate: int
    wait_us: float

    @property
    def name(self) -> str:
        """The limit's name."""
        return NAMES[self.limit - 1]


@dataclass(frozen=True)
class Abandoned:
    """An admitted request that nobody keeps alive: its note, and the tokens last heard of."""

    prefix: str
    id: str
    note: str
    heard: int
    at: datetime  # let in, by Redis's clock


class LimitScripts:
    """The limits' scripts on one client; each call takes at most `timeout_s`."""

    def __init__(
        self, redis: Redis, *, period_us: int, lease_us: int, timeout_s: float, breaker: Breaker
    ) -> None:
        self._line, self._breaker = RedisLine(redis, timeout_s), breaker
        self._period_us, self._lease_us = period_us, lease_us
        shared = _read("limits")
        self._scripts = {
            name: Script(self._line, shared + _read(name))
            for name in ("admit", "seed", "settle", "heartbeat", "abandoned")
        }

    async def decide(
        self,
        tenant_id: str,
        id: str,
        buckets: Sequence[Bucket],
        estimate: int,
        *,
        note: str = "",
        dry: bool = False,
        asks: Asks = Asks.NOBODY,
    ) -> Decision:
        """Let a request in or say what refuses it; `dry` only says."""
        head = (id, self._period_us, self._lease_us, estimate, int(dry), note, int(asks))
        limits = [argument for bucket in buckets for argument in _arguments(bucket)]
        reply = await self._run("admit", prefix(tenant_id), *head, *limits)
        if reply[0] < 0:
            return Decision(None, reply[1])
        return Decision(_standing(buckets, reply), reply[_FACTS - 1])

    async def seed(self, tenant_id: str, since_us: int, spent: Mapping[Owner, Spending]) -> bool:
        """Tell what buckets used before that moment; False if Redis has lost it since."""
        told = [
            argument
            for (kind, id), each in spent.items()
            for argument in (_bucket_name(kind, id), each.day, each.month)
        ]
        return bool(await self._run("seed", prefix(tenant_id), since_us, *told))

    async def settle(self, tenant_id: str, id: str, used: int, note: str = "") -> bool:
        """End a request; whether it was known. With a note, its record is kept."""
        head = (id, used, 0, self._lease_us, note)
        return bool(await self._run("settle", prefix(tenant_id), *head))

    async def forget(self, settled: Sequence[tuple[str, str]]) -> None:
        """Drop the records of settled requests, by tenant and id."""
        wheres = [(prefix(tenant_id), id) for tenant_id, id in settled]
        await self._call("ZREM", OPEN, *(f"{where} {id}" for where, id in wheres))
        await self._call("UNLINK", *(f"{where}:reserved:{id}" for where, id in wheres))

    async def heartbeat(self, tenant_id: str, id: str, heard: int) -> bool:
        """Keep a request's leases; whether they all still were."""
        return bool(await self._run("heartbeat", prefix(tenant_id), id, self._lease_us, heard))

    async def abandoned(self, limit: int) -> list[Abandoned]:
        """Some of the requests whose server has said nothing for a whole lease."""
        found = []
        for name, note, heard, at in await self._run("abandoned", "limits", limit):
            where, _, id = name.decode().partition(" ")
            let_in = datetime.fromtimestamp(at / 1e6, UTC)
            found.append(Abandoned(where, id, note.decode(), heard, let_in))
        return found

    async def sweep(self, gone: Abandoned, used: int) -> bool:
        """Charge an abandoned request; False if its server has spoken meanwhile."""
        return bool(await self._run("settle", gone.prefix, gone.id, used, 1, self._lease_us, ""))

    async def refusals(self, tenant_id: str) -> list[Refusal]:
        """The last refusals of a tenant's requests, the newest first."""
        key = f"{prefix(tenant_id)}:refusals"
        found = await self._call("LRANGE", key, 0, -1)
        return [msgspec.json.decode(each, type=Refusal) for each in found]

    async def ping(self) -> None:
        """Return when Redis answers, whatever the breaker says."""
        await self._answer(self._line.call("PING"))

    async def _run(self, script: str, where: str, *args: str | int) -> Any:
        self._check()
        return await self._answer(self._scripts[script]((where, OPEN), args))

    async def _call(self, *command: str | int) -> Any:
        self._check()
        return await self._answer(self._line.call(*command))

    def _check(self) -> None:
        """Raise `NotTried` while the circuit is open."""
        if not self._breaker.allows(time.monotonic()):
            raise NotTried

    async def _answer(self, call: Awaitable[Any]) -> Any:
        """Make a call to its end even if the caller is cancelled, so that none half-knows."""
        try:
            with anyio.CancelScope(shield=True):
                answer = await call
        except (RedisError, OSError) as error:
            if self._breaker.is_well:
                log.warning("Redis does not answer: %s: %s", type(error).__name__, error)
            self._breaker.failed(time.monotonic())
            raise LimiterDown from error
        if not self._breaker.is_well:
            log.warning("Redis answers again")
        self._breaker.succeeded()
        return answer


def prefix(tenant_id: str) -> str:
    """What the names of a tenant's keys begin with."""
    return f"limits:{{{tenant_id}}}"


def _read(name: str) -> str:
    return Path(__file__).with_name(f"{name}.lua").read_text()


def _bucket_name(kind: BucketKind, id: str) -> str:
    return kind if kind == "tenant" else f"{kind}:{id}"


def _arguments(bucket: Bucket) -> list[str | int]:
    limits = (-1 if limit is None else limit for limit in bucket.limits.held)
    return [_bucket_name(bucket.kind, bucket.id), *limits]


def _standing(buckets: Sequence[Bucket], reply: Sequence[int]) -> Standing:
    by, limit, wait_us, now, minute, day, month, _ = reply[:_FACTS]
    left = ((minute - now) / 1e6, (day - now) / 1e6, (month - now) / 1e6)
    counted = tuple(
        _counted(bucket, reply[at : at + _EACH], left)
        for bucket, at in zip(buckets, range(_FACTS, len(reply), _EACH), strict=True)
    )
    return Standing(counted, now / 1e6, (by - 1, limit - 1) if by else None, wait_us / 1e6)


def _counted(bucket: Bucket, numbers: Sequence[int], left: tuple[float, float, float]) -> Counted:
    """Without a limit of them, requests are not counted."""
    requests_left, requests_us, minute, day, month, running = numbers
    limits = bucket.limits.held
    requests = 0 if limits[0] is None else limits[0] - requests_left
    resets = (requests_us / 1e6, left[0], 0.0, left[1], left[2])
    return Counted(bucket, limits, (requests, minute, running, day, month), resets)
