"""Uploads as rows on both databases: bounds under a race, one taker each, holds that are lost."""

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import select

from loraplex.platform import upload_jobs as jobs
from loraplex.platform.audit import Actor, list_entries
from loraplex.platform.db.models import Tenant, Upload
from loraplex.platform.errors import Conflict, NotFound, QuotaExceeded, TooLarge
from loraplex.platform.quotas import TenantLimits
from loraplex.platform.upload_hold import Hold, HoldLost
from loraplex.platform.upload_jobs import Bounds, Wish

pytestmark = pytest.mark.anyio

ACTOR = Actor("key_tests", "req_tests")
BOUNDS = Bounds(max_open=3, max_bytes=1000, ttl_s=3600)
LEASE_S = 15.0


async def begun(db, tenant, **wish) -> Upload:
    async with db.session(tenant.id) as session:
        return await jobs.create(session, tenant.id, Wish("poet", **wish), BOUNDS, actor=ACTOR)


async def taken(db, tenant) -> Upload:
    """An upload that is being checked."""
    made = await begun(db, tenant)
    async with db.session(tenant.id) as session:
        row = await jobs.get_upload(session, made.id, lock=True)
        await jobs.begin(session, row)
    return row


async def age(db, row: Upload, **ago: float) -> Upload:
    """The row as if nobody had touched it for so long."""
    async with db.session(None) as session:
        kept = await session.get(Upload, row.id)
        kept.updated_at -= timedelta(**ago)
        kept.created_at -= timedelta(**ago)
    return kept


async def limit_storage(db, tenant, size: int) -> None:
    async with db.session(None) as session:
        TenantLimits(storage_bytes=size).put(await session.get(Tenant, tenant.id))


async def outcomes(*coroutines) -> list[str]:
    """The names of the errors, and "done" for what has none."""
    done = await asyncio.gather(*coroutines, return_exceptions=True)
    return sorted("done" if not isinstance(o, BaseException) else type(o).__name__ for o in done)


async def test_however_many_are_begun_at_once_no_more_are_open_than_may_be(db, acme):
    assert (
        await outcomes(*(begun(db, acme) for _ in range(8))) == ["QuotaExceeded"] * 5 + ["done"] * 3
    )


async def test_bytes_that_are_reserved_at_once_never_exceed_the_storage(db, acme):
    await limit_storage(db, acme, 100)
    rows = [await begun(db, acme, sizes={"adapter_config": 10}) for _ in range(3)]

    async def more(row: Upload) -> None:
        async with db.session(acme.id) as session:
            await jobs.reserve(session, acme.id, row.id, "adapter_model", 30, BOUNDS)

    assert await outcomes(*map(more, rows)) == ["QuotaExceeded", "done", "done"]
    async with db.read(acme.id) as session:
        page = await jobs.list_uploads(session, acme.id)
    assert sum(jobs.reserved(row) for row in page.items) == 90
    await more(next(row for row in page.items if jobs.reserved(row) == 40))  # again, for nothing


async def test_bounds_of_one_upload(db, acme, globex):
    with pytest.raises(TooLarge):
        await begun(db, acme, sizes={"archive": 1001})
    row = await begun(db, acme, sizes={"archive": 10})
    async with db.session(acme.id) as session:
        with pytest.raises(TooLarge):
            await jobs.reserve(session, acme.id, row.id, "archive", 11, BOUNDS)
        with pytest.raises(TooLarge):
            await jobs.reserve(session, acme.id, row.id, "adapter_model", 991, BOUNDS)
    async with db.session(globex.id) as session:
        with pytest.raises(NotFound):
            await jobs.reserve(session, globex.id, row.id, "archive", 1, BOUNDS)


async def test_storage_of_none_takes_no_upload(db, acme):
    await limit_storage(db, acme, 0)
    with pytest.raises(QuotaExceeded, match="storage_bytes is 0"):
        await begun(db, acme)


async def test_an_abandoned_upload_is_taken_by_one_process(db, acme):
    fresh = await taken(db, acme)
    old = await age(db, await taken(db, acme), seconds=LEASE_S + 1)
    async with db.read(None) as session:
        (seen,) = await jobs.abandoned(session, LEASE_S)
    assert seen.id == old.id != fresh.id

    async def take() -> Upload | None:
        async with db.session(None) as session:
            return await jobs.take_over(session, seen)

    winners = [row for row in await asyncio.gather(*(take() for _ in range(6))) if row]
    assert [row.options["attempts"] for row in winners] == [2]


async def test_who_was_taken_over_from_can_write_nothing_more(db, acme):
    old = Hold(db, await age(db, await taken(db, acme), seconds=LEASE_S + 1), LEASE_S)
    await old.note_progress({"checks": [1], "reasons": []})
    old.row = await age(db, old.row, seconds=LEASE_S + 1)
    async with db.session(None) as session:
        new = Hold(db, await jobs.take_over(session, old.row), LEASE_S)
    report = {"checks": [], "reasons": [{"code": "x", "message": "y"}]}
    for write in (
        old.renew(),
        old.let_go(),
        old.note_progress(report),
        old.end("rejected", report),
        old.reopen(report),
    ):
        with pytest.raises(HoldLost):
            await write
    await new.renew()
    await new.end("rejected", report)
    async with db.read(acme.id) as session:
        row = await jobs.get_upload(session, new.row.id)
        entries = (await list_entries(session, target=row.id)).items
    assert (row.state, row.report) == ("rejected", report)
    assert [entry.action for entry in entries] == ["upload.rejected", "upload.created"]
    assert {(entry.actor, entry.request_id) for entry in entries} == {("key_tests", "req_tests")}


async def test_a_hold_is_kept_beside_the_work_and_ends_it_when_it_is_lost(db, acme):
    hold = Hold(db, await taken(db, acme), lease_s=0.03)
    renew, renewed = hold.renew, asyncio.Event()

    async def renew_and_tell() -> None:
        await renew()
        renewed.set()

    hold.renew = renew_and_tell
    async with hold.kept():
        await renewed.wait()
    with pytest.raises(HoldLost):
        async with hold.kept():
            async with db.session(acme.id) as session:
                await jobs.cancel(session, hold.row.id, ACTOR)
            await asyncio.Event().wait()


async def test_what_was_let_go_is_abandoned_at_once(db, acme):
    hold = Hold(db, await taken(db, acme), LEASE_S)
    await hold.let_go()
    async with db.read(None) as session:
        assert [row.id for row in await jobs.abandoned(session, LEASE_S - 1)] == [hold.row.id]


async def test_cancelling_is_of_what_is_open(db, acme):
    row = await taken(db, acme)
    for _ in range(2):
        async with db.session(acme.id) as session:
            assert (await jobs.cancel(session, row.id, ACTOR)).state == "cancelled"
    ended = Hold(db, await taken(db, acme), LEASE_S)
    await ended.end("failed", {"checks": [], "reasons": []})
    async with db.session(acme.id) as session:
        with pytest.raises(Conflict, match="failed already"):
            await jobs.cancel(session, ended.row.id, ACTOR)


async def test_late_uploads_expire_and_forms_sooner(db, acme):
    day = Bounds(max_open=3, max_bytes=1000, ttl_s=86_400)
    rows = [await begun(db, acme) for _ in range(2)]
    async with db.session(acme.id) as session:
        wish = Wish("", sizes={"form": 5})
        form = await jobs.create(session, acme.id, wish, day, actor=ACTOR, draft=True)
    await age(db, rows[0], hours=25)
    await age(db, rows[1], hours=23)
    await age(db, form, hours=2)
    async with db.session(None) as session:
        assert {*await jobs.expire(session, day)} == {rows[0].id, form.id}
    async with db.read(None) as session:
        states = sorted(await session.scalars(select(Upload.state)))
    assert states == ["expired", "expired", "uploading"]
