"""Users over the API: an operator's are all, a tenant admin's its own, and no secret comes back."""

import argon2
import pytest

from loraplex.platform import passwords
from loraplex.platform.sign_in import redeem, verify

pytestmark = pytest.mark.anyio
PASSWORD = "correct horse battery staple"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Argon2 with the least work."""
    cheap = argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    monkeypatch.setattr(passwords, "_HASHER", cheap)
    passwords._nobodys.cache_clear()


@pytest.fixture
async def operator(world):
    async with world.client("operator") as client:
        yield client


async def new_user(client, **body):
    answer = await client.post("/v1/users", json={"name": "ada", "role": "viewer"} | body)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_a_user_is_made_invited_changed_and_disabled(world, operator):
    peppers = world.app.state.context.keys.peppers
    user = await new_user(operator, tenant_id=world.tenants["acme"])
    assert (user["role"], user["has_password"], user["signed_in_at"]) == ("viewer", False, None)
    path = f"/v1/users/{user['id']}"
    invited = await operator.post(f"{path}/invitations", json={"lasts_s": 60})
    assert (invited.status_code, invited.json()["user_id"]) == (201, user["id"])
    assert (await redeem(world.db, peppers, invited.json()["secret"])).id == user["id"]
    answer = await operator.put(f"{path}/password", json={"password": PASSWORD})
    assert (answer.json()["has_password"], PASSWORD in answer.text) == (True, False)
    assert (await verify(world.db, "ada", PASSWORD)).id == user["id"]
    changed = await operator.patch(path, json={"role": "admin"})
    assert changed.json()["role"] == "admin"
    disabled = (await operator.patch(path, json={"disabled": True})).json()
    assert disabled["disabled_at"] is not None
    assert await verify(world.db, "ada", PASSWORD) is None
    assert (await operator.post(f"{path}/invitations", json={})).status_code == 409
    enabled = (await operator.patch(path, json={"disabled": False})).json()
    assert enabled == (await operator.get(path)).json()
    listed = await operator.get("/v1/users", params={"tenant_id": world.tenants["acme"]})
    assert listed.json()["data"] == [enabled]
    assert "$argon2" not in listed.text


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"name": "No Spaces", "role": "viewer"}, 400, "name"),
        ({"name": "ada", "role": "root"}, 400, "role"),
        ({"name": "ada", "role": "viewer", "tenant_id": None}, 400, "role"),
        ({"name": "ada", "role": "operator"}, 400, "role"),
        ({"name": "ada", "role": "viewer", "tenant_id": "ten_nobody"}, 404, None),
        ({"name": "taken", "role": "viewer"}, 409, "name"),
        ({"name": "ada", "role": "viewer", "password": "x"}, 400, "password"),
    ],
)
async def test_a_user_that_cannot_be_is_refused(world, operator, body, status, param):
    acme = {"tenant_id": world.tenants["acme"]}
    await new_user(operator, name="taken", **acme)
    answer = await operator.post("/v1/users", json=acme | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_a_password_is_refused_without_being_repeated(world, operator):
    user = await new_user(operator, tenant_id=world.tenants["acme"])
    for bad in ("too short", "x" * 257, 123456789012345, None):
        path = f"/v1/users/{user['id']}/password"
        answer = await operator.put(path, json={"password": bad})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "password")
        assert str(bad) not in answer.text


async def test_a_tenants_admin_rules_its_own_users_and_makes_no_operator(world, operator):
    root = await new_user(operator, name="root", role="operator")
    theirs = await new_user(operator, name="theirs", tenant_id=world.tenants["globex"])
    async with world.client("acme") as client:
        mine = await new_user(client, name="ada@acme", role="admin")
        assert mine["tenant_id"] == world.tenants["acme"]
        assert (await client.get("/v1/users")).json()["data"] == [mine]
        body = {"name": "boss", "role": "operator"}
        assert (await client.post("/v1/users", json=body)).status_code == 403
        path = f"/v1/users/{mine['id']}"
        assert (await client.patch(path, json={"role": "operator"})).status_code == 403
        foreign = {"tenant_id": world.tenants["globex"]}
        body = {"name": "spy", "role": "viewer"} | foreign
        assert (await client.post("/v1/users", json=body)).status_code == 404
        assert (await client.get("/v1/users", params=foreign)).status_code == 404
        for user in (root, theirs):
            path = f"/v1/users/{user['id']}"
            for answer in (
                await client.get(path),
                await client.patch(path, json={"disabled": True}),
                await client.put(f"{path}/password", json={"password": PASSWORD}),
                await client.post(f"{path}/invitations", json={}),
            ):
                assert answer.status_code == 404


async def test_a_taken_name_tells_a_tenant_of_no_other(world, operator):
    """Names are unique among all; but an admin asks only for those that no other tenant has."""
    for name in ("root", "spy@globex", "acme", "eve@acme.globex"):
        await new_user(operator, name=name, tenant_id=world.tenants["globex"])
    async with world.client("acme") as client:
        said = set()
        for name in ("root", "free", "spy@globex", "free@globex", "acme", "eve@acme.globex"):
            answer = await client.post("/v1/users", json={"name": name, "role": "viewer"})
            said.add((answer.status_code, answer.json()["error"]["message"]))
        assert said == {(400, "The name has to end in '@acme': only an operator gives others.")}
        body = {"name": "eve@acme", "role": "viewer"}
        answers = [await client.post("/v1/users", json=body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 409]


async def test_nobody_signs_in_as_more_than_they_are(world, operator):
    """An admin's key without the other scopes makes, and becomes, no full admin."""
    admin = await new_user(operator, role="admin", tenant_id=world.tenants["acme"])
    viewer = await new_user(operator, name="vera", tenant_id=world.tenants["acme"])
    secret = await world.make_key(world.tenants["acme"], "admin", "adapters:read")
    async with world.client(secret) as client:
        await new_user(client, name="another@acme")
        path = f"/v1/users/{admin['id']}"
        for answer in (
            await client.post("/v1/users", json={"name": "boss", "role": "admin"}),
            await client.patch(f"/v1/users/{viewer['id']}", json={"role": "admin"}),
            await client.put(f"{path}/password", json={"password": PASSWORD}),
            await client.post(f"{path}/invitations", json={}),
        ):
            assert answer.status_code == 403
        assert (await client.patch(path, json={"disabled": True})).status_code == 200
