"""What /v1/storage tells to whom, and the operator's collection."""

import os
import time
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from loraplex.platform.db.models import AdapterVersion
from loraplex.platform.image_sweeps import TURN, ImageSweeps
from loraplex.platform.images_kept import UNNAMED_S
from loraplex.platform.quotas import TenantLimits

pytestmark = pytest.mark.anyio
PATH = "/v1/storage"


async def upload(world, tenant, name, weights):
    files = {"adapter_config": ("c", b'{"r": 8}'), "adapter_model": ("m", weights)}
    async with world.client(tenant, timeout=60) as client:
        return await client.post("/v1/adapters", data={"name": name}, files=files)


def age(world, digest):
    """Let an image have been in the store for a long time."""
    path = world.gate.store.fetch(digest, world.settings.image_cache)
    moment = time.time() - 2 * UNNAMED_S
    os.utime(path, (moment, moment))


async def test_a_tenant_sees_its_own_and_its_limits(world):
    tenant_id = await world.add_tenant("kept", TenantLimits(storage_bytes=1000, max_adapters=2))
    await upload(world, "kept", "poet", b"4")
    async with world.client("kept") as client:
        got = (await client.get(PATH)).json()
        foreign = await client.get(PATH, params={"tenant_id": world.tenants["acme"]})
    assert got["data"] == [
        {
            "id": tenant_id,
            "object": "storage",
            "name": "kept",
            "bytes": len(b"an image of 4"),
            "images": 1,
            "adapters": 1,
            "storage_bytes": 1000,
            "max_adapters": 2,
        }
    ]
    assert got["store"] is None
    assert foreign.status_code == 404


async def test_an_operator_sees_all_page_by_page_and_the_store(world):
    for tenant in ("acme", "globex"):
        assert (await upload(world, tenant, "poet", b"4")).status_code == 201
    async with world.client("operator") as client:
        first = (await client.get(PATH, params={"limit": 1})).json()
        second = (await client.get(PATH, params={"after": first["last_id"]})).json()
        one = await client.get(PATH, params={"tenant_id": world.tenants["acme"]})
        nobody = await client.get(PATH, params={"tenant_id": "ten_nobody"})
    assert first["has_more"]
    assert {row["name"] for row in first["data"] + second["data"]} == {"acme", "globex"}
    assert first["store"] == {"images": 1, "bytes": len(b"an image of 4"), "parts": 0}
    assert [row["name"] for row in one.json()["data"]] == ["acme"]
    assert nobody.status_code == 404


async def test_a_quota_refuses_an_upload_and_keeps_nothing_of_it(world):
    await world.add_tenant("full", TenantLimits(max_adapters=1))
    first = await upload(world, "full", "poet", b"4")
    answer = await upload(world, "full", "bard", b"5")
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert error["code"] == "insufficient_quota"
    assert "max_adapters is 1, and 1 are there" in error["message"]
    assert [file.digest for file in world.gate.store.files()] == [first.json()["digest"]]
    assert (await upload(world, "full", "poet", b"5")).status_code == 201


async def test_an_operator_collects_what_nobody_needs(world):
    digest = (await upload(world, "acme", "poet", b"4")).json()["digest"]
    async with world.client("operator") as client:
        assert (await client.post(f"{PATH}/collect", json={})).json()["images"] == 0
        source = world.settings.data_dir / "image"
        source.write_bytes(b"12345")
        world.gate.store.put(source, "ab" * 32)
        for each in (digest, "ab" * 32):
            age(world, each)
        assert (await client.post(f"{PATH}/collect", json={})).json()["images"] == 0
        wanted = {"unnamed": True}
        would = (await client.post(f"{PATH}/collect", json=wanted | {"dry_run": True})).json()
        assert would == {
            "object": "storage.collected",
            "dry_run": True,
            "images": 1,
            "parts": 0,
            "bytes": 5,
            "digests": ["ab" * 32],
        }
        assert "ab" * 32 in world.gate.store
        did = (await client.post(f"{PATH}/collect", json=wanted)).json()
        assert did == would | {"dry_run": False}
        assert [file.digest for file in world.gate.store.files()] == [digest]
        entries = await client.get("/v1/audit", params={"action": "storage.collected"})
        assert entries.json()["data"][0]["details"] == {"images": 1, "parts": 0, "bytes": 5}
    async with world.client("acme") as client:
        assert (await client.post(f"{PATH}/collect", json={})).status_code == 403


async def test_of_several_servers_one_clears_the_store_and_each_its_cache(world, redis):
    await redis.delete(TURN)
    settings = world.settings.model_copy(update={"image_cache_bytes": 0})
    cached = settings.image_cache / f"{'cd' * 32}.safetensors"
    settings.image_cache.mkdir(parents=True)
    source = world.settings.data_dir / "image"
    source.write_bytes(b"12345")
    gone = []
    for digest in ("ab" * 32, "ef" * 32):
        world.gate.store.put(source, digest)
        age(world, digest)
        await world.add_adapter("acme", "gone", digest)
        async with world.db.session(None) as session:
            long_ago = datetime.now(UTC) - timedelta(days=1)
            await session.execute(update(AdapterVersion).values(deleted_at=long_ago))
        cached.write_bytes(b"1")
        os.utime(cached, (1, 1))
        await ImageSweeps(settings, world.db, world.gate.store, redis).sweep()
        gone.append(digest not in world.gate.store)
        assert not cached.exists()
    assert gone == [True, False]  # the second one came within the first one's minute
