"""Adapters that tenants let each other use: found, run, charged and taken back over HTTP."""

import pytest

pytestmark = pytest.mark.anyio
POET = "/v1/adapters/poet"


@pytest.fixture(autouse=True)
async def poet(world):
    """acme's `poet`, which nobody else may use yet."""
    await world.add_adapter("acme", "poet", "a" * 64)


async def change(world, **changes):
    async with world.client("acme") as owner:
        return await owner.patch(POET, json=changes)


async def complete(world, tenant, model="acme/poet"):
    async with world.client(tenant) as client:
        body = {"model": model, "prompt": "a", "max_tokens": 1}
        return await client.post("/v1/completions", json=body)


async def models(world, key, **params):
    async with world.client(key) as client:
        return (await client.get("/v1/models", params=params)).json()


async def test_an_adapter_is_described_and_limited_by_its_owner(world):
    changes = {"description": "in verse", "requests_per_minute": 5, "tokens_per_day": 100}
    changed = await change(world, **changes)
    assert changed.status_code == 200
    told = changed.json()
    assert changes.items() <= told.items()
    assert (told["visibility"], told["shared_with"]) == ("private", [])
    assert (told["version"], told["digest"], told["rank"]) == (1, "a" * 64, 8)
    again = (await change(world, requests_per_minute=None)).json()
    assert (again["requests_per_minute"], again["description"]) == (None, "in verse")
    async with world.client("acme") as owner:
        assert (await owner.get(POET)).json() == again
        assert (await owner.get("/v1/adapters")).json()["data"] == [again]


async def test_a_shared_adapter_runs_and_its_caller_is_charged(world):
    assert (await complete(world, "globex")).status_code == 404
    shared = await change(world, visibility="shared", shared_with=["globex"])
    assert shared.json()["shared_with"] == [world.tenants["globex"]]
    answer = await complete(world, "globex")
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "acme/poet@1"
    assert answer.headers["x-loraplex-adapter"] == "acme/poet"
    assert world.engine.requests[-1].image == "a" * 64
    assert world.engine.requests[-1].tenant == world.tenants["globex"]
    rows = {row["adapter"]: row["requests"] for row in await world.usage_rows("globex")}
    assert rows == {"acme/poet": 1}
    assert await world.usage_rows("acme") == []
    async with world.client("acme") as owner:
        uses = (await owner.get(f"{POET}/usage")).json()["data"]
    assert [(use["tenant"], use["requests"]) for use in uses] == [("globex", 1)]
    assert uses[0]["id"] == world.tenants["globex"]


async def test_what_is_taken_back_is_gone_with_the_next_request(world):
    await change(world, visibility="public")
    assert (await complete(world, "globex")).status_code == 200
    await change(world, visibility="private")
    refused = await complete(world, "globex")
    absent = await complete(world, "globex", "acme/none")
    assert refused.status_code == absent.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    assert refused.text.replace("poet", "none") == absent.text


async def test_a_caller_cannot_look_into_or_change_what_is_shared_with_it(world):
    await change(world, visibility="public")
    calls = [
        ("GET", POET),
        ("PATCH", POET),
        ("DELETE", POET),
        ("GET", f"{POET}/usage"),
        ("GET", f"{POET}/versions"),
        ("GET", f"{POET}/versions/1"),
        ("POST", f"{POET}/versions/1/retire"),
        ("DELETE", f"{POET}/versions/1"),
        ("PUT", f"{POET}/aliases/prod"),
    ]
    async with world.client("globex") as caller:
        for method, path in calls:
            body = {"version": 1, "revision": 0} if method == "PUT" else {}
            options = {"json": body} if method in ("PUT", "PATCH") else {}
            answer = await caller.request(method, path, **options)
            assert answer.status_code == 404, (method, path)
    assert (await complete(world, "acme", "poet")).status_code == 200


async def test_models_are_the_base_ones_own_and_others(world):
    await world.add_adapter("globex", "b")
    await change(world, visibility="public")
    listed = (await models(world, "globex"))["data"]
    assert [(each["id"], each["owned_by"]) for each in listed] == [
        ("tiny-base", "loraplex"),
        ("b", "tenant"),
        ("acme/poet", "acme"),
    ]
    found, params = [], {"limit": 1}
    while True:
        page = await models(world, "globex", **params)
        found += [each["id"] for each in page["data"]]
        if not page["has_more"]:
            break
        params["after"] = page["last_id"]
    assert found == ["tiny-base", "b", "acme/poet"]
    async with world.client("globex") as client:
        one = (await client.get("/v1/models/acme/poet@1")).json()
        assert (one["id"], one["owned_by"]) == ("acme/poet@1", "acme")
        assert (await client.get("/v1/models/acme/none")).status_code == 404


async def test_a_key_for_some_adapters_sees_and_uses_those_alone(world):
    await world.add_adapter("globex", "b")
    await world.add_adapter("globex", "c")
    await change(world, visibility="public")
    tenant = world.tenants["globex"]
    key = await world.make_key(tenant, "infer", adapters=["b", "acme/poet"])
    assert [each["id"] for each in (await models(world, key))["data"]] == ["b", "acme/poet"]
    for model, status in (("b", 200), ("acme/poet", 200), ("c", 404), ("tiny-base", 404)):
        assert (await complete(world, key, model)).status_code == status, model


async def test_cached_prompts_of_public_adapters_are_shared_only_if_the_operator_says_so(world):
    async def scopes():
        for tenant, model in (("acme", "poet"), ("globex", "acme/poet")):
            assert (await complete(world, tenant, model)).status_code == 200
        return {request.scope for request in world.engine.requests[-2:]}

    await change(world, visibility="public")
    assert len(await scopes()) == 2
    world.app.state.context.scopes._share_public = True
    assert len(await scopes()) == 1
    await change(world, visibility="shared", shared_with=["globex"])
    assert len(await scopes()) == 2


async def test_a_composition_may_have_a_shared_part_and_holds_to_its_limits(world):
    await world.add_adapter("globex", "b", "b" * 64)
    parts = [{"id": "b"}, {"id": "acme/poet", "weight": 0.5}]
    body = {"model": "tiny-base", "prompt": "a", "max_tokens": 1, "adapters": parts}
    async with world.client("globex") as client:
        refused = await client.post("/v1/completions", json=body)
        assert refused.json()["error"]["param"] == "adapters.1.id"
        await change(world, visibility="public", requests_per_minute=1)
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        limited = await client.post("/v1/completions", json=body)
    assert limited.status_code == 429, limited.text


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"visibility": "secret"}, 400, "visibility"),
        ({"visibility": None}, 400, "visibility"),
        ({"shared_with": ["nobody"]}, 404, "shared_with"),
        ({"shared_with": ["acme"]}, 400, "shared_with"),
        ({"requests_per_minute": 0}, 400, "requests_per_minute"),
        ({"description": "x" * 501}, 400, "description"),
        ({"name": "other"}, 400, "name"),
    ],
)
async def test_a_change_that_cannot_be_is_refused(world, changes, status, param):
    answer = await change(world, **changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
