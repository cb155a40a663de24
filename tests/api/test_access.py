"""Who may do what: every route × every kind of caller, against a table written by hand."""

import asyncio
import itertools
import json
import re
from datetime import timedelta

import pytest
from access_table import GUARDED, OPERATOR, PUBLIC, TABLE
from starlette.routing import Mount, Route

from loraplex.platform.api import usage
from loraplex.platform.app import routes as all_routes
from loraplex.platform.audit import SYSTEM
from loraplex.platform.db.types import utc_now
from loraplex.platform.key_changes import revoke_key
from loraplex.platform.key_secrets import new_secret
from loraplex.platform.key_terms import SCOPES
from loraplex.platform.keys import get_key
from loraplex.platform.tenants import set_suspended

pytestmark = pytest.mark.anyio

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW")
UNSAFE = ("POST", "PUT", "PATCH")
ELSEWHERE = {"x-forwarded-for": "203.0.113.7"}  # a caller who is not on this machine
BROKEN = {"content": b'{"model": ', "headers": {"content-type": "application/json"}}


def routes(app):
    """Every method and path template that the app serves."""
    for route in app.routes:
        inner = [route] if isinstance(route, Route | Mount) else route.original_router.routes
        for each in inner:
            methods = {"GET"} if isinstance(each, Mount) else each.methods
            yield from itertools.product(methods, [each.path])


def is_page(path):
    """Whether people see it, who sign in as users."""
    return path.startswith("/admin")


async def test_the_table_has_every_route_and_no_other(world):
    served = {(method, path) for method, path in routes(world.app) if not is_page(path)}
    assert served == TABLE.keys()


def told(answer):
    """All that an answer tells, but for what is of this very request."""
    body = json.loads(answer.content) if answer.content else None
    if isinstance(body, dict):
        body.pop("request_id", None)
    changing = {"x-request-id", "request-id", "date", "traceparent"}
    headers = {k: v for k, v in answer.headers.items() if k not in changing}
    return answer.status_code, json.dumps(body), json.dumps(headers, sort_keys=True)


@pytest.fixture
async def bad_keys(world):
    """Headers of callers whose key opens nothing, by what is wrong with it."""
    tenant, key = world.tenants["acme"], world.keys["acme"]
    revoked = await world.make_key(tenant, *SCOPES)
    expired = await world.make_key(tenant, *SCOPES)
    await change_key(world, revoked, revoke=True)
    await change_key(world, expired, revoke=False)
    bearer = {
        "malformed": "nonsense",
        "empty": "",
        "mistyped": key[:-1] + ("a" if key[-1] != "a" else "b"),
        "unknown": new_secret(),
        "revoked": revoked,
        "expired": expired,
        "not ascii": "é",
        "operator's, of another server": "lpx_" + "x" * 38,
    }
    headers = {name: {"authorization": f"Bearer {k}".encode()} for name, k in bearer.items()}
    return headers | {
        "none": {},
        "two keys": {"authorization": f"Bearer {key}", "x-api-key": world.keys["globex"]},
        "another scheme": {"authorization": f"Basic {key}"},
        "no scheme": {"authorization": key},
        "cookie": {"cookie": f"api_key={key}"},
    }


async def change_key(world, secret, *, revoke):
    principal = await world.app.state.context.keys.authenticate(world.db, secret)
    async with world.db.session(None) as session:
        if revoke:
            await revoke_key(session, principal.key_id, actor=SYSTEM)
        else:
            key = await get_key(session, principal.key_id)
            key.expires_at = utc_now() - timedelta(seconds=1)


async def test_every_bad_key_is_the_same_to_every_route_whatever_the_body(world, bad_keys):
    """All kinds of bad keys on some routes, those that differ most on each."""
    wrong = []
    async with world.client(None) as client:
        for number, (method, path) in enumerate(GUARDED):
            answers = set()
            body = BROKEN if method in UNSAFE else {"headers": {}}
            for name in bad_keys if number % 8 == 0 else ("none", "malformed", "revoked"):
                headers = ELSEWHERE | body["headers"] | bad_keys[name]
                content = body.get("content")
                answer = await client.request(method, path, headers=headers, content=content)
                answers.add(told(answer))
                if answer.status_code != 401 or answer.headers["www-authenticate"] != "Bearer":
                    wrong.append((method, path, name, answer.status_code))
            if len(answers) > 1:
                wrong.append((method, path, answers))
    assert not wrong, "\n".join(map(str, wrong))


async def test_a_key_in_a_query_string_is_not_read(world):
    key = world.keys["operator"]
    params = dict.fromkeys(("api_key", "key", "token", "access_token", "x-api-key"), key)
    async with world.client(None) as client:
        for method, path in GUARDED:
            answer = await client.request(method, path, params=params, headers=ELSEWHERE)
            assert answer.status_code == 401, (method, path)
            assert key not in answer.text


async def test_each_scope_opens_what_the_table_says_and_nothing_else(world):
    tenant = world.tenants["acme"]
    keys = {scope: await world.make_key(tenant, scope) for scope in SCOPES}
    callers = {scope: (key, {scope}) for scope, key in keys.items()}
    callers["tenant's admin"] = world.keys["acme"], set(SCOPES)
    callers["operator"] = (
        world.keys["operator"],
        {OPERATOR, "admin", "adapters:read", "adapters:write"},
    )
    wrong = []
    async with world.client(None) as client:
        for (method, path), row in GUARDED.items():
            for name, (key, has) in callers.items():
                headers = ELSEWHERE | {"authorization": f"Bearer {key}"}
                options = {"json": {}} if method in UNSAFE else {}
                answer = await client.request(method, path, headers=headers, **options)
                denied = answer.status_code in (401, 403)
                if denied == bool(has & row.needs) or answer.status_code >= 500:
                    wrong.append((method, path, name, answer.status_code))
    assert not wrong, "\n".join(map(str, wrong))


async def test_a_missing_scope_comes_before_complaints_about_the_body(world):
    keys = {scope: await world.make_key(world.tenants["acme"], scope) for scope in SCOPES}
    async with world.client(None) as client:
        for (method, path), row in GUARDED.items():
            for scope in {*SCOPES} - row.needs:
                if method in UNSAFE:
                    headers = {"authorization": f"Bearer {keys[scope]}"} | BROKEN["headers"]
                    answer = await client.request(method, path, headers=headers, content=b"{")
                    assert answer.status_code == 403, (method, path, scope)


@pytest.fixture
async def victim(world):
    """What acme has, by the name of the path's parameter."""
    await world.add_adapter("acme", "victim", digest="f" * 64)
    async with world.client("acme") as client:

        async def make(method, path, body):
            answer = await client.request(method, path, json=body)
            assert answer.is_success, answer.text
            return answer.json()

        await make("PUT", "/v1/adapters/victim/aliases/prod", {"version": 1, "revision": 0})
        key = await make("POST", "/v1/keys", {"name": "victim's", "scopes": ["infer"]})
        user = await make("POST", "/v1/users", {"name": "victim@acme", "role": "viewer"})
        upload = await make("POST", "/v1/uploads", {"name": "victim-upload"})
    return {
        "name": "victim",
        "model": "victim",
        "number": "1",
        "alias": "prod",
        "key_id": key["id"],
        "user_id": user["id"],
        "upload_id": upload["id"],
        "part": "adapter_config",
        "request_id": "req_01kb8zp4q5w6x7y8z9a0b1c2d3",
        "tenant_id": world.tenants["acme"],
    }


async def holdings(world):
    """All that acme can see of its own."""
    paths = [path for method, path in TABLE if method == "GET" and path.startswith("/v1/")]
    async with world.client("acme") as client:
        plain = [path for path in paths if "{" not in path and path != "/v1/quota"]
        answers = [await client.get(path) for path in plain]
        one = await client.get("/v1/adapters/victim/aliases/prod/history")
    return [re.sub(r'"last_used_at":\d+', "", answer.text) for answer in (*answers, one)]


async def test_another_tenants_key_finds_nothing_and_changes_nothing(world, victim):
    before = await holdings(world)
    marks = {"victim", "f" * 64, *(v for k, v in victim.items() if k.endswith("_id"))}
    wrong = []
    async with world.client("globex") as client:
        for (method, path), row in GUARDED.items():
            filled = re.sub(r"{(\w+)(:path)?}", lambda match: victim[match[1]], path)
            options = {"json": row.body} if method in UNSAFE and row.body is not None else {}
            if "parts" in path:
                options = {"content": b"{}", "headers": {"upload-offset": "0"}}
            for params in ({}, {"tenant_id": victim["tenant_id"]}):
                query = row.query | params
                answer = await client.request(method, filled, params=query, **options)
                asked_for = {"victim"} if "victim" in f"{filled}{row.body}" else set()
                asked_for |= {mark for mark in marks if mark in filled} | {*params.values()}
                if row.needs == {OPERATOR}:
                    right = answer.status_code == 403
                elif "{" in path or "victim" in str(row.body):
                    right = answer.status_code == 404
                else:
                    right = answer.status_code < 500
                leaked = {mark for mark in marks - asked_for if mark in answer.text}
                if not right or leaked:
                    wrong.append((method, filled, params, answer.status_code, leaked))
    assert not wrong, "\n".join(map(str, wrong))
    assert await holdings(world) == before


async def test_a_method_that_a_path_does_not_have_does_nothing(world):
    allowed = {}
    for method, path in TABLE:
        allowed.setdefault(path, set()).add(method)
    async with world.client(None) as client:
        del allowed["/static"]  # a folder, not a route
        for path, has in allowed.items():
            for method in set(METHODS) - has - {"CONNECT"}:
                answer = await client.request(method, path, headers=ELSEWHERE)
                assert answer.status_code == 405, (method, path)
                if method != "HEAD":
                    assert answer.json()["error"]["message"]


async def test_public_routes_ask_for_no_key(world):
    async with world.client(None) as client:
        for (method, path), row in TABLE.items():
            if PUBLIC in row.needs:
                answer = await client.request(method, path, headers=ELSEWHERE)
                assert answer.status_code not in (401, 403), path


async def test_pages_are_for_those_who_signed_in_and_no_key_opens_one(world):
    pages = [(method, path) for method, path in routes(world.app) if is_page(path)]
    for key in (None, "acme", "operator"):
        async with world.client(key) as client:
            for method, path in pages:
                answer = await client.request(method, path, headers=ELSEWHERE)
                closed = answer.status_code in (303, 401, 403)
                assert closed or (method, path) == ("GET", "/admin/sign-in"), (method, path)


@pytest.fixture
def forgotten():
    """A route whose author forgot to say who may use it, in two forms."""

    async def read() -> str:
        return "secret"

    async def write(body: dict[str, str]) -> str:
        return "secret"

    usage.router.add_api_route("/forgotten", read, methods=["GET"])
    usage.router.add_api_route("/forgotten", write, methods=["POST"])
    yield "/v1/usage/forgotten"
    del usage.router.routes[-2:]
    all_routes.cache_clear()


async def test_a_route_that_names_nobody_is_open_to_nobody(world, forgotten):
    for key in (None, "acme", "operator"):
        async with world.client(key) as client:
            for method, options in (("GET", {}), ("POST", {"json": {}}), ("POST", BROKEN)):
                answer = await client.request(method, forgotten, **options)
                assert (answer.status_code, "secret" in answer.text) == (403, False)
    assert ("GET", forgotten) in set(routes(world.app)) - TABLE.keys()


async def test_a_key_works_in_either_header(world):
    acme = world.keys["acme"]
    async with world.client(None) as client:
        for headers in (
            {"x-api-key": acme},
            {"authorization": f"bearer {acme}"},
            {"authorization": f"Bearer {acme}", "x-api-key": acme},
        ):
            assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_a_suspended_tenant_is_told_so_before_its_body_is_read(world):
    async with world.db.session(None) as session:
        await set_suspended(session, world.tenants["acme"], True, actor=SYSTEM)
    async with world.client("acme") as client:
        for method, path in GUARDED:
            options = BROKEN if method in UNSAFE else {}
            headers = ELSEWHERE | options.get("headers", {})
            content = options.get("content")
            answer = await client.request(method, path, headers=headers, content=content)
            assert answer.status_code == 403, (method, path)
            assert method == "HEAD" or "suspended" in answer.text


async def test_no_byte_of_a_strangers_body_is_read(world):
    """The request is refused although its body never comes."""
    async with world.listening() as url:
        host, port = url.removeprefix("http://").split(":")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000000\r\n\r\n"
        answer = await exchange(host, int(port), head.encode())
    assert answer.startswith(b"HTTP/1.1 401 ")


async def exchange(host, port, sent):
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(sent)
    async with asyncio.timeout(20):
        answer = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return answer
