"""Which images stay in the store, and the removal of those that nobody needs any more.

An image is needed while a live version names it, and for a grace after the last one was deleted:
longer than a request may take, so that one which was resolved before the deletion, even if it still
queues, finds its image. Nothing has to be counted, and every server comes to the same result. What
was put into the store lately stays too, for it may be an upload's that is about to be published.

An image that this database never knew may be what a crash left of an upload, or another platform's
that shares the store, or of a database that is not the one that was meant. So it goes only when an
operator says so, and when it is a day old.

Images fetched from a remote store leave the local cache when that is full, those used longest ago
first. Knows rows, files and moments; refuses to know requests and engines.
"""

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from anyio import to_thread
from sqlalchemy import ColumnElement, CompoundSelect, or_, select, union
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.engine.images import FRESH_S, ImageStore, StoredFile
from loraplex.platform import audit
from loraplex.platform.audit import Actor
from loraplex.platform.db.locks import lock_names
from loraplex.platform.db.models import AdapterVersion, ImageVariant
from loraplex.platform.db.session import Database
from loraplex.platform.db.types import utc_now
from loraplex.platform.settings import Settings

MARGIN_S: Final = 60.0  # for clocks that differ, and from a name's resolution to its request
PUT_S: Final = 2 * FRESH_S  # an image may be published for `FRESH_S` after it was put
UNNAMED_S: Final = 24 * 3600.0
EVER: Final = datetime(1970, 1, 1, tzinfo=UTC)
BATCH: Final = 1000  # digests, in a query
LISTED: Final = 1000  # digests, in an answer


@dataclass(frozen=True)
class Collected:
    """What is, was or would be removed from the store: whole images, and parts of cut-off copies.

    `bytes` are those of both; `digests` are the first of the images.
    """

    images: int = 0
    parts: int = 0
    bytes: int = 0
    digests: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """The same, as plain JSON values."""
        return asdict(self)


def grace_s(settings: Settings) -> float:
    """Seconds for which an image may be needed after the last version with it was deleted."""
    return settings.request_timeout_s + MARGIN_S


async def collect(
    db: Database,
    store: ImageStore,
    *,
    grace_s: float,
    unnamed: bool = False,
    actor: Actor = audit.SYSTEM,
    dry_run: bool = False,
    now: datetime | None = None,
) -> Collected:
    """Remove from the store what nobody needs; with `dry_run`, only say what that is.

    With `unnamed` also the images that were never named here. Several servers may do so at once.
    What was removed is noted in the audit log.
    """
    now = now or utc_now()
    since = now - timedelta(seconds=grace_s)
    old = await _older(store, now.timestamp() - PUT_S)
    parts = [file for file in old if not file.is_whole]
    async with db.read(None) as session:
        needed = set(await session.scalars(_needed(since)))
        images = [file for file in old if file.is_whole and file.digest not in needed]
        known = await _known(session, images)
    last = now.timestamp() - UNNAMED_S if unnamed else -math.inf
    images = [file for file in images if file.digest in known or file.modified < last]
    if not dry_run:
        images = [file for file in images if await _remove(db, store, file.digest, since)]
        for part in parts:
            await to_thread.run_sync(store.delete_part, part)
    collected = _sum(images, parts)
    if not dry_run and collected != Collected():
        await _note(db, actor, collected)
    return collected


async def _older(store: ImageStore, moment: float) -> list[StoredFile]:
    """Files of the store that were written before `moment`, in seconds since the epoch."""
    files = await to_thread.run_sync(list, store.files())
    return [file for file in files if file.modified < moment]


async def _known(session: AsyncSession, images: list[StoredFile]) -> set[str]:
    """Digests of images that a version, live or deleted, has ever named."""
    known: set[str] = set()
    for start in range(0, len(images), BATCH):
        digests = [file.digest for file in images[start : start + BATCH]]
        known.update(await session.scalars(_needed(EVER, digests)))
    return known


async def total(store: ImageStore) -> Collected:
    """All that is in the store."""
    files = await to_thread.run_sync(list, store.files())
    return _sum([f for f in files if f.is_whole], [f for f in files if not f.is_whole])


async def discard(db: Database, store: ImageStore, digests: Iterable[str]) -> None:
    """Remove at once images that were put for an upload that came to nothing.

    One that a version names, or did, stays: requests may need it, and it leaves by the clock.
    Another upload that comes to the same image meanwhile has to put it again.
    """
    for digest in digests:
        await _remove(db, store, digest, EVER)


async def unneeded(
    session: AsyncSession, digests: Collection[str], since: datetime | None = None
) -> set[str]:
    """Those of `digests` that no live version of any tenant names, nor one deleted `since`.

    For an operator's writing session; until it ends nobody publishes one of them. Remove an image
    in the same session as this was asked, and put an image into the store in the same session as
    `registry.add_version`, after it: then no published image is ever removed.
    """
    await lock_names(session, digests)
    return {*digests} - {*await session.scalars(_needed(since, digests))}


async def _remove(db: Database, store: ImageStore, digest: str, since: datetime) -> bool:
    """Remove an image in a transaction of its own, unless it is needed after all."""
    async with db.session(None) as session:
        if not await unneeded(session, [digest], since):
            return False
        await to_thread.run_sync(store.delete, digest)
    return True


def _needed(since: datetime | None, digests: Collection[str] | None = None) -> CompoundSelect[str]:
    """The digests, of `digests` or all, that versions name which live or were deleted `since`."""
    kept: ColumnElement[bool] = AdapterVersion.deleted_at.is_(None)
    if since is not None:
        kept = or_(kept, AdapterVersion.deleted_at > since)
    own = select(AdapterVersion.digest).where(kept)
    variants = (
        select(ImageVariant.digest)
        .join(AdapterVersion, AdapterVersion.id == ImageVariant.version_id)
        .where(kept)
    )
    if digests is not None:
        own = own.where(AdapterVersion.digest.in_(digests))
        variants = variants.where(ImageVariant.digest.in_(digests))
    return union(own, variants)


def _sum(images: list[StoredFile], parts: list[StoredFile]) -> Collected:
    return Collected(
        images=len(images),
        parts=len(parts),
        bytes=sum(file.bytes for file in (*images, *parts)),
        digests=tuple(file.digest for file in images[:LISTED]),
    )


async def _note(db: Database, actor: Actor, collected: Collected) -> None:
    details = {"images": collected.images, "parts": collected.parts, "bytes": collected.bytes}
    async with db.session(None) as session:
        await audit.note(session, actor, "storage.collected", "images", tenant_id=None, **details)


def shrink_cache(cache: Path, limit_bytes: int, keep_s: float, now: float) -> int:
    """Remove cached images, those used longest ago first, down to `limit_bytes`; returns the bytes.

    One that was used in the last `keep_s` seconds stays: the engine may be about to read it. So
    does what an interrupted fetch left, until it is that old. `now` is seconds since the epoch.
    """
    found = sorted(_sizes(cache))
    total, removed = sum(size for _, size, _ in found), 0
    for used, size, path in found:
        is_part = path.suffix != ".safetensors"
        if used < now - keep_s and (is_part or total - removed > limit_bytes):
            path.unlink(missing_ok=True)
            removed += size
    return removed


def _sizes(cache: Path) -> Iterator[tuple[float, int, Path]]:
    """When each file was used last, its bytes, and where it is."""
    for path in cache.glob("*.*"):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            yield stat.st_mtime, stat.st_size, path
