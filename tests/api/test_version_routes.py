"""The life of versions over HTTP, images by dtype, bases, and what is compiled for another one."""

import asyncio

import pytest

from loraplex.engine.images import BaseManifest
from loraplex.platform import bases, registry
from loraplex.platform.audit import SYSTEM

pytestmark = pytest.mark.anyio
VERSIONS = "/v1/adapters/poet/versions"


@pytest.fixture
async def client(world):
    for digest in "abc":
        await world.add_adapter("acme", "poet", digest * 64)
    async with world.client("acme") as client:
        yield client


async def means(client, model):
    """The immutable id of what answers for `model`, None for nothing."""
    body = {"model": model, "prompt": "a", "max_tokens": 1}
    answer = await client.post("/v1/completions", json=body)
    return answer.json()["model"] if answer.status_code == 200 else None


async def test_versions_are_listed_the_newest_first(client):
    found, params = [], {"limit": 2}
    while True:
        page = (await client.get(VERSIONS, params=params)).json()
        found += [(each["id"], each["digest"][0]) for each in page["data"]]
        if not page["has_more"]:
            break
        params["after"] = page["last_id"]
    assert found == [("poet@3", "c"), ("poet@2", "b"), ("poet@1", "a")]
    one = (await client.get(f"{VERSIONS}/2")).json()
    assert one == (await client.get(VERSIONS, params={"after": "3"})).json()["data"][0]
    assert (one["dtype"], one["variants"], one["retired_at"]) == ("bf16", [], None)
    assert one["report"] == {"rank": 8, "bytes": 1000}
    for path, status in (("9", 404), ("0", 400), ("x", 400), ("99999999999", 400)):
        assert (await client.get(f"{VERSIONS}/{path}")).status_code == status
    assert (await client.get(VERSIONS, params={"after": "@x"})).status_code == 400


async def test_a_retired_version_is_skipped_until_it_is_restored(client):
    retired = (await client.post(f"{VERSIONS}/3/retire")).json()
    assert retired["retired_at"] is not None
    assert (await client.post(f"{VERSIONS}/3/retire")).json() == retired
    assert await means(client, "poet") == "poet@2"
    assert await means(client, "poet@3") == "poet@3"
    assert (await client.get("/v1/adapters/poet")).json()["version"] == 2
    assert (await client.post(f"{VERSIONS}/3/restore")).json()["retired_at"] is None
    assert await means(client, "poet") == "poet@3"
    for number in (1, 2, 3):
        await client.post(f"{VERSIONS}/{number}/retire")
    assert await means(client, "poet") is None
    shown = (await client.get("/v1/adapters/poet")).json()
    assert (shown["version"], shown["digest"]) == (None, None)
    assert [each["id"] for each in (await client.get("/v1/models")).json()["data"]] == ["tiny-base"]


async def test_a_version_is_deleted_unless_an_alias_is_at_it(client):
    await client.put("/v1/adapters/poet/aliases/prod", json={"version": 2, "revision": 0})
    refused = await client.delete(f"{VERSIONS}/2")
    assert (refused.status_code, refused.headers["x-should-retry"]) == (409, "false")
    assert "poet@prod" in refused.json()["error"]["message"]
    deleted = await client.delete(f"{VERSIONS}/3")
    assert deleted.json() == {"id": "poet@3", "object": "adapter.version", "deleted": True}
    assert (await client.delete(f"{VERSIONS}/3")).status_code == 404
    assert await means(client, "poet@3") is None
    assert await means(client, "poet") == "poet@2"


async def test_a_request_in_flight_outlives_its_version(world, client):
    tap = world.tap(1)
    body = {"model": "poet@3", "prompt": "a", "max_tokens": 3}
    running = asyncio.create_task(client.post("/v1/completions", json=body))
    await world.until(lambda: world.engine.requests)
    assert (await client.delete(f"{VERSIONS}/3")).status_code == 200
    for _ in range(2):
        tap.release()
    assert (await running).json()["model"] == "poet@3"


async def test_another_dtypes_image_answers_where_it_is_named(world, client):
    async with world.db.session(world.tenants["acme"]) as session:
        await registry.add_version(
            session,
            world.tenants["acme"],
            "poet",
            digest="d" * 64,
            base=world.base.fingerprint,
            base_name=world.base.name,
            report={"rank": 8, "bytes": 1000},
            actor=SYSTEM,
            variants={"int8": ("e" * 64, 500)},
        )
    assert await means(client, "poet:int8") == "poet@4:int8"
    assert world.engine.requests[-1].image == "e" * 64
    assert await means(client, "poet") == "poet@4"
    assert world.engine.requests[-1].image == "d" * 64
    assert await means(client, "poet@3:int8") is None
    told = (await client.get(f"{VERSIONS}/4")).json()
    assert told["variants"] == [{"dtype": "int8", "digest": "e" * 64, "bytes": 500}]
    body = {"model": "poet:int8", "adapter_id": "poet@3", "prompt": "a"}
    assert (await client.post("/v1/completions", json=body)).status_code == 400


async def test_a_base_is_listed_with_what_was_made_for_it(world, client):
    older = BaseManifest(
        name="older",
        path="",
        fingerprint="1" * 64,
        num_layers=1,
        hidden_size=8,
        vocab_size=9,
        max_position_embeddings=16,
        eos_token_ids=(0,),
        modules={},
    )
    async with world.db.session(None) as session:
        for base, variant in ((world.base, "bfloat16"), (older, "int8"), (older, "int8")):
            await bases.note_served(session, base, variant)
        await registry.add_version(
            session,
            world.tenants["globex"],
            "old",
            digest="f" * 64,
            base=older.fingerprint,
            base_name=older.name,
            report={"rank": 8, "bytes": 1000},
            actor=SYSTEM,
        )
    for key, versions in (("acme", [3, 0]), ("globex", [0, 1]), ("operator", [3, 1])):
        async with world.client(key) as caller:
            rows = (await caller.get("/v1/bases")).json()["data"]
            assert [(row["variant"], row["serving"]) for row in rows] == [
                ("bfloat16", True),
                ("int8", False),
            ]
            assert [row["versions"] for row in rows] == versions
            page = (await caller.get("/v1/bases", params={"after": rows[0]["id"]})).json()
            assert page["data"] == rows[1:]
    async with world.client("globex") as caller:
        stale = (await caller.get("/v1/bases/stale")).json()["data"]
        assert [(each["id"], each["base"]) for each in stale] == [("old@1", "1" * 64)]
        rest = await caller.get("/v1/bases/stale", params={"after": "old@1"})
        assert rest.json()["data"] == []
    assert (await client.get("/v1/bases/stale")).json()["data"] == []
