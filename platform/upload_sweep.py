"""Looks after uploads that nobody looks after: late ones, a dead process's, folders of no use.

Every server sweeps what lies on its own disk. Knows when an upload is left alone; refuses to know
how it is checked.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from sqlalchemy import select

from loraplex.platform import upload_jobs as jobs
from loraplex.platform.audit import SYSTEM
from loraplex.platform.db.models import Upload
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import Unavailable
from loraplex.platform.upload_desk import Uploads

MAX_ATTEMPTS: Final = 3  # to check one upload, before it is taken for what kills the process
BATCH: Final = 500
INTERRUPTED: Final = {
    "code": "interrupted",
    "message": "The server ended while it had the adapter. Upload it again.",
}

log = logging.getLogger("loraplex.uploads")


class Sweeper:
    """Sweeps every `every_s` seconds from `start` to `close`."""

    def __init__(self, uploads: Uploads, every_s: float = 5.0) -> None:
        self._uploads, self._every_s = uploads, every_s
        self._gate, self._db = uploads.gate, uploads.gate.db
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin with a sweep at once."""
        self._task = asyncio.create_task(self._keep_sweeping())

    async def close(self) -> None:
        """Sweep no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def sweep(self) -> None:
        """Close what is late, go on with what was left, and remove folders of no use."""
        async with self._db.session(None) as session:
            await jobs.expire(session, self._uploads.bounds)
        async with self._db.read(None) as session:
            left = await jobs.abandoned(session, self._uploads.lease_s)
        for row in left:
            if not self._uploads.has(row.id) and (self._is_here(row) or self._is_late(row)):
                await self._take_over(row)
        names = sorted(path.name for path in self._gate.quarantine.glob("upl_*"))
        for start in range(0, len(names), BATCH):
            await self._tidy(names[start : start + BATCH])

    async def _keep_sweeping(self) -> None:
        while True:
            try:
                await self.sweep()
            except Unavailable:
                log.info("uploads are not swept while the database is away")
            except Exception:
                log.exception("uploads were not swept")
            await asyncio.sleep(self._every_s)

    async def _take_over(self, seen: Upload) -> None:
        async with self._db.session(None) as session:
            row = await jobs.take_over(session, seen)
        if row is None:
            return
        attempts = row.options["attempts"]
        if row.options["draft"] or attempts > MAX_ATTEMPTS or not self._is_here(row):
            report = {"checks": [], **(row.report or {}), "reasons": [INTERRUPTED]}
            await self._gate.discard(jobs.fresh_images(row))
            await self._uploads.hold(row).end("failed", report)
        else:
            log.info("going on with the upload %s", row.id)
            self._uploads.check_in_background(row)

    def _is_here(self, row: Upload) -> bool:
        return self._gate.folder(row.id).exists()

    def _is_late(self, row: Upload) -> bool:
        """Whether the server that has its bytes will not come back any more."""
        return utc_now() >= jobs.expires_at(row, self._uploads.bounds)

    async def _tidy(self, names: Sequence[str]) -> None:
        """Clear up after uploads that are closed, and forms that a dead process was reading."""
        async with self._db.session(None) as session:
            found = await session.scalars(select(Upload).where(Upload.id.in_(names)))
            rows = {row.id: row for row in found}
            for row in rows.values():
                is_form = row.options["draft"] and row.state == "uploading"
                if is_form and not self._uploads.has(row.id):
                    await jobs.close(session, row, "cancelled", SYSTEM)
        for name in names:
            known = rows.get(name)
            is_open = known is not None and known.state in jobs.OPEN
            if not is_open and not self._uploads.has(name):
                await self._uploads.clear(name, jobs.fresh_images(known) if known else set())
