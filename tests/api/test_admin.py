"""Tenants, keys, usage and lists: what an operator and a tenant's admin can do."""

import pytest

pytestmark = pytest.mark.anyio


@pytest.fixture
async def operator(world):
    async with world.client("operator") as client:
        yield client


async def test_a_tenant_is_made_shown_changed_suspended_and_resumed(world, operator):
    made = await operator.post("/v1/tenants", json={"name": "initech", "max_concurrency": 4})
    assert made.status_code == 201
    tenant = made.json()
    assert tenant["id"].startswith("ten_")
    assert (tenant["max_concurrency"], tenant["tokens_per_minute"]) == (4, None)
    path = f"/v1/tenants/{tenant['id']}"
    changed = await operator.patch(path, json={"tokens_per_minute": 1000})
    assert (changed.json()["tokens_per_minute"], changed.json()["max_concurrency"]) == (1000, 4)
    freed = await operator.patch(path, json={"max_concurrency": None, "suspended": True})
    assert (freed.json()["max_concurrency"], freed.json()["suspended"]) == (None, True)
    resumed = await operator.patch(path, json={"suspended": False})
    assert resumed.json()["suspended"] is False
    assert (await operator.get(path)).json() == resumed.json() | {"service": None}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"name": "acme"}, 409, "name"),
        ({"name": "Not A Name"}, 400, "name"),
        ({}, 400, "name"),
        ({"name": "x", "max_concurrency": 0}, 400, "max_concurrency"),
        ({"name": "x", "tokens_per_minute": "many"}, 400, "tokens_per_minute"),
        ({"name": "x", "requests_per_minute": 10**9}, 400, "requests_per_minute"),
        ({"name": "x", "weight": 0}, 400, "weight"),
        ({"name": "x", "weight": None}, 400, "weight"),
        ({"name": "x", "max_running": 1.5}, 400, "max_running"),
        ({"name": "x", "kv_share": 1.5}, 400, "kv_share"),
        ({"name": "x", "color": "red"}, 400, "color"),
    ],
)
async def test_a_tenant_that_cannot_be_is_refused(operator, body, status, param):
    answer = await operator.post("/v1/tenants", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    if status == 409:
        assert answer.headers["x-should-retry"] == "false"


async def test_lists_come_in_pages_that_join_without_gap_or_overlap(world, operator):
    for i in range(5):
        await world.add_adapter("acme", f"adapter-{i}")
    for path, key in (("/v1/tenants", "operator"), ("/v1/keys", "operator")):
        await pages(world, path, key)
    assert await pages(world, "/v1/adapters", "acme") == [f"adapter-{i}" for i in range(5)]
    names = await pages(world, "/v1/models", "acme")
    assert names == ["tiny-base", *(f"adapter-{i}" for i in range(5))]


async def pages(world, path, key):
    """Ids of a list read two by two, checked against the whole."""
    async with world.client(key) as client:
        whole = (await client.get(path)).json()
        assert whole["object"] == "list"
        assert whole["has_more"] is False
        ids, more, params = [], True, {"limit": 2}
        while more:
            page = (await client.get(path, params=params)).json()
            assert 1 <= len(page["data"]) <= 2
            found = [item["id"] for item in page["data"]]
            assert (page["first_id"], page["last_id"]) == (found[0], found[-1])
            ids += found
            more, params = page["has_more"], params | {"after": page["last_id"]}
    assert ids == [item["id"] for item in whole["data"]]
    return ids


async def test_page_sizes_are_bounded(operator):
    for limit in (0, -1, 1001, "x"):
        answer = await operator.get("/v1/tenants", params={"limit": limit})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


async def test_a_keys_secret_is_told_once_and_works_until_it_is_revoked(world, operator):
    body = {
        "name": "ci",
        "scopes": ["infer"],
        "tenant_id": world.tenants["acme"],
        "expires_at": "2999-01-01T00:00:00Z",
    }
    made = (await operator.post("/v1/keys", json=body)).json()
    secret = made.pop("secret")
    assert made["redacted"].rstrip("…") == secret[:8]
    assert made["expires_at"] == 32472144000
    async with world.client(secret) as client:
        assert (await client.get("/v1/models")).status_code == 200
        listed = await operator.get("/v1/keys", params={"tenant_id": world.tenants["acme"]})
        assert secret not in listed.text
        assert made["id"] in [key["id"] for key in listed.json()["data"]]
        revoked = await operator.delete(f"/v1/keys/{made['id']}")
        assert revoked.json()["revoked_at"] is not None
        assert (await client.get("/v1/models")).status_code == 401


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
    ],
)
async def test_a_key_that_cannot_be_is_refused(world, operator, change, status, param):
    body = {"name": "ci", "scopes": ["infer"], "tenant_id": world.tenants["acme"], **change}
    answer = await operator.post("/v1/keys", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_a_tenants_admin_rules_its_own_keys_and_no_others(world):
    admin = await world.make_key(world.tenants["acme"], "admin", "infer")
    globex = world.tenants["globex"]
    async with world.client("operator") as client:
        foreign = (await client.get("/v1/keys", params={"tenant_id": globex})).json()["data"][0]
    async with world.client(admin) as client:
        made = await client.post("/v1/keys", json={"name": "mine", "scopes": ["infer"]})
        assert made.json()["tenant_id"] == world.tenants["acme"]
        listed = (await client.get("/v1/keys")).json()["data"]
        assert {key["tenant_id"] for key in listed} == {world.tenants["acme"]}
        body = {"name": "more", "scopes": ["adapters:write"]}
        assert (await client.post("/v1/keys", json=body)).status_code == 403
        body = {"name": "theirs", "scopes": ["infer"], "tenant_id": globex}
        assert (await client.post("/v1/keys", json=body)).status_code == 404
        assert (await client.get("/v1/keys", params={"tenant_id": globex})).status_code == 404
        assert (await client.delete(f"/v1/keys/{foreign['id']}")).status_code == 404
        assert (await client.get("/v1/tenants")).status_code == 403


async def test_usage_is_a_tenants_own_and_an_operator_sees_all(world, operator):
    for tenant in ("acme", "globex"):
        async with world.client(tenant) as client:
            body = {"model": "tiny-base", "prompt": "abc", "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
    own = (await world.usage_rows("acme"))[0]
    assert (own["requests"], own["total_tokens"]) == (1, 5)
    everyone = (await operator.get("/v1/usage", params={"group_by": "tenant"})).json()["data"]
    assert {row["tenant_id"] for row in everyone} == set(world.tenants.values())
    one = await operator.get("/v1/usage", params={"tenant_id": world.tenants["acme"]})
    assert [row["total_tokens"] for row in one.json()["data"]] == [5]
    async with world.client("acme") as client:
        foreign = await client.get("/v1/usage", params={"tenant_id": world.tenants["globex"]})
        bad = await client.get("/v1/usage", params={"group_by": "color"})
        none = await client.get("/v1/usage", params={"until": "2001-01-01"})
    assert foreign.status_code == 404
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "group_by.0")
    assert none.json()["data"] == []
