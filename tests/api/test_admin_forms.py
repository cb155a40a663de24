"""Every form of the admin pages, filled with what no browser would send: never a fault of ours."""

import re

import pytest
from sqlalchemy import select
from visitors import ADMIN, OPERATOR, visitor

from loraplex.platform.admin.screens import SCREENS
from loraplex.platform.db.models import Adapter, ApiKey

pytestmark = pytest.mark.anyio

ODD = ("a" * 300, "9" * 23, "")
GOOD = {
    "name": "x1",
    "scopes": "infer",
    "role": "viewer",
    "visibility": "private",
    "model": "tiny-base",
    "prompt": "Hi",
    "version": "1",
    "seen": "0",
    "percent": "10",
}
SKIPPED = ("/sign-in", "/sign-out", "/password", "/delete", "/revoke", "/suspend")


def _dependencies(dependant):
    yield dependant
    for each in dependant.dependencies:
        yield from _dependencies(each)


def _forms():
    """Path, and names of the form's fields."""
    for screen in SCREENS:
        for route in screen.router.routes:
            if "POST" in route.methods and not route.path.endswith(SKIPPED):
                asked = [f for d in _dependencies(route.dependant) for f in d.body_params]
                names = {field.alias for field in asked} - {"body"}
                if names:
                    yield route.path, sorted(names)


async def _places(world):
    """What stands for each part of a path: things that are there."""
    async with world.db.read(None) as session:
        adapter = await session.scalar(select(Adapter.id))
        tenant = world.tenants["acme"]
        key = await session.scalar(select(ApiKey.id).where(ApiKey.tenant_id == tenant))
    return {
        "adapter_id": adapter,
        "key_id": key,
        "tenant_id": tenant,
        "user_id": "usr_none",
        "alias": "prod",
        "act": "rollback",
    }


@pytest.mark.parametrize("role", [ADMIN, OPERATOR])
async def test_no_value_of_a_field_is_a_fault_of_the_server(world, role):
    await world.add_adapter("acme", "poet")
    places, faults, asked = await _places(world), [], 0
    whose = {"tenant_id": world.tenants["acme"]} if role == OPERATOR else {}
    async with await visitor(world, role) as client:
        for template, names in _forms():
            path = re.sub(r"\{(\w+)\}", lambda part: places[part[1]], template)
            for name in names:
                for value in ODD:
                    filled = {each: GOOD.get(each, "") for each in names} | {name: value}
                    answer = await client.post(path, data=filled, params=whose)
                    asked += 1
                    if answer.status_code >= 500:
                        faults.append((template, name, value, answer.status_code))
    assert faults == []
    assert asked > 60


@pytest.mark.parametrize("days", ["-1", "1e5", "soon", "9" * 23])
async def test_days_that_are_no_number_do_not_make_a_key_that_never_ends(world, days):
    async with await visitor(world, ADMIN) as client:
        form = {"name": "ci", "scopes": "infer", "days": days}
        answer = await client.post("/admin/keys", data=form)
    assert "The days are a number" in answer.text
    async with world.client() as client:
        keys = (await client.get("/v1/keys")).json()["data"]
    assert "ci" not in [key["name"] for key in keys]


async def test_a_model_without_a_name_is_refused_in_the_playground(world):
    async with await visitor(world, ADMIN) as client:
        asked = await client.post(
            "/admin/playground/ask",
            json={"model": "", "prompt": "Hi"},
            headers={"accept": "application/json"},
        )
    assert asked.status_code == 400
    assert asked.json()["error"]["param"] == "model"
