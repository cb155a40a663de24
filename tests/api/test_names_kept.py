"""What a name means is kept for a moment, and never longer than a change of it."""

import pytest

from loraplex.platform.api import target

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def still(world, monkeypatch):
    """The moment does not pass, however slow the machine is."""
    monkeypatch.setattr(world.app.state.context.names, "_clock", lambda: 0.0)


@pytest.fixture
def reads(monkeypatch):
    """The models that were looked up in the database."""
    found = []
    resolve = target.resolve

    async def counted(session, tenant_id, model, *more, **options):
        found.append(model)
        return await resolve(session, tenant_id, model, *more, **options)

    monkeypatch.setattr(target, "resolve", counted)
    return found


async def ask(world, model="poet", key="acme"):
    body = {"model": model, "prompt": "a", "max_tokens": 1}
    async with world.client(key) as client:
        answer = await client.post("/v1/completions", json=body)
    return answer.json().get("model", answer.status_code)


async def test_a_name_is_read_once_while_nothing_changes(world, reads):
    await world.add_adapter("acme", "poet")
    assert [await ask(world) for _ in range(3)] == ["poet@1"] * 3
    assert reads == ["poet"]


async def test_each_change_is_seen_by_the_next_request(world, reads):
    await world.add_adapter("acme", "poet")
    assert await ask(world) == "poet@1"
    await world.add_adapter("acme", "poet", "b" * 64)
    assert await ask(world) == "poet@2"
    async with world.client("acme") as client:
        await client.post("/v1/adapters/poet/versions/2/retire")
        assert await ask(world) == "poet@1"
        await client.delete("/v1/adapters/poet")
    assert await ask(world) == 404
    assert len(reads) == 4


async def test_a_name_is_kept_for_its_tenant_alone(world, reads):
    await world.add_adapter("acme", "poet")
    assert await ask(world) == "poet@1"
    assert await ask(world, key="globex") == 404


async def test_a_split_name_is_read_for_each_conversation(world, reads):
    await world.add_adapter("acme", "poet")
    await world.add_adapter("acme", "poet", "b" * 64)
    split = {"version": 1, "canary": {"version": 2, "percent": 50}, "revision": 0}
    async with world.client("acme") as client:
        assert (await client.put("/v1/adapters/poet/aliases/prod", json=split)).status_code == 200
    assert {await ask(world, "poet@prod") for _ in range(2)} <= {"poet@1", "poet@2"}
    assert reads == ["poet@prod"] * 2
