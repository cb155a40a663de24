"""Who may do what: every route is public by name, or asks for a key and for a scope."""

import itertools
from datetime import timedelta

import pytest
from starlette.routing import Mount, Route

from loraplex.platform.db.models import ApiKey
from loraplex.platform.db.types import utc_now
from loraplex.platform.keys import SCOPES
from loraplex.platform.tenants import set_suspended

pytestmark = pytest.mark.anyio

PUBLIC = {
    ("GET", "/"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/openapi.json"),
    ("GET", "/static"),
}
OPERATOR = "operator"
NEEDS: dict[tuple[str, str], set[str]] = {
    ("POST", "/v1/chat/completions"): {"infer"},
    ("POST", "/v1/completions"): {"infer"},
    ("GET", "/v1/models"): {"infer", "adapters:read", "admin"},
    ("GET", "/v1/models/{model:path}"): {"infer", "adapters:read", "admin"},
    ("POST", "/v1/adapters"): {"adapters:write"},
    ("GET", "/v1/adapters"): {"adapters:read"},
    ("GET", "/v1/adapters/{name}"): {"adapters:read"},
    ("DELETE", "/v1/adapters/{name}"): {"adapters:write"},
    ("GET", "/v1/adapters/{name}/aliases"): {"adapters:read"},
    ("PUT", "/v1/adapters/{name}/aliases/{alias}"): {"adapters:write"},
    ("DELETE", "/v1/adapters/{name}/aliases/{alias}"): {"adapters:write"},
    ("POST", "/v1/adapters/{name}/aliases/{alias}/rollback"): {"adapters:write"},
    ("GET", "/v1/adapters/{name}/aliases/{alias}/history"): {"adapters:read"},
    ("POST", "/v1/tenants"): {OPERATOR},
    ("GET", "/v1/tenants"): {OPERATOR},
    ("GET", "/v1/tenants/{tenant_id}"): {OPERATOR},
    ("PATCH", "/v1/tenants/{tenant_id}"): {OPERATOR},
    ("POST", "/v1/keys"): {"admin"},
    ("GET", "/v1/keys"): {"admin"},
    ("DELETE", "/v1/keys/{key_id}"): {"admin"},
    ("GET", "/v1/usage"): {"infer", "admin"},
    ("GET", "/v1/cache"): {"infer", "admin"},
    ("GET", "/v1/tenants/{tenant_id}/cache"): {OPERATOR},
    ("GET", "/metrics"): {OPERATOR},
}


def routes(app):
    """Every method and path template that the app serves."""
    for route in app.routes:
        inner = [route] if isinstance(route, Route | Mount) else route.original_router.routes
        for each in inner:
            methods = {"GET"} if isinstance(each, Mount) else each.methods - {"HEAD"}
            yield from itertools.product(methods, [each.path])


async def test_every_route_is_public_by_name_or_named_with_its_scopes(world):
    assert set(routes(world.app)) == PUBLIC | NEEDS.keys()


async def test_every_other_route_denies_strangers_and_keys_without_its_scope(world):
    tenant = world.tenants["acme"]
    single = {scope: await world.make_key(tenant, scope) for scope in SCOPES}
    wrong = []
    async with world.client(None) as client:
        for (method, path), needed in NEEDS.items():

            async def call(key, method=method, path=path):
                headers = {"authorization": f"Bearer {key}"} if key else {"x-forwarded-for": "::1"}
                options = {"json": {}} if method in ("POST", "PUT", "PATCH") else {}
                answer = await client.request(method, path, headers=headers, **options)
                return answer.status_code

            if await call(None) != 401:
                wrong.append((method, path, "no key"))
            if await call("lpx_" + "x" * 38) != 401:
                wrong.append((method, path, "unknown key"))
            for scope, key in single.items():
                if (await call(key) == 403) == (scope in needed):
                    wrong.append((method, path, scope))
            if OPERATOR in needed and await call(world.keys["operator"]) in (401, 403):
                wrong.append((method, path, "operator"))
    assert wrong == []


async def test_all_keys_that_open_nothing_look_the_same(world):
    tenant = world.tenants["acme"]
    revoked, expired = await world.make_key(tenant, "infer"), await world.make_key(tenant, "infer")
    await change_key(world, revoked, revoked_at=utc_now())
    await change_key(world, expired, expires_at=utc_now() - timedelta(seconds=1))
    bodies = set()
    async with world.client(None) as client:
        for secret in (None, "", "lpx_", "nonsense", "lpx_" + "x" * 38, "é", revoked, expired):
            headers = {} if secret is None else {"authorization": f"Bearer {secret}".encode()}
            answer = await client.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            bodies.add(answer.text)
    assert len(bodies) == 1
    assert '"code":"invalid_api_key"' in bodies.pop()


async def change_key(world, secret, **changes) -> None:
    principal = await world.app.state.context.keys.authenticate(world.db, secret)
    async with world.db.session(None) as session:
        key = await session.get(ApiKey, principal.key_id)
        for name, value in changes.items():
            setattr(key, name, value)


async def test_a_key_works_in_either_header_but_not_two_at_once(world):
    acme, globex = world.keys["acme"], world.keys["globex"]
    async with world.client(None) as client:

        async def status(**headers):
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            return (await client.get("/v1/models", headers=names)).status_code

        assert await status(x_api_key=acme) == 200
        assert await status(authorization=f"bearer {acme}") == 200
        assert await status(authorization=f"Bearer {acme}", x_api_key=acme) == 200
        assert await status(authorization=f"Bearer {acme}", x_api_key=globex) == 401
        assert await status(authorization=f"Basic {acme}") == 401
        assert await status(authorization=acme) == 401
        assert (await client.get(f"/v1/models?api_key={acme}")).status_code == 401


async def test_a_suspended_tenant_is_told_so(world):
    async with world.db.session(None) as session:
        await set_suspended(session, world.tenants["acme"], True)
    async with world.client("acme") as client:
        answer = await client.get("/v1/models")
    assert answer.status_code == 403
    assert "suspended" in answer.json()["error"]["message"]


async def test_an_operators_key_does_not_infer(world):
    async with world.client("operator") as client:
        answer = await client.post("/v1/completions", json={"model": "tiny-base", "prompt": "a"})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "insufficient_permissions"
