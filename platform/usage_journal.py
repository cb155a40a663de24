"""Keeps ledger entries that the database cannot take: in Redis, or in a file while that is away.

Knows texts and their order; refuses to know what they say and when the database is back.
"""

import logging
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import anyio
from anyio import to_thread
from redis.asyncio import Redis
from redis.exceptions import RedisError

KEY: Final = "usage:journal"
BATCH: Final = 100
Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


class Journal:
    """The journal of all servers on one Redis, and a `file` of this one alone.

    No call waits for Redis longer than `timeout_s`.
    """

    def __init__(self, redis: Redis, file: Path, *, timeout_s: float) -> None:
        self._redis, self._file, self._timeout_s = redis, file, timeout_s
        self._drained = file.with_suffix(".draining")

    async def add(self, text: str) -> None:
        """Keep a line; raises `OSError` where neither Redis nor the disk takes it."""
        try:
            await self._bounded(lambda: self._redis.rpush(KEY, text))
        except (RedisError, OSError):
            await to_thread.run_sync(self._append, text)

    def _append(self, text: str) -> None:
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())

    async def drain(self, take: Callable[[str], Awaitable[None]]) -> None:
        """Give each line to `take`, and forget it once that returns; stops at its exceptions.

        A line may be given twice, by two servers or after a crash.
        """
        await self._drain_file(take)
        try:
            while lines := await self._bounded(lambda: self._redis.lrange(KEY, 0, BATCH - 1)):
                for line in lines:
                    text = line.decode() if isinstance(line, bytes) else line
                    await take(text)
                    await self._bounded(partial(self._redis.lrem, KEY, 1, text))
        except (RedisError, OSError) as error:
            log.debug("the journal in Redis waits: %s", error)

    async def _drain_file(self, take: Callable[[str], Awaitable[None]]) -> None:
        if not self._drained.exists():
            if not self._file.exists():
                return
            self._file.replace(self._drained)
        for line in self._drained.read_text(encoding="utf-8").splitlines():
            await take(line)
        self._drained.unlink()

    async def _bounded(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        with anyio.fail_after(self._timeout_s):
            return await call()
