"""Sees to it that every request that was let in ends in the ledger, once, whatever dies.

Requests end faster than databases commit, so the entries of one moment are written together, behind
the answers. What the database cannot take now waits in a journal. A request whose server was killed
is found by its lease's end, by any server, and recorded as it ended, or with the tokens that were
last heard of. Knows the ledger, the journal and the limiter; refuses to know requests while they
run.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import anyio
import msgspec

from loraplex.platform.db.session import Database
from loraplex.platform.errors import LimiterDown, Unavailable
from loraplex.platform.limit_scripts import Abandoned
from loraplex.platform.limits import Admission, Limiter
from loraplex.platform.usage import SERVER_DIED, Entry, decoded, record, record_all
from loraplex.platform.usage_journal import Journal

EVERY_S: Final = 2.0
TOGETHER_S: Final = 0.2  # that an entry waits for others to be written with
BATCH: Final = 100
MAX_WAITING: Final = 10_000

log = logging.getLogger(__name__)


class Books:
    """Writes the ledger, and every `EVERY_S` seconds what was left over, once started."""

    def __init__(self, db: Database, limiter: Limiter, journal: Journal) -> None:
        self._db, self._limiter, self._journal = db, limiter, journal
        self._settling: set[asyncio.Task[None]] = set()
        self._waiting: list[Entry] = []
        self._writing = anyio.Lock()
        self._writer: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    def start(self) -> None:
        """Look for leftovers from now on."""
        self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Write everything, look for leftovers once more, then no longer."""
        self._closing.set()
        await self._settled()
        for task in (self._task, self._writer):
            if task is not None:
                await task
        await self.flush()
        await self.tidy()

    async def settle(self, admission: Admission, entry: Entry) -> None:
        """Charge an ended request and have it recorded; raises nothing.

        Returns when the charge is on its way to Redis, not when it is there: what this process asks
        next, for whomever, is decided after it.
        """
        task = asyncio.create_task(self._settle(admission, entry))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        await asyncio.sleep(0)  # until then the task has sent it, where Redis is there

    async def _settle(self, admission: Admission, entry: Entry) -> None:
        """Who is killed in between leaves the request to be found, whole."""
        try:
            used = entry.prompt_tokens + entry.completion_tokens
            await self._limiter.settle(admission, used, note=entry.encoded())
        except Exception:
            log.exception("request %s was not settled", entry.request_id)
        await self.record(entry)

    async def record(self, entry: Entry) -> None:
        """Have a settled request's entry written within a moment; raises nothing.

        Entries of one moment are one transaction. Who is killed before it leaves the limiter's
        record of the request, with this entry, to be found.
        """
        if len(self._waiting) >= MAX_WAITING:
            await self._put_off([entry])
            return
        self._waiting.append(entry)
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_soon())

    async def flush(self) -> None:
        """Write what has ended until now, to the ledger or to the journal; raises nothing."""
        await self._settled()
        async with self._writing:
            left = len(self._waiting)
            while left > 0:
                batch = self._waiting[: min(left, BATCH)]
                await self._write_or_put_off(batch)
                await self._forget(batch)
                del self._waiting[: len(batch)]
                left -= len(batch)

    async def _settled(self) -> None:
        if self._settling:
            await asyncio.wait(set(self._settling))

    async def _write_soon(self) -> None:
        while self._waiting:
            with anyio.move_on_after(TOGETHER_S):
                await self._closing.wait()
            await self.flush()

    async def _forget(self, entries: Sequence[Entry]) -> None:
        """Nobody needs to find these requests any more; while Redis is away, who does finds all."""
        try:
            await self._limiter.forget([(each.tenant_id, each.request_id) for each in entries])
        except LimiterDown as error:
            log.debug("settled requests stay in Redis: %s", error)

    async def _write_or_put_off(self, entries: Sequence[Entry]) -> None:
        """Write all, or each by itself where that is refused; the journal takes the rest."""
        try:
            await self._write(entries)
        except Unavailable:
            await self._put_off(entries)
        except Exception:
            if len(entries) > 1:
                for entry in entries:
                    await self._write_or_put_off([entry])
            else:
                log.exception("the ledger refuses an entry")
                await self._put_off(entries)

    async def _put_off(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            log.warning("usage of request %s goes to the journal", entry.request_id)
            try:
                await self._journal.add(entry.encoded())
            except OSError:
                log.exception("usage of a request is lost: %s", entry)

    async def tidy(self) -> None:
        """Do what was left over: settlements, abandoned requests, the journal; raises nothing."""
        for work in (self._limiter.catch_up, self.sweep, self.drain):
            try:
                await work()
            except (LimiterDown, Unavailable) as error:
                log.debug("left for later: %s", error)
            except Exception:
                log.exception("the books are not kept")

    async def sweep(self) -> int:
        """Record and charge requests whose server is gone; how many.

        Raises `LimiterDown`, or `Unavailable` while the database is away.
        """
        swept = 0
        while found := await self._limiter.abandoned():
            for gone in found:
                await self._bury(gone)
            swept += len(found)
        return swept

    async def _bury(self, gone: Abandoned) -> None:
        """Record it, and charge what the ledger says: its server may have come so far itself.

        If this server dies in between, the next one does both again, to no harm.
        """
        used = gone.heard
        if gone.note:
            try:
                used = await self._record_for(gone)
            except Unavailable:
                raise
            except Exception:
                log.exception("the ledger refuses request %s", gone.id)
        await self._limiter.sweep(gone, used)

    async def _record_for(self, gone: Abandoned) -> int:
        """Tokens of an abandoned request, as the ledger has them then."""
        entry = msgspec.structs.replace(decoded(gone.note), created_at=gone.at)
        if entry.outcome == SERVER_DIED:
            entry = msgspec.structs.replace(entry, completion_tokens=gone.heard)
            log.warning("the server of request %s died", entry.request_id)
        async with self._db.session(entry.tenant_id) as session:
            row = await record(session, entry)
            return row.prompt_tokens + row.completion_tokens

    async def drain(self) -> None:
        """Write what is in the journal; raises `Unavailable` while the database is away."""
        await self._journal.drain(self._take)

    async def _take(self, line: str) -> None:
        """Write a line of the journal, or drop it where the ledger never will take it."""
        try:
            await self._write([decoded(line)])
        except Unavailable:
            raise
        except Exception:
            log.exception("the ledger refuses a line of the journal: %s", line)

    async def _write(self, entries: Sequence[Entry]) -> None:
        async with self._db.session(None) as session:
            await record_all(session, entries)

    async def _keep(self) -> None:
        while not self._closing.is_set():
            with anyio.move_on_after(EVERY_S):
                await self._closing.wait()
            await self.tidy()
