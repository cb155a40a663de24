"""Uploads as jobs: begun, filled part by part, checked in the background, cancelled.

Every upload goes this way, be it sent in parts, in one form or from a folder of ours. Its row and
its folder outlive this process: another goes on with it (`upload_sweep`). Knows rows, folders and
tasks; refuses to know HTTP and how an adapter is checked.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterable, AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import anyio
from anyio import to_thread

from loraplex.platform import upload_jobs as jobs
from loraplex.platform.audit import Actor
from loraplex.platform.db.models import AdapterVersion, Upload
from loraplex.platform.errors import ApiError, BadRequest, Conflict, Unavailable
from loraplex.platform.settings import Settings
from loraplex.platform.upload_hold import Hold, HoldLost
from loraplex.platform.upload_jobs import Bounds, Wish
from loraplex.platform.upload_latest import Latest
from loraplex.platform.upload_parts import WHOLE, Part, PartFolder
from loraplex.platform.upload_run import Run, Trial, settle
from loraplex.platform.uploads import Gate

LEASE_S: Final = 15.0
ENGINE_S: Final = 60.0  # for an engine to become ready, beyond what compiling may take

log = logging.getLogger("loraplex.uploads")


@dataclass(frozen=True)
class _Check:
    """A checking in the background, and how to end it."""

    task: asyncio.Task[None]
    scope: anyio.CancelScope


class Uploads:
    """The uploads of all tenants, as this process sees them."""

    def __init__(
        self, gate: Gate, trial: Trial, bounds: Bounds, *, lease_s: float, patience_s: float
    ) -> None:
        """`lease_s`: how long a dead process keeps others from its uploads; `patience_s`: to wait
        for an engine to try an image in."""
        self.gate, self.bounds, self.lease_s = gate, bounds, lease_s
        self._trial, self._patience_s = trial, patience_s
        self._checks: dict[str, _Check] = {}
        self._drafts: set[str] = set()
        self._appending = Latest()

    async def create(self, tenant_id: str, wish: Wish, actor: Actor) -> Upload:
        """Begin an upload in parts; raises as `upload_jobs.create` does, and `BadRequest`."""
        self.gate.check_name(wish.name)
        async with self.gate.db.session(tenant_id) as session:
            row = await jobs.create(session, tenant_id, wish, self.bounds, actor=actor)
        try:
            await to_thread.run_sync(self.gate.folder(row.id).make)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.cancel(tenant_id, row.id, actor)
            raise
        return row

    async def get(
        self, tenant_id: str, upload_id: str, names: Collection[str] | None = None
    ) -> Upload:
        """An upload of the tenant's; of `names`, adapters', if given. Raises `NotFound`."""
        async with self.gate.db.read(tenant_id) as session:
            return await jobs.get_upload(session, upload_id, names=names)

    async def offsets(self, row: Upload) -> dict[Part, int]:
        """How many bytes of each part are on this server's disk; none once it is closed."""
        return await to_thread.run_sync(self.gate.folder(row.id).offsets)

    async def append(
        self,
        tenant_id: str,
        upload_id: str,
        part: Part,
        chunks: AsyncIterable[bytes],
        *,
        offset: int,
        length: int | None,
    ) -> int:
        """Write a part's bytes from `offset` on; returns where it ends, once that is on the disk.

        `length` is how many bytes will come, None where that is not told. A request that goes on
        where another one stalls ends that: its caller may be long gone. Raises `WrongOffset`,
        `Conflict`, `TooLarge`, `QuotaExceeded` and `StorageFull`; what was written by then stays.
        """
        row = await self.get(tenant_id, upload_id)
        jobs.check_open(row, self.bounds)
        upto = offset + length if length is not None else _told_size(row, part)
        folder = await self._present(row)
        await to_thread.run_sync(folder.check_offset, part, offset)
        async with self._appending.latest((upload_id, part)):
            writer = await to_thread.run_sync(folder.open, part, offset, upto)
            try:
                async with self.gate.db.session(tenant_id) as session:
                    await jobs.reserve(session, tenant_id, upload_id, part, upto, self.bounds)
                async for chunk in chunks:
                    await to_thread.run_sync(writer.write, chunk)
            finally:
                with anyio.CancelScope(shield=True):
                    await to_thread.run_sync(writer.close)
        return writer.offset

    async def finish(self, tenant_id: str, upload_id: str) -> Upload:
        """Have an upload checked that has all its parts; one that is finished is as it is.

        Raises `Conflict` when bytes are missing.
        """
        row = await self.get(tenant_id, upload_id)
        if row.state != "uploading":
            return row
        folder = await self._present(row)
        found = await to_thread.run_sync(folder.offsets)
        async with self.gate.db.session(tenant_id) as session:
            row = await jobs.get_upload(session, upload_id, lock=True)
            if row.state != "uploading":
                return row
            jobs.check_open(row, self.bounds)
            _check_complete(row, found)
            await jobs.begin(session, row)
        self.check_in_background(row)
        return row

    async def wait(self, tenant_id: str, upload_id: str) -> Upload:
        """The upload, once this process no longer checks it."""
        if (check := self._checks.get(upload_id)) is not None:
            await asyncio.wait([check.task])
        return await self.get(tenant_id, upload_id)

    async def cancel(self, tenant_id: str, upload_id: str, actor: Actor) -> Upload:
        """Give an upload up, at any moment before it is published; raises `Conflict` after it."""
        async with self.gate.db.session(tenant_id) as session:
            row = await jobs.cancel(session, upload_id, actor)
        if (check := self._checks.get(upload_id)) is not None:
            check.scope.cancel()
            await asyncio.wait([check.task])
        if upload_id not in self._drafts:  # whose own request ends it
            await self.clear(row.id, jobs.fresh_images(row))
        return row

    async def clear(self, upload_id: str, fresh: set[str]) -> None:
        """Remove what a closed upload left here: images that are its alone, then its folder.

        The folder goes last: as long as it is there, the sweep comes back to it after a crash.
        """
        if await to_thread.run_sync(self.gate.folder(upload_id).exists):
            await self.gate.discard(fresh)
            await self._remove(upload_id)

    @asynccontextmanager
    async def draft(
        self, tenant_id: str, actor: Actor, size: int
    ) -> AsyncIterator[tuple[Upload, PartFolder]]:
        """A row and a folder for an upload of about `size` bytes that comes in one piece.

        Unless it is published within the block, nothing is left of it. Raises as `create` does.
        """
        wish = Wish(name="", sizes={"form": size})
        async with self.gate.db.session(tenant_id) as session:
            row = await jobs.create(session, tenant_id, wish, self.bounds, actor=actor, draft=True)
        self._drafts.add(row.id)
        folder = self.gate.folder(row.id)
        try:
            await to_thread.run_sync(folder.make)
            yield row, folder
        finally:
            with anyio.CancelScope(shield=True):
                await self._end_draft(row, actor)

    async def publish(self, draft: Upload, name: str, actor: Actor) -> AdapterVersion:
        """Check a draft whose parts are there, and publish it as the next version of `name`.

        Raises `BadRequest` or `NameConflict` for the name, and whatever is wrong with the rest.
        """
        self.gate.check_name(name)
        async with self.gate.db.session(draft.tenant_id) as session:
            row = await jobs.get_upload(session, draft.id, lock=True)
            jobs.check_open(row, self.bounds)
            await jobs.name_draft(session, row, name, actor)
        return await self._check(self.hold(row))

    async def close(self) -> None:
        """Stop, leaving what is being checked to the next process."""
        for check in (checks := [*self._checks.values()]):
            check.scope.cancel()
        if checks:
            await asyncio.wait([check.task for check in checks])

    def has(self, upload_id: str) -> bool:
        """Whether this process is at work on it."""
        return upload_id in self._checks or upload_id in self._drafts

    def hold(self, row: Upload) -> Hold:
        """The grip on an upload that was just taken."""
        return Hold(self.gate.db, row, self.lease_s)

    def check_in_background(self, row: Upload) -> None:
        """Check an upload that was just taken."""
        scope = anyio.CancelScope()
        task = asyncio.create_task(self._check_quietly(row, scope))
        self._checks[row.id] = _Check(task, scope)
        task.add_done_callback(lambda _: self._checks.pop(row.id, None))

    async def _check_quietly(self, row: Upload, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                await self._check(self.hold(row))
        except ApiError as error:
            log.info("the upload %s was not published: %s", row.id, error.message)
        except Exception:
            log.exception("the upload %s failed", row.id)

    async def _check(self, hold: Hold) -> AdapterVersion:
        """Check and publish; however that ends, the row tells it."""
        folder = self.gate.folder(hold.row.id)
        run = Run(self.gate, self._trial, hold, folder, patience_s=self._patience_s)
        try:
            async with hold.kept():
                version = await run.go()
        except BaseException as error:
            with anyio.CancelScope(shield=True), contextlib.suppress(HoldLost, Unavailable):
                if await settle(hold, run, error):
                    await self._remove(hold.row.id)
            raise
        await self._remove(hold.row.id)
        return version

    async def _end_draft(self, draft: Upload, actor: Actor) -> None:
        """Close or drop what did not become a version."""
        async with self.gate.db.session(draft.tenant_id) as session:
            row = await jobs.get_upload(session, draft.id, lock=True)
            if row.state == "uploading":
                await session.delete(row)
            elif row.state == "validating":
                await jobs.close(session, row, "cancelled", actor)
        self._drafts.discard(draft.id)
        await self._remove(draft.id)

    async def _remove(self, upload_id: str) -> None:
        await to_thread.run_sync(self.gate.folder(upload_id).remove)

    async def _present(self, row: Upload) -> PartFolder:
        folder = self.gate.folder(row.id)
        if not await to_thread.run_sync(folder.exists):
            raise Conflict(
                f"The bytes of {row.id} are not on this server. Send them to the one that began "
                "it, or begin a new upload."
            )
        return folder


def open_uploads(settings: Settings, gate: Gate, trial: Trial) -> Uploads:
    """The uploads of a server, as its settings bound them."""
    bounds = Bounds(settings.max_uploads, settings.max_upload_bytes, settings.upload_ttl_s)
    patience_s = settings.compile_timeout_s + ENGINE_S
    return Uploads(gate, trial, bounds, lease_s=LEASE_S, patience_s=patience_s)


def _told_size(row: Upload, part: Part) -> int:
    size: int | None = row.parts.get(part, jobs.UNTOLD)["size"]
    if size is None:
        raise BadRequest(
            "Send Content-Length, or tell the part's size when the upload is begun.",
            param="Content-Length",
        )
    return size


def _check_complete(row: Upload, found: dict[Part, int]) -> None:
    if frozenset(found) not in WHOLE:
        raise Conflict(
            "The upload is not complete: send the parts adapter_config and adapter_model, or one "
            f"zip as archive. There {'is' if len(found) == 1 else 'are'} "
            f"{', '.join(found) or 'none'}."
        )
    for part, told in row.parts.items():
        if part not in found and (told["size"], told["sha256"]) != (None, None):
            raise Conflict(f"The part {part} was announced and is not there. Send it first.")
    for part, has in found.items():
        size = row.parts.get(part, jobs.UNTOLD)["size"]
        if size not in (None, has):
            raise Conflict(f"The part {part} has {has} of {size} bytes. Send the rest first.")
