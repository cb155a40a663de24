"""Each tenant's prefix-cache state in Redis: what it was worth, and which replica holds what.

Every process that serves requests counts them; one process of a replica at a time also tells of the
replica's blocks, from the engine's cache events. All of it is written by one task, in batches: a
listener never waits, and what is not written yet is a state that stays small, not a queue. When
Redis is slow, gone, or has lost its data, everything is told again once it answers.

A replica is believed while its lease lasts, and its blocks are in force under the `life` of the
lease alone. So when it dies, or its engine starts anew, all of its state is void at once.

Knows Redis and cache events; refuses to know requests, text and the engine's own counts.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from loraplex.engine.client import EngineClient
from loraplex.engine.protocol import CacheEvents, Finished
from loraplex.platform.errors import Unavailable
from loraplex.platform.ids import new_id
from loraplex.platform.prefix_counts import Counts, PrefillMeter, counts_of
from loraplex.platform.prefix_mirror import Mirror

log = logging.getLogger(__name__)

FLUSH_S: Final = 0.5
LEASE_S: Final = 10.0
PAUSE_S: Final = 1.0  # in which a Redis that failed is not asked for prefixes
BLOCKS_S: Final = 3600.0  # that a replica's blocks outlive its last word of them
TOTALS_S: Final = 30 * 86400.0  # that a tenant's totals outlive its last request
MEMORY_S: Final = 86400.0  # in which nothing is counted twice
_REPLICAS: Final = "{cache-replicas}"
_OTHERS, _DONE, _NEW = range(3)


@dataclass(frozen=True)
class Holding:
    """A tenant's blocks on one replica; some may be missing where this isn't `complete`."""

    replica: str
    blocks: int
    complete: bool


@dataclass(frozen=True)
class TenantCache:
    """A tenant's totals since then (seconds since the epoch), and its blocks at this moment."""

    counts: Counts
    since: int | None
    holdings: tuple[Holding, ...]

    @property
    def resident_blocks(self) -> int:
        """Blocks on all replicas together."""
        return sum(holding.blocks for holding in self.holdings)

    @property
    def complete(self) -> bool:
        """Whether no replica may have more blocks than it is known to have."""
        return all(holding.complete for holding in self.holdings)


class PrefixState:
    """The state of all tenants, and this process's part in it; `redis` comes from `limits.connect`.

    Listens to `engine`, which is that of the replica `replica_id`. Another lease than the standard
    one is for tests.
    """

    def __init__(
        self, redis: Redis, replica_id: str, engine: EngineClient, *, lease_s: float = LEASE_S
    ) -> None:
        self._engine, self._replica, self._lease_us = engine, replica_id, round(lease_s * 1e6)
        self._worker, self._epoch = new_id("wrk"), ""
        self._mirror, self._meter = Mirror(), PrefillMeter()
        self._counts: dict[str, Counts] = {}
        self._sending: tuple[str, Counts] | None = None  # perhaps counted, and not confirmed
        self._sent = 0
        self._is_teller = True  # whether it is this process that tells of the replica
        self._down, self._pause_until = False, 0.0
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._claim, self._live, self._blocks, self._total, self._read = (
            redis.register_script(Path(__file__).with_name(f"prefix_{name}.lua").read_text())
            for name in ("claim", "live", "blocks", "totals", "read")
        )
        engine.cache_listener = self.hear

    def hear(self, events: CacheEvents) -> None:
        """Take note of the engine's events; returns at once."""
        self._follow_engine()
        for event in events.events:
            self._mirror.hear(event)
            if event.kind == "evicted" and self._is_teller:
                self._add(event.tenant, Counts(evicted_blocks=len(event.blocks)))

    def count(self, tenant: str, finished: Finished) -> None:
        """Count a tenant's request that has ended; returns at once."""
        if counts := counts_of(finished, self._meter):
            self._add(tenant, counts)

    def start(self) -> None:
        """Write what is new from now on, twice a second."""
        self._task = asyncio.create_task(self._keep_writing())

    async def close(self) -> None:
        """Write what is new once more, and no longer."""
        self._closing.set()
        if self._task is not None:
            await self._task

    async def flush(self) -> None:
        """Write what is new. When Redis does not answer this returns soon, and nothing is lost."""
        self._follow_engine()
        written = False
        try:
            await self._write_counts()
            await self._write_blocks()
            written = True
        except (RedisError, OSError) as error:
            self._note_failure(error)
        finally:
            if not written:
                self._mirror.retell()
        if written and self._down:
            log.warning("the prefix-cache state is written again")
            self._down = False

    async def of(self, tenant: str) -> TenantCache:
        """A tenant's state; raises `Unavailable`."""
        try:
            live, totals, resident, _ = await self._ask(tenant, ())
        except (RedisError, OSError) as error:
            self._note_failure(error)
            raise Unavailable("The cache's state cannot be read now. Try again soon.") from error
        counts = Counts(*(totals.get(field.name, 0) for field in fields(Counts)))
        holdings = (
            Holding(name, blocks, complete == b"1")
            for (name, _, complete), blocks in zip(live, resident, strict=True)
        )
        return TenantCache(counts, totals.get("since"), tuple(holdings))

    async def longest(self, tenant: str, blocks: Sequence[str]) -> dict[str, int]:
        """How many of a prompt's first blocks each replica has; those with none are left out.

        `blocks` are named as in `CacheEvent`. A hint for routing: empty when Redis does not answer,
        and then for a second without asking it.
        """
        if asyncio.get_running_loop().time() < self._pause_until:
            return {}
        try:
            live, _, _, longest = await self._ask(tenant, blocks)
        except (RedisError, OSError) as error:
            self._note_failure(error)
            return {}
        return {name: found for (name, _, _), found in zip(live, longest, strict=True) if found}

    async def _ask(
        self, tenant: str, blocks: Sequence[str]
    ) -> tuple[list[tuple[str, bytes, bytes]], dict[str, int], list[int], list[int]]:
        """Living replicas (name, life, completeness), totals, and the blocks on each replica."""
        reply = iter(await _run(self._live, _REPLICAS))
        live = [(name.decode(), next(reply), next(reply)) for name in reply]
        lives = [part for name, life, _ in live for part in (name, life)]
        totals, resident, longest = await _run(
            self._read, _prefix(tenant), len(live), *lives, *blocks
        )
        pairs = zip(totals[::2], totals[1::2], strict=True)
        return live, {name.decode(): int(amount) for name, amount in pairs}, resident, longest

    async def _keep_writing(self) -> None:
        """Ends by an event: Redis' client may take a cancellation for its own and go on."""
        while not self._closing.is_set():
            await self.flush()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._closing.wait()
        await self.flush()

    def _follow_engine(self) -> None:
        """Begin anew with a new engine; one that was out of reach may have said more than we know.

        Both only once it is there: an engine that is away has nothing to tell.
        """
        if self._engine.info is None:
            self._mirror.complete = False
        elif self._engine.info.epoch != self._epoch:
            self._epoch = self._engine.info.epoch
            self._mirror.restart(complete=True)

    def _add(self, tenant: str, counts: Counts) -> None:
        self._counts[tenant] = self._counts.get(tenant, Counts()) + counts

    async def _write_counts(self) -> None:
        """Add to the totals, tenant by tenant. What fails is sent again under the same number."""
        while self._sending or self._counts:
            if self._sending is None:
                self._sending = self._counts.popitem()
                self._sent += 1
            tenant, counts = self._sending
            named = (part for pair in asdict(counts).items() for part in pair)
            kept = (_ms(MEMORY_S), _ms(TOTALS_S))
            await _run(self._total, _prefix(tenant), self._worker, self._sent, *kept, *named)
            self._sending = None

    async def _write_blocks(self) -> None:
        """Renew the lease, and tell of the blocks that changed, if it is ours to tell."""
        if self._engine.info is None:
            return
        life, now = self._life, asyncio.get_running_loop().time()
        claimed = await _run(
            self._claim,
            _REPLICAS,
            *(self._replica, self._worker, life, self._epoch, int(self._mirror.complete)),
            *(self._lease_us, _ms(MEMORY_S)),
        )
        self._is_teller = claimed != _OTHERS
        if claimed != _DONE:
            self._mirror.retell()
        if not self._is_teller:
            return
        old = now - BLOCKS_S / 2
        for tenant in self._mirror.due(old):
            while life == self._life and self._mirror.is_due(tenant, old):
                await self._tell(tenant, now)

    @property
    def _life(self) -> str:
        return f"{self._worker}.{self._mirror.life}"

    async def _tell(self, tenant: str, now: float) -> None:
        """Tell of a tenant's blocks, as much as goes in one message."""
        news = self._mirror.tell(tenant, now)
        arrived = await _run(
            self._blocks,
            _prefix(tenant),
            *(self._replica, self._life, news.number, news.previous, int(news.whole)),
            *(_ms(BLOCKS_S), len(news.added), *news.added, *news.removed),
        )
        if arrived:
            self._mirror.confirm(tenant)
        else:
            self._mirror.retell([tenant])

    def _note_failure(self, error: Exception) -> None:
        self._pause_until = asyncio.get_running_loop().time() + PAUSE_S
        if not self._down:
            log.warning("no prefix-cache state: %s: %s", type(error).__name__, error)
        self._down = True


async def _run(script: AsyncScript, key: str, *args: Any) -> Any:
    return await script(keys=[key], args=args)


def _prefix(tenant: str) -> str:
    """The start of all of a tenant's keys, which share one slot."""
    return f"cache:{{{tenant}}}"


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
