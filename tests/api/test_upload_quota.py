"""How much a tenant may have on its way: uploads, their bytes, and what it keeps already."""

import pytest
from upload_kit import CONFIG, PATH, at, begin, bounded, digest_of, finish

from loraplex.platform.quotas import TenantLimits

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client(world):
    async with world.client("acme", timeout=60) as opened:
        yield opened


async def test_only_so_many_are_open_at_once(world, client):
    bounded(world, max_open=2)
    uploads = [await begin(client) for _ in range(2)]
    files = {"adapter_config": ("c", CONFIG), "adapter_model": ("m", b"ok")}
    for sent in ({"json": {"name": "poet"}}, {"data": {"name": "poet"}, "files": files}):
        path = PATH if "json" in sent else "/v1/adapters"
        refused = await client.post(path, **sent)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "insufficient_quota"
    await client.delete(f"{PATH}/{uploads[0]}")
    await finish(client, uploads[1])
    assert (await client.post(PATH, json={"name": "poet"})).status_code == 201


async def test_bytes_on_their_way_count_against_the_storage_told_or_not(world):
    await world.add_tenant("small", TenantLimits(storage_bytes=100))
    async with world.client("small", timeout=60) as client:
        over = await client.post(PATH, json={"name": "poet", "sizes": {"adapter_model": 101}})
        assert (over.status_code, over.json()["error"]["code"]) == (429, "insufficient_quota")
        await client.post(PATH, json={"name": "poet", "sizes": {"adapter_model": 60}})
        second = (await client.post(PATH, json={"name": "poet"})).json()["id"]
        part = f"{PATH}/{second}/parts/archive"
        over = await client.put(part, content=b"x" * 41, headers=at(0))
        assert over.status_code == 429
        fits = await client.put(part, content=b"x" * 40, headers=at(0))
        assert fits.status_code == 200
        files = {"adapter_config": ("c", CONFIG), "adapter_model": ("m", b"ok")}
        form = await client.post("/v1/adapters", data={"name": "poet"}, files=files)
        assert form.status_code == 429


async def test_storage_that_is_used_up_is_said_first_and_a_version_never_exceeds_it(world):
    await world.add_tenant("tiny", TenantLimits(storage_bytes=20))
    async with world.client("tiny", timeout=60) as client:
        wide = await finish(client, await begin(client, b"abcdefgh", b"{}"))
        assert wide["state"] == "ready"  # 20 bytes
        full = await client.post(PATH, json={"name": "poet"})
        assert full.status_code == 429
        assert "storage_bytes is 20" in full.json()["error"]["message"]
        await client.delete("/v1/adapters/poet")
        done = await finish(client, await begin(client, b"abcdefghi", b"{}"))  # 21 bytes
    assert (done["state"], done["reasons"][0]["code"]) == ("rejected", "insufficient_quota")
    assert done["checks"][-1]["name"] == "published"
    assert digest_of("abcdefghi") not in world.gate.store
