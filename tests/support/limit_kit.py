"""What tests of limits share: buckets, a tenant of one's own, and a look into Redis."""

import asyncio

from redis.asyncio import Redis

from loraplex.platform.errors import RateLimited
from loraplex.platform.limits import Admission, Limiter
from loraplex.platform.quotas import Bucket, Limits

YEAR = 3.15e7  # seconds; a period that does not end during a test
PATIENCE = 20.0


def of_tenant(*limits: int | None, **more: int | None) -> tuple[Bucket, ...]:
    """The tenant's bucket alone: requests, tokens, at once."""
    return (Bucket("tenant", "t", Limits(*limits, **more)),)


def of_all(tenant: Limits, key: Limits, *adapters: Limits) -> tuple[Bucket, ...]:
    """A tenant's bucket, a key's, and one for each of so many adapters."""
    return (
        Bucket("tenant", "t", tenant),
        Bucket("key", "k", key),
        *(Bucket("adapter", f"a{i}", limits) for i, limits in enumerate(adapters)),
    )


async def dump(redis: Redis, tenant: str) -> dict[bytes, bytes]:
    """All that Redis holds of a tenant, but for the list of its refusals."""
    return {
        key: await redis.dump(key)
        async for key in redis.scan_iter(f"*{tenant}*")
        if not key.endswith(b":refusals")
    }


async def clock(redis: Redis) -> float:
    """Redis's own, in seconds."""
    seconds, micros = await redis.time()
    return seconds + micros / 1e6


def leases(tenant: str, bucket: str = "tenant") -> str:
    """The key of a bucket's leases."""
    return f"limits:{{{tenant}}}:{bucket}:leases"


async def admitted_before_long(
    limiter: Limiter, tenant: str, buckets: tuple[Bucket, ...], estimate: int = 1
) -> Admission:
    """Ask again and again until the request is let in; each refusal must say so."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await limiter.admit(tenant, buckets, estimate)
            except RateLimited:
                await asyncio.sleep(0.005)
