"""Keys over the API: secrets told once, what a key may use, rotation, and who may grant what."""

from dataclasses import replace

import pytest

from loraplex.platform.key_cache import KeyCache
from loraplex.platform.keys import KeyRing

pytestmark = pytest.mark.anyio
PROMPT = {"prompt": "a", "max_tokens": 1}


@pytest.fixture
async def operator(world):
    async with world.client("operator") as client:
        yield client


async def new_key(client, **body):
    """A key that was made, and its secret apart."""
    answer = await client.post("/v1/keys", json={"name": "ci", "scopes": ["infer"]} | body)
    assert answer.status_code == 201, answer.text
    made = answer.json()
    return made, made.pop("secret")


async def status(world, secret, path="/v1/models"):
    async with world.client(secret) as client:
        return (await client.get(path)).status_code


async def test_a_keys_secret_is_told_once_and_works_until_it_is_revoked(world, operator):
    terms = {"tenant_id": world.tenants["acme"], "expires_at": "2999-01-01T00:00:00Z"}
    made, secret = await new_key(operator, **terms)
    assert made["redacted"].rstrip("…") == secret[:8]
    assert made["expires_at"] == 32472144000
    assert await status(world, secret) == 200
    path = f"/v1/keys/{made['id']}"
    listed = await operator.get("/v1/keys", params={"tenant_id": world.tenants["acme"]})
    assert secret not in listed.text
    assert made["id"] in [key["id"] for key in listed.json()["data"]]
    shown = await operator.get(path)
    assert secret not in shown.text
    assert shown.json()["last_used_at"] >= made["created_at"]
    revoked = (await operator.delete(path)).json()
    assert revoked["revoked_at"] is not None
    assert (await operator.delete(path)).json() == revoked
    assert await status(world, secret) == 401
    assert (await operator.patch(path, json={"name": "again"})).status_code == 409
    assert (await operator.post(f"{path}/rotate", json={})).status_code == 409


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"scopes": []}, 400, "scopes"),
        ({"scopes": ["everything"]}, 400, "scopes"),
        ({"name": ""}, 400, "name"),
        ({"expires_at": "2001-01-01T00:00:00Z"}, 400, "expires_at"),
        ({"expires_at": "2999-01-01T00:00:00"}, 400, "expires_at"),
        ({"expires_at": "soon"}, 400, "expires_at"),
        ({"tenant_id": "ten_nobody"}, 404, None),
        ({"tenant_id": None}, 400, "scopes"),  # an operator's key cannot infer
        ({"adapters": []}, 400, "adapters"),
        ({"adapters": ["support@2"]}, 400, "adapters"),
        ({"adapters": ["support"], "scopes": ["infer", "admin"]}, 400, "adapters"),
        ({"adapters": ["a"], "scopes": ["adapters:write"], "tenant_id": None}, 400, "adapters"),
        ({"tokens_per_day": 0}, 400, "tokens_per_day"),
        ({"weight": 2}, 400, "weight"),  # a tenant's limit, not a key's
    ],
)
async def test_a_key_that_cannot_be_is_refused(world, operator, change, status, param):
    body = {"name": "ci", "scopes": ["infer"], "tenant_id": world.tenants["acme"], **change}
    answer = await operator.post("/v1/keys", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_a_key_is_changed_in_what_is_given(world):
    async with world.client("acme") as client:
        made, _ = await new_key(client, requests_per_minute=60, adapters=["support"])
        path = f"/v1/keys/{made['id']}"
        changed = (await client.patch(path, json={"name": "desk", "adapters": None})).json()
        assert changed == made | {"name": "desk", "adapters": None}
        assert (await client.patch(path, json={})).json() == changed
        assert (await client.patch(path, json={"name": None})).json() == changed
        freed = (await client.patch(path, json={"requests_per_minute": None})).json()
        assert freed == changed | {"requests_per_minute": None}
        dated = await client.patch(path, json={"expires_at": "2999-01-01T00:00:00+01:00"})
        assert dated.json()["expires_at"] == 32472140400
        for bad in ({"scopes": ["admin"]}, {"tenant_id": None}, {"expires_at": 5}, {"name": ""}):
            assert (await client.patch(path, json=bad)).status_code == 400


async def test_a_key_that_is_bound_uses_its_adapters_and_no_others(world):
    for name in ("support", "poet"):
        await world.add_adapter("acme", name)
    part = {"id": "support", "weight": 1.0}
    asked = {
        "support": [{"model": "support"}, {"model": "support@1"}],
        "poet": [
            {"model": "poet"},
            {"model": "poet@1"},
            {"model": "tiny-base", "adapter_id": "poet"},
        ],
        "base": [{"model": "tiny-base"}],
        "none": [{"model": "never-made"}],
        "on the base": [{"model": "tiny-base", "adapter_id": "support"}],
        "composed": [{"model": "tiny-base", "adapters": [part]}],
        "composed of two": [{"model": "tiny-base", "adapters": [part, {"id": "poet"}]}],
    }
    allowed = {
        ("support",): {"support", "on the base", "composed"},
        ("tiny-base",): {"base"},
        ("never-made", "globex/support"): set(),
    }
    for adapters, works in allowed.items():
        terms = {"adapters": list(adapters)}
        secret = await world.make_key(world.tenants["acme"], "infer", **terms)
        async with world.client(secret) as client:
            for name, bodies in asked.items():
                for body in bodies:
                    answer = await client.post("/v1/completions", json=body | PROMPT)
                    expected = 200 if name in works else 404
                    assert answer.status_code == expected, (adapters, body, answer.text)
                    if expected == 404:
                        assert answer.json()["error"]["code"] == "model_not_found"
            listed = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
            assert set(listed) <= {*adapters}
            assert ("support" in listed) == ("support" in adapters)
            assert (await client.get("/v1/models/poet")).status_code == 404


async def test_what_is_forbidden_to_a_key_looks_like_what_is_not_there(world):
    await world.add_adapter("acme", "poet")
    secret = await world.make_key(world.tenants["acme"], "infer", adapters=["support"])
    async with world.client(secret) as client:
        told = [
            (await client.post("/v1/completions", json={"model": name} | PROMPT)).text
            for name in ("poet", "nope")
        ]
    assert told[0] == told[1].replace("nope", "poet")


async def test_a_rotated_key_and_its_successor_work_together_until_the_overlap_ends(world):
    async with world.client("acme") as client:
        limits = {"max_concurrency": 3, "tokens_per_month": 1000}
        old, old_secret = await new_key(client, adapters=["tiny-base"], **limits)
        answer = await client.post(f"/v1/keys/{old['id']}/rotate", json={"overlap_s": 3600})
        assert answer.status_code == 201
        new = answer.json()
        new_secret = new.pop("secret")
        same = {"rotated_from", "id", "redacted", "created_at", "last_used_at"}
        assert {k: v for k, v in new.items() if k not in same} == {
            k: v for k, v in old.items() if k not in same
        }
        assert new["rotated_from"] == old["id"]
        assert [await status(world, secret) for secret in (old_secret, new_secret)] == [200, 200]
        shown = (await client.get(f"/v1/keys/{old['id']}")).json()
        assert 3500 < shown["expires_at"] - new["created_at"] <= 3600
        again = await client.post(f"/v1/keys/{old['id']}/rotate", json={"overlap_s": 0})
        assert (again.status_code, new["id"] in again.text) == (409, True)
        last = await client.post(f"/v1/keys/{new['id']}/rotate", json={"overlap_s": 0})
        assert await status(world, new_secret) == 401
        assert await status(world, last.json()["secret"]) == 200
        for bad in (-1, 2_592_001, 1.5, "1", None):
            answer = await client.post(f"/v1/keys/{new['id']}/rotate", json={"overlap_s": bad})
            assert answer.status_code == 400


async def test_nobody_is_given_more_than_the_giver_has(world, operator):
    acme, globex = world.tenants["acme"], world.tenants["globex"]
    strong, _ = await new_key(operator, tenant_id=acme, scopes=["adapters:write"])
    foreign = (await operator.get("/v1/keys", params={"tenant_id": globex})).json()["data"][0]
    async with world.client(await world.make_key(acme, "admin", "infer")) as client:
        mine, _ = await new_key(client)
        assert mine["tenant_id"] == acme
        listed = (await client.get("/v1/keys")).json()["data"]
        assert {key["tenant_id"] for key in listed} == {acme}
        body = {"name": "more", "scopes": ["adapters:write"]}
        assert (await client.post("/v1/keys", json=body)).status_code == 403
        path = f"/v1/keys/{strong['id']}"
        assert (await client.post(f"{path}/rotate", json={})).status_code == 403
        assert (await client.delete(path)).status_code == 200
        body = {"name": "theirs", "scopes": ["infer"], "tenant_id": globex}
        assert (await client.post("/v1/keys", json=body)).status_code == 404
        assert (await client.get("/v1/keys", params={"tenant_id": globex})).status_code == 404
        path = f"/v1/keys/{foreign['id']}"
        for answer in (
            await client.get(path),
            await client.patch(path, json={"name": "x"}),
            await client.post(f"{path}/rotate", json={}),
            await client.delete(path),
        ):
            assert answer.status_code == 404


async def test_the_server_that_revokes_or_changes_a_key_heeds_it_at_once(world):
    """With the cache of a real server, whose clock stands still here."""
    ring = KeyRing(b"a pepper for tests", cache=KeyCache(clock=lambda: 0.0))
    world.app.state.context = replace(world.app.state.context, keys=ring)
    async with world.client("acme") as admin:
        made, secret = await new_key(admin)
        path = f"/v1/keys/{made['id']}"
        async with world.client(secret) as client:
            base = {"model": "tiny-base"} | PROMPT
            assert (await client.post("/v1/completions", json=base)).status_code == 200
            await admin.patch(path, json={"adapters": ["other"]})
            assert (await client.post("/v1/completions", json=base)).status_code == 404
            await admin.delete(path)
            assert (await client.post("/v1/completions", json=base)).status_code == 401


async def test_suspending_a_tenant_is_heeded_at_once_by_the_server_that_does_it(world, operator):
    ring = KeyRing(b"a pepper for tests", cache=KeyCache(clock=lambda: 0.0))
    world.app.state.context = replace(world.app.state.context, keys=ring)
    assert await status(world, "acme") == 200
    path = f"/v1/tenants/{world.tenants['acme']}"
    await operator.patch(path, json={"suspended": True})
    assert await status(world, "acme") == 403
    await operator.patch(path, json={"suspended": False})
    assert await status(world, "acme") == 200
