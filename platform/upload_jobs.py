"""Uploads as rows: made, filled, taken by one process for checking, and closed in one outcome.

    uploading → validating → ready | rejected | failed
        └───────────┴──────→ cancelled, expired

A row that is being checked belongs to the process that wrote its `updated_at` last, for as long as
that is no older than the lease; whoever takes it writes another, so the process before it finds
its hold lost before it can publish. Knows the table and its states; refuses to know files, HTTP and
how an adapter is checked.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal, cast

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform import audit, storage
from loraplex.platform.audit import SYSTEM, Actor
from loraplex.platform.db.locks import FOR_CHANGE
from loraplex.platform.db.models import Tenant, Upload
from loraplex.platform.db.page import Page, fetch_page
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import Conflict, NotFound, QuotaExceeded, TooLarge
from loraplex.platform.tenants import get_tenant

State = Literal["uploading", "validating", "ready", "rejected", "failed", "cancelled", "expired"]
Dtype = Literal["bf16", "int8"]
OPEN: Final[tuple[State, ...]] = ("uploading", "validating")
UNTOLD: Final = {"size": None, "sha256": None, "reserved": 0}
FINISH: Final = "Finish or cancel one: GET /v1/uploads lists them."
DRAFT_S: Final = 3600.0  # that a form may take to arrive


@dataclass(frozen=True)
class Wish:
    """What an upload is to become, and what its parts will be: bytes and SHA-256, where told."""

    name: str
    variants: tuple[Dtype, ...] = ("bf16",)
    alias: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    sha256: Mapping[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, Any]:
        """As the row keeps them: `reserved` bytes count against the tenant's storage."""
        return {
            part: {
                "size": self.sizes.get(part),
                "sha256": self.sha256.get(part),
                "reserved": self.sizes.get(part, 0),
            }
            for part in sorted({*self.sizes, *self.sha256})
        }


@dataclass(frozen=True)
class Bounds:
    """How much a tenant may have open: uploads, and bytes of one; and how long one stays open."""

    max_open: int
    max_bytes: int
    ttl_s: float


async def create(
    session: AsyncSession,
    tenant_id: str,
    wish: Wish,
    bounds: Bounds,
    *,
    actor: Actor,
    draft: bool = False,
) -> Upload:
    """Open an upload. A `draft` is a form on its way: it has no name and no audit entry yet.

    Raises `TooLarge`, and `QuotaExceeded` when too many are open, the tenant's storage is used up,
    or the bytes do not fit it.
    """
    tenant = await get_tenant(session, tenant_id, lock=True)
    mine = await _open_of(session, tenant_id)
    if len(mine) >= bounds.max_open:
        raise QuotaExceeded(f"{len(mine)} uploads are open, as many as may be. {FINISH}")
    await _check_storage(session, tenant)
    options = {"variants": [*wish.variants], "alias": wish.alias, "draft": draft, "attempts": 1}
    options |= {"fresh": [], "request_id": actor.request_id}
    row = Upload(
        tenant_id=tenant_id,
        name=wish.name,
        state="uploading",
        options=options,
        parts=wish.parts,
        created_by=actor.id,
    )
    _check_room(tenant, mine, row, bounds)
    session.add(row)
    await session.flush()
    if not draft:
        await _note(session, actor, "created", row, adapter=row.name)
    return row


async def reserve(
    session: AsyncSession, tenant_id: str, upload_id: str, part: str, upto: int, bounds: Bounds
) -> None:
    """Make room for a part up to `upto` bytes, before they are written. Raises as `create` does.

    Raises `Conflict` when the upload takes no more bytes.
    """
    row = await get_upload(session, upload_id, lock=True)
    check_open(row, bounds)
    told = row.parts.get(part, UNTOLD)
    if told["size"] is not None and upto > told["size"]:
        raise TooLarge(f"The part {part} was to have {told['size']} bytes, not {upto}.")
    if upto > told["reserved"]:
        tenant = await get_tenant(session, tenant_id, lock=True)
        row.parts = row.parts | {part: told | {"reserved": upto}}
        others = [each for each in await _open_of(session, tenant_id) if each.id != row.id]
        _check_room(tenant, others, row, bounds)


def check_open(row: Upload, bounds: Bounds) -> None:
    """Raise `Conflict` unless the upload waits for bytes."""
    if row.state != "uploading" or utc_now() >= expires_at(row, bounds):
        state = row.state if row.state != "uploading" else "expired"
        raise Conflict(f"The upload {row.id} is {state}: it takes no more bytes. Begin a new one.")


def expires_at(row: Upload, bounds: Bounds) -> datetime:
    """When an upload that is not finished is given up."""
    ttl_s = min(bounds.ttl_s, DRAFT_S) if row.options["draft"] else bounds.ttl_s
    return row.created_at + timedelta(seconds=ttl_s)


async def get_upload(
    session: AsyncSession,
    upload_id: str,
    *,
    lock: bool = False,
    names: Collection[str] | None = None,
) -> Upload:
    """An upload that the session may see, for one of the adapters `names` if they are given.

    Raises `NotFound`.
    """
    row = await session.get(
        Upload, upload_id, with_for_update=FOR_CHANGE if lock else None, populate_existing=lock
    )
    if row is None or (names is not None and row.name not in names):
        raise NotFound(f"There is no upload {upload_id[:64]!r}.")
    return row


async def list_uploads(
    session: AsyncSession,
    tenant_id: str,
    *,
    state: State | None = None,
    after: str | None = None,
    limit: int = 100,
    names: Collection[str] | None = None,
) -> Page[Upload]:
    """A tenant's uploads in the order they were begun; of one state, and for `names`, if given."""
    statement = select(Upload).where(Upload.tenant_id == tenant_id)
    if names is not None:
        statement = statement.where(Upload.name.in_(names))
    if state is not None:
        statement = statement.where(Upload.state == state)
    return await fetch_page(session, statement, Upload.id, after=after, limit=limit)


async def begin(session: AsyncSession, row: Upload) -> None:
    """Take an upload that has all its parts for checking; `row` is locked."""
    row.state, row.updated_at = "validating", utc_now()
    await session.flush()


async def name_draft(session: AsyncSession, row: Upload, name: str, actor: Actor) -> None:
    """A form has arrived: give its row the name, and take it for checking."""
    row.name = name
    await _note(session, actor, "created", row, adapter=name)
    await begin(session, row)


async def cancel(session: AsyncSession, upload_id: str, actor: Actor) -> Upload:
    """Close an upload that is open; twice is once. Raises `NotFound` and `Conflict`."""
    row = await get_upload(session, upload_id, lock=True)
    if row.state in OPEN:
        await close(session, row, "cancelled", actor)
    elif row.state != "cancelled":
        raise Conflict(f"The upload {row.id} is {row.state} already.")
    return row


async def close(
    session: AsyncSession, row: Upload, state: State, actor: Actor, **details: Any
) -> None:
    """End an upload, whose row is locked, in another state than "ready"."""
    row.state, row.updated_at = state, utc_now()
    await _note(session, actor, state, row, adapter=row.name, **details)


def fresh_images(row: Upload) -> set[str]:
    """Digests of the images that only this upload has put into the store, if it got that far.

    They go with it unless it is "ready": then a version names them.
    """
    return set() if row.state == "ready" else {*row.options.get("fresh", ())}


async def abandoned(session: AsyncSession, lease_s: float) -> Sequence[Upload]:
    """Uploads whose checking nobody goes on with; an operator's session only."""
    before = utc_now() - timedelta(seconds=lease_s)
    statement = select(Upload).where(Upload.state == "validating", Upload.updated_at < before)
    return list(await session.scalars(statement))


async def take_over(session: AsyncSession, seen: Upload) -> Upload | None:
    """Take an abandoned upload, unless another process was quicker: then None."""
    row = await get_upload(session, seen.id, lock=True)
    if row.state != "validating" or row.updated_at != seen.updated_at:
        return None
    row.options = row.options | {"attempts": row.options["attempts"] + 1}
    await begin(session, row)
    return row


async def expire(session: AsyncSession, bounds: Bounds) -> list[str]:
    """Close uploads whose client did not finish them in time; returns their ids."""
    oldest = utc_now() - timedelta(seconds=min(bounds.ttl_s, DRAFT_S))
    late = (Upload.state == "uploading") & (Upload.created_at <= oldest)
    found = await session.scalars(select(Upload).where(late).with_for_update(key_share=True))
    rows = [row for row in found if utc_now() >= expires_at(row, bounds)]
    for row in rows:
        await close(session, row, "expired", SYSTEM)
    return [row.id for row in rows]


async def _open_of(session: AsyncSession, tenant_id: str) -> list[Upload]:
    statement = select(Upload).where(Upload.tenant_id == tenant_id, Upload.state.in_(OPEN))
    return list(await session.scalars(statement))


async def _check_storage(session: AsyncSession, tenant: Tenant) -> None:
    """Refuse at once what would be refused after all the work."""
    limit = tenant.storage_bytes
    if limit is not None and (used := await storage.used(session, tenant.id)).bytes >= limit:
        raise QuotaExceeded(
            f"The limit storage_bytes is {limit}, and {used.bytes} are used by {used.images} "
            f"images. Delete some, or ask for a higher limit. {storage.WHERE_TO_LOOK}",
            param="storage_bytes",
        )


def _check_room(tenant: Tenant, others: Sequence[Upload], row: Upload, bounds: Bounds) -> None:
    size, held = reserved(row), sum(reserved(other) for other in others)
    if size > bounds.max_bytes:
        raise TooLarge(f"The upload is larger than the limit of {bounds.max_bytes} bytes.")
    limit = tenant.storage_bytes
    if limit is not None and held + size > limit:
        raise QuotaExceeded(
            f"Uploads in progress may hold {limit} bytes, as storage_bytes says; {held} are held "
            f"and {size} more are asked for. {FINISH}",
            param="sizes",
        )


def reserved(row: Upload) -> int:
    """Bytes that an open upload counts for."""
    return sum(cast("int", part["reserved"]) for part in row.parts.values())


async def _note(
    session: AsyncSession, actor: Actor, what: str, row: Upload, **details: Any
) -> None:
    await audit.note(session, actor, f"upload.{what}", row.id, tenant_id=row.tenant_id, **details)
