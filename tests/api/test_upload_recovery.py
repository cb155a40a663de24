"""Uploads through a full disk, a stop, a dead process, a lost hold; and what nobody comes for."""

import asyncio
import errno

import pytest
from upload_kit import CHECKS, CONFIG, PATH, at, begin, bounded, digest_of, finish

from loraplex.platform import upload_parts
from loraplex.platform.db.models import Upload
from loraplex.platform.upload_sweep import Sweeper

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client(world):
    async with world.client("acme", timeout=60) as opened:
        yield opened


async def test_a_full_disk_is_said_and_loses_nothing(client, monkeypatch):
    """The disk takes three bytes, then no more, then has room again."""
    upload = (await client.post(PATH, json={"name": "poet"})).json()["id"]
    part = f"{PATH}/{upload}/parts/adapter_model"
    real, room = upload_parts.write, 3

    def full(descriptor, data):
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(descriptor, data[:room])
        room -= written
        return written

    content = b"abcdefgh"
    monkeypatch.setattr(upload_parts, "write", full)
    for offset in (0, 3):
        answer = await client.put(part, content=content[offset:], headers=at(offset))
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_full")
        assert answer.headers["x-should-retry"] == "false"
        assert (await client.head(part)).headers["upload-offset"] == "3"
    monkeypatch.setattr(upload_parts, "write", real)
    assert (await client.put(part, content=content[3:], headers=at(3))).status_code == 200
    config = f"{PATH}/{upload}/parts/adapter_config"
    await client.put(config, content=CONFIG, headers=at(0))
    done = await finish(client, upload)
    assert done["report"]["variants"]["bf16"]["digest"] == digest_of(content.decode())


async def test_a_form_that_fills_the_disk_is_told_and_leaves_nothing(world, client, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(upload_parts, "write", full)
    files = {"adapter_config": ("c", CONFIG), "adapter_model": ("m", b"ok")}
    answer = await client.post("/v1/adapters", data={"name": "poet"}, files=files)
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_full")
    assert list(world.settings.quarantine_dir.iterdir()) == []
    assert (await client.get(PATH)).json()["data"] == []


async def test_who_goes_on_where_another_request_stalls_ends_it(client):
    """Its caller has gone without a word, as behind a router that forgot the connection."""
    made = (await client.post(PATH, json={"name": "poet"})).json()
    part = f"{PATH}/{made['id']}/parts/archive"
    stalled = asyncio.Event()

    async def stalling():
        yield b"12"
        stalled.set()
        await asyncio.Event().wait()

    headers = at(0) | {"content-length": "9"}
    first = asyncio.create_task(client.put(part, content=stalling(), headers=headers))
    await stalled.wait()
    wrong = await client.put(part, content=b"x", headers=at(1))
    assert (wrong.status_code, wrong.headers["upload-offset"]) == (409, "2")
    second = await client.put(part, content=b"3456789", headers=at(2))
    assert (second.status_code, second.headers["upload-offset"]) == (200, "9")
    assert (await first).json()["error"]["code"] == "still_running"


async def test_a_disk_that_fills_while_it_is_checked_lets_it_be_finished_again(
    world, client, monkeypatch
):
    upload = await begin(client, b"full")  # the compiler finds no room, then the store

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(type(world.gate.store), "put", full)
        for _ in range(2):
            refused = await finish(client, upload)
            assert refused["state"] == "uploading"
            assert refused["reasons"][0]["code"] == "storage_full"
    done = await finish(client, upload)
    assert (done["state"], done["reasons"]) == ("ready", [])


async def test_a_stop_leaves_what_is_checked_to_the_next_process(world, client):
    world.engine.die()
    first = bounded(world)
    upload = await begin(client)
    await client.post(f"{PATH}/{upload}/finish")
    await first.close()
    assert (await client.get(f"{PATH}/{upload}")).json()["state"] == "validating"
    world.engine.revive()
    second = bounded(world)
    await Sweeper(second).sweep()
    done = await second.wait(world.tenants["acme"], upload)
    assert (done.state, done.options["attempts"]) == ("ready", 2)


async def test_two_processes_never_go_on_with_one_upload(world, client):
    world.engine.die()
    dead = bounded(world, lease_s=0.0)
    upload = await begin(client)
    await client.post(f"{PATH}/{upload}/finish")
    await dead.close()
    desks = [bounded(world) for _ in range(4)]
    async with world.db.session(None) as session:
        row = await session.get(Upload, upload)
        row.updated_at = row.created_at.replace(year=2020)
    await asyncio.gather(*(Sweeper(desk).sweep() for desk in desks))
    assert sorted(desk.has(upload) for desk in desks) == [False, False, False, True]
    world.engine.revive()
    for desk in desks:
        await desk.wait(world.tenants["acme"], upload)
    versions = (await client.get("/v1/adapters/poet/versions")).json()["data"]
    assert [version["version"] for version in versions] == [1]


async def test_who_lost_its_hold_publishes_nothing(world, client):
    """A process that slept past its lease finds that another has taken over."""
    world.engine.die()
    sleeper = bounded(world)
    upload = await begin(client)
    await client.post(f"{PATH}/{upload}/finish")

    async def compiled() -> bool:
        shown = (await client.get(f"{PATH}/{upload}")).json()
        return [check["name"] for check in shown["checks"]] == CHECKS[:5]

    await world.until(compiled)
    async with world.db.session(None) as session:
        row = await session.get(Upload, upload)
        row.updated_at = row.created_at.replace(year=2020)
    other = bounded(world)
    await Sweeper(other).sweep()
    assert other.has(upload)
    world.engine.revive()
    for desk in (sleeper, other):
        await desk.wait(world.tenants["acme"], upload)
    versions = (await client.get("/v1/adapters/poet/versions")).json()["data"]
    assert [version["version"] for version in versions] == [1]


async def test_what_kills_the_process_again_and_again_is_given_up(world, client):
    desk = bounded(world)
    upload = await begin(client)
    async with world.db.session(None) as session:
        row = await session.get(Upload, upload)
        row.state, row.options = "validating", row.options | {"attempts": 3}
        row.updated_at = row.created_at.replace(year=2020)
    sweeper = Sweeper(desk)
    await sweeper.sweep()
    shown = (await client.get(f"{PATH}/{upload}")).json()
    assert (shown["state"], shown["reasons"][0]["code"]) == ("failed", "interrupted")
    assert not (world.settings.quarantine_dir / upload).exists()


async def test_what_lies_on_a_server_that_never_comes_back_is_given_up_in_time(world, client):
    upload = await begin(client)
    async with world.db.session(None) as session:
        row = await session.get(Upload, upload)
        row.state, row.updated_at = "validating", row.created_at.replace(year=2020)
    world.gate.folder(upload).remove()
    for ttl_s, state in ((3600, "validating"), (0, "failed")):
        await Sweeper(bounded(world, ttl_s=ttl_s)).sweep()
        assert (await client.get(f"{PATH}/{upload}")).json()["state"] == state


async def test_what_nobody_finishes_in_time_expires(world, client):
    kept = await begin(client)
    desk = bounded(world, ttl_s=0.0)
    late = await client.post(f"{PATH}/{kept}/finish")
    assert (late.status_code, "expired" in late.json()["error"]["message"]) == (409, True)
    await Sweeper(desk).sweep()
    assert (await client.get(f"{PATH}/{kept}")).json()["state"] == "expired"
    assert list(world.settings.quarantine_dir.iterdir()) == []


async def test_folders_that_no_open_upload_names_are_swept(world, client):
    kept = await begin(client)
    stray = world.settings.quarantine_dir / "upl_stray"
    (stray / "source").mkdir(parents=True)
    await Sweeper(bounded(world)).sweep()
    assert [path.name for path in world.settings.quarantine_dir.iterdir()] == [kept]


async def leave(world, client, state: str) -> str:
    """An upload in this state as a killed process left it, its image in the store."""
    upload = await begin(client)
    image = world.settings.quarantine_dir / upload / "image"
    image.write_bytes(b"an image of ok")
    world.gate.store.put(image, digest_of("ok"))
    async with world.db.session(None) as session:
        row = await session.get(Upload, upload)
        row.state, row.options = state, row.options | {"fresh": [digest_of("ok")], "attempts": 3}
        row.updated_at = row.created_at.replace(year=2020)
    return upload


async def test_images_of_what_was_closed_in_any_way_after_a_death_leave_the_store(world, client):
    async def sweep(_: str) -> None:
        await Sweeper(bounded(world)).sweep()

    async def cancel(upload: str) -> None:
        assert (await client.delete(f"{PATH}/{upload}")).status_code == 200

    store = world.gate.store
    for state, close in (("validating", sweep), ("validating", cancel), ("cancelled", sweep)):
        upload = await leave(world, client, state)
        await close(upload)
        assert (await client.get(f"{PATH}/{upload}")).json()["state"] != "validating"
        assert digest_of("ok") not in store, (state, close)
        assert not (world.settings.quarantine_dir / upload).exists()


async def test_an_image_that_another_upload_published_meanwhile_stays(world, client):
    upload = await leave(world, client, "validating")
    assert (await finish(client, await begin(client)))["state"] == "ready"
    await Sweeper(bounded(world)).sweep()
    assert (await client.get(f"{PATH}/{upload}")).json()["state"] == "failed"
    assert digest_of("ok") in world.gate.store


async def test_a_form_that_is_cancelled_while_it_is_checked_is_told_so(world, client):
    bounded(world, lease_s=0.05)
    files = {"adapter_config": ("c", CONFIG), "adapter_model": ("m", b"hang")}
    form = asyncio.create_task(client.post("/v1/adapters", data={"name": "poet"}, files=files))

    async def checked() -> str | None:
        rows = (await client.get(PATH, params={"state": "validating"})).json()["data"]
        return rows[0]["id"] if rows else None

    upload = await world.until(checked)
    assert (await client.delete(f"{PATH}/{upload}")).json()["state"] == "cancelled"
    answer = await form
    assert (answer.status_code, "cancelled" in answer.text) == (409, True)
    assert list(world.settings.quarantine_dir.iterdir()) == []
