"""This process's grip on an upload that it checks: every write first sees that it still is.

Knows the row and its `updated_at`, as `upload_jobs` describes; refuses to know what is checked.
"""

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import anyio
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.api.beside import beside
from loraplex.platform.audit import Actor
from loraplex.platform.db.models import Upload
from loraplex.platform.db.session import Database
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import Conflict, Unavailable
from loraplex.platform.upload_jobs import State, close, get_upload


class HoldLost(Conflict):
    """The upload was cancelled, or another process goes on with it."""

    def __init__(self) -> None:
        super().__init__("The upload was cancelled, or is checked by another server by now.")


class Hold:
    """An upload in the state "validating" that is ours for as long as it is renewed."""

    def __init__(self, db: Database, row: Upload, lease_s: float) -> None:
        self._db, self._lease_s, self._turn = db, lease_s, anyio.Lock()
        self.row = row

    @property
    def actor(self) -> Actor:
        """On whose behalf it is checked."""
        return Actor(self.row.created_by, self.row.options["request_id"])

    @asynccontextmanager
    async def change(self) -> AsyncIterator[tuple[AsyncSession, Upload]]:
        """A transaction with the row locked, which renews the hold; raises `HoldLost`.

        It is not cancelled half-way, for then nobody could tell whether it still holds.
        """
        with anyio.CancelScope(shield=True):
            async with self._turn, self._db.session(self.row.tenant_id) as session:
                row = await get_upload(session, self.row.id, lock=True)
                if row.state != "validating" or row.updated_at != self.row.updated_at:
                    raise HoldLost
                row.updated_at = utc_now()
                yield session, row
            self.row = row

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Renew the hold beside the block; raises `HoldLost` in its place when it is lost."""
        lost = False

        async def renew(scope: anyio.CancelScope) -> None:
            nonlocal lost
            while not lost:
                await anyio.sleep(self._lease_s / 3)
                try:
                    await self.renew()
                except HoldLost:
                    lost = True
                    scope.cancel()
                except Unavailable:
                    continue

        async with beside(renew):
            yield
        if lost:
            raise HoldLost

    async def renew(self) -> None:
        """Say that this process goes on; raises `HoldLost`."""
        async with self.change():
            pass

    async def note_progress(self, report: Mapping[str, Any]) -> None:
        """Keep the report so far."""
        async with self.change() as (_, row):
            row.report = dict(report)

    async def note_fresh(self, digests: Collection[str]) -> None:
        """Keep which images are in the store for this upload alone, before they are put there."""
        async with self.change() as (_, row):
            row.options = row.options | {"fresh": sorted(digests)}

    async def end(self, state: State, report: Mapping[str, Any]) -> None:
        """Close the upload with its report."""
        codes = sorted({reason["code"] for reason in report["reasons"]})
        async with self.change() as (session, row):
            row.report = dict(report)
            await close(session, row, state, self.actor, codes=codes)

    async def reopen(self, report: Mapping[str, Any]) -> None:
        """Let the client finish it again later: its parts are good, but we could not go on."""
        async with self.change() as (_, row):
            row.report, row.state = dict(report), "uploading"

    async def let_go(self) -> None:
        """Leave it to the next process that looks, without waiting for the lease to end."""
        async with self.change() as (_, row):
            row.updated_at = utc_now() - timedelta(seconds=self._lease_s)
