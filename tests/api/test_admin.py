"""Tenants, usage and lists: what an operator can do."""

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
