"""Looks after images while a server runs: of all servers one a minute clears the store, and each
keeps its own cache small.

Knows when; refuses to know which images are needed. Two servers that clear the store at once do no
harm, so that Redis, which says whose turn it is, only spares them the work.
"""

import asyncio
import logging
import time
from typing import Final

from anyio import to_thread
from redis.asyncio import Redis

from loraplex.engine.images import ImageStore
from loraplex.platform import images_kept
from loraplex.platform.db.session import Database
from loraplex.platform.settings import Settings

EVERY_S: Final = 60.0
TURN: Final = "loraplex:image-sweep"

log = logging.getLogger("loraplex.images")


class ImageSweeps:
    """Sweeps every minute from `start` until `close`."""

    def __init__(self, settings: Settings, db: Database, store: ImageStore, redis: Redis) -> None:
        self._settings, self._db, self._store, self._redis = settings, db, store, redis
        self._grace_s = images_kept.grace_s(settings)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Sweep in the background, the first time in a minute."""
        self._task = asyncio.create_task(self._go_on())

    async def close(self) -> None:
        """Stop; what is being removed is removed first."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def sweep(self) -> None:
        """Clear the store if it is this server's turn, and shrink its cache."""
        if await self._redis.set(TURN, "taken", nx=True, px=round(EVERY_S * 900)):
            collected = await images_kept.collect(self._db, self._store, grace_s=self._grace_s)
            if collected.images or collected.parts:
                log.info("%d images left the store", collected.images)
        cache, most = self._settings.image_cache, self._settings.image_cache_bytes
        await to_thread.run_sync(images_kept.shrink_cache, cache, most, self._grace_s, time.time())

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.sweep()
            except Exception as error:  # whatever a store, a database or Redis may raise
                log.warning("images could not be swept: %s", error)
