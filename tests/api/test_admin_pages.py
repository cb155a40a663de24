"""Who may see and do what on the admin pages; where changes may come from; how sessions end."""

import html
import re
from datetime import timedelta

import pytest
from sqlalchemy import select
from visitors import ADMIN, OPERATOR, PASSWORD, STRANGER, VIEWER, make_user, visitor

from loraplex.platform import demo, sign_in
from loraplex.platform.admin.screens import SCREENS
from loraplex.platform.admin.sessions import open_session
from loraplex.platform.admin.visit import COOKIE
from loraplex.platform.audit import SYSTEM
from loraplex.platform.db.models import UserSession
from loraplex.platform.db.types import utc_now
from loraplex.platform.tenants import set_suspended
from loraplex.platform.users import set_disabled

pytestmark = pytest.mark.anyio

ALL = {VIEWER, ADMIN, OPERATOR}
WRITERS = {ADMIN, OPERATOR}
TABLE = {
    ("GET", "/admin/sign-in"): {STRANGER, *ALL},
    ("POST", "/admin/sign-in"): {STRANGER, *ALL},
    ("POST", "/admin/sign-out"): ALL,
    ("GET", "/admin/password"): ALL,
    ("POST", "/admin/password"): ALL,
    ("GET", "/admin"): ALL,
    ("GET", "/admin/overview/live"): ALL,
    ("GET", "/admin/adapters"): ALL,
    ("GET", "/admin/adapters/{adapter_id}"): ALL,
    ("POST", "/admin/adapters/{adapter_id}"): WRITERS,
    ("POST", "/admin/adapters/{adapter_id}/delete"): WRITERS,
    ("POST", "/admin/adapters/{adapter_id}/versions/{number}/{change}"): WRITERS,
    ("POST", "/admin/adapters/{adapter_id}/aliases"): WRITERS,
    ("POST", "/admin/adapters/{adapter_id}/aliases/{alias}"): WRITERS,
    ("POST", "/admin/adapters/{adapter_id}/aliases/{alias}/{act}"): WRITERS,
    ("GET", "/admin/upload"): WRITERS,
    ("POST", "/admin/upload"): WRITERS,
    ("POST", "/admin/uploads"): WRITERS,
    ("PUT", "/admin/uploads/{upload_id}/parts/{part}"): WRITERS,
    ("POST", "/admin/uploads/{upload_id}/finish"): WRITERS,
    ("POST", "/admin/uploads/{upload_id}/cancel"): WRITERS,
    ("GET", "/admin/uploads/{upload_id}"): ALL,
    ("GET", "/admin/playground"): WRITERS,
    ("POST", "/admin/playground"): WRITERS,
    ("POST", "/admin/playground/ask"): WRITERS,
    ("GET", "/admin/keys"): WRITERS,
    ("POST", "/admin/keys"): WRITERS,
    ("POST", "/admin/keys/{key_id}/rotate"): WRITERS,
    ("POST", "/admin/keys/{key_id}/revoke"): WRITERS,
    ("GET", "/admin/tenants"): {OPERATOR},
    ("POST", "/admin/tenants"): {OPERATOR},
    ("GET", "/admin/tenants/{tenant_id}"): {OPERATOR},
    ("POST", "/admin/tenants/{tenant_id}/limits"): {OPERATOR},
    ("POST", "/admin/tenants/{tenant_id}/suspend"): {OPERATOR},
    ("POST", "/admin/tenants/{tenant_id}/resume"): {OPERATOR},
    ("GET", "/admin/users"): WRITERS,
    ("POST", "/admin/users"): WRITERS,
    ("POST", "/admin/users/{user_id}/invite"): WRITERS,
    ("POST", "/admin/users/{user_id}/disable"): WRITERS,
    ("POST", "/admin/users/{user_id}/enable"): WRITERS,
    ("GET", "/admin/usage"): ALL,
    ("GET", "/admin/audit"): WRITERS,
    ("GET", "/admin/system"): {OPERATOR},
    ("GET", "/admin/{rest:path}"): ALL,
}
PLACES = {
    "adapter_id": "adp_none",
    "upload_id": "upl_none",
    "key_id": "key_none",
    "tenant_id": "ten_none",
    "user_id": "usr_none",
    "number": "1",
    "change": "retire",
    "alias": "prod",
    "act": "rollback",
    "part": "archive",
}


def test_the_table_has_every_route_and_no_other():
    served = {
        (method, route.path)
        for screen in SCREENS
        for route in screen.router.routes
        for method in route.methods
    }
    assert served == TABLE.keys()


async def test_every_role_is_let_in_where_the_table_says_and_nowhere_else(world):
    wrong = []
    for role in (STRANGER, VIEWER, ADMIN, OPERATOR):
        async with await visitor(world, role) as client:
            for (method, template), allowed in TABLE.items():
                if template in ("/admin/sign-in", "/admin/sign-out"):
                    continue  # anyone's, and the end of the session; they have tests of their own
                answer = await client.request(method, re.sub(r"{(\w+)}", _place, template))
                refused = answer.status_code == 403 or _to_sign_in(answer)
                if refused == (role in allowed):
                    wrong.append((role, method, template, answer.status_code))
    assert not wrong, "\n".join(map(str, wrong))


def _place(match):
    return PLACES[match[1]]


def _to_sign_in(answer):
    return answer.status_code == 303 and answer.headers["location"].startswith("/admin/sign-in")


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example", "sec-fetch-site": "cross-site"},
        {"origin": "http://evil.example"},
        {"sec-fetch-site": "same-site", "origin": "http://localhost"},
        {"sec-fetch-site": "none"},
        {"origin": "null"},
        {},
    ],
)
async def test_a_change_from_another_site_is_refused(world, headers):
    async with await visitor(world, OPERATOR) as client:
        del client.headers["origin"], client.headers["sec-fetch-site"]
        answer = await client.post("/admin/tenants", data={"name": "forged"}, headers=headers)
        assert answer.status_code == 403
        assert "forged" not in (await client.get("/admin/tenants")).text
        sign_in = await client.post("/admin/sign-in", data={}, headers=headers)
        assert sign_in.status_code in (303, 403)
        assert "set-cookie" not in sign_in.headers


async def test_an_old_browser_is_known_by_its_origin(world):
    async with await visitor(world, OPERATOR) as client:
        del client.headers["sec-fetch-site"]
        answer = await client.post("/admin/tenants", data={"name": "honest"})
        assert answer.status_code == 303


async def test_a_wrong_password_waits_longer_each_time_and_tells_nothing(world):
    await make_user(world, ADMIN, name="ada")
    async with await visitor(world, STRANGER) as client:

        async def attempt(name, password):
            data = {"name": name, "password": password}
            return await client.post("/admin/sign-in", data=data)

        texts = {(await attempt(name, "nonsense")).text for name in ("ada", "ada")}
        unknown = (await attempt("nobody", "nonsense")).text
        assert {text.replace("ada", "nobody") for text in texts} == {unknown}
        for _ in range(4):
            await attempt("ada", "nonsense")
        late = await attempt("ada", PASSWORD)
        assert "Too many tries" in late.text
        assert "set-cookie" not in late.headers


async def test_a_session_is_opaque_and_stored_as_a_hash(world):
    await make_user(world, ADMIN, name="ada")
    async with await visitor(world, STRANGER) as client:
        data = {"name": "ada", "password": PASSWORD, "onward": "/admin/keys"}
        answer = await client.post("/admin/sign-in", data=data)
    assert answer.status_code == 303 and answer.headers["location"] == "/admin/keys"
    cookie = answer.headers["set-cookie"]
    token = re.match(rf"{COOKIE}=([\w-]+);", cookie)[1]
    assert {"HttpOnly", "SameSite=strict", "Path=/admin"} <= {*cookie.split("; ")}
    async with world.db.read(None) as session:
        stored = list(await session.scalars(select(UserSession.digest)))
    assert stored and token not in stored


@pytest.mark.parametrize("onward", ["//evil.example", "https://evil.example", "/admin\\..", "x"])
async def test_nobody_is_sent_elsewhere_after_signing_in(world, onward):
    await make_user(world, ADMIN, name="ada")
    async with await visitor(world, STRANGER) as client:
        data = {"name": "ada", "password": PASSWORD, "onward": onward}
        answer = await client.post("/admin/sign-in", data=data)
        assert answer.headers["location"] == "/admin"
        shown = (await client.get("/admin/sign-in", params={"onward": onward})).text
        assert "evil" not in shown


@pytest.mark.parametrize("how", ["disabled", "suspended", "expired", "signed out"])
async def test_a_session_ends_at_once(world, how):
    async with await visitor(world, ADMIN) as client:
        assert (await client.get("/admin/keys")).status_code == 200
        async with world.db.session(None) as session:
            found = await session.scalar(select(UserSession))
            if how == "disabled":
                await set_disabled(session, found.user_id, True, actor=SYSTEM)
            if how == "suspended":
                await set_suspended(session, world.tenants["acme"], True, actor=SYSTEM)
            if how == "expired":
                found.expires_at = utc_now() - timedelta(seconds=1)
        if how == "signed out":
            assert _to_sign_in(await client.post("/admin/sign-out"))
        assert _to_sign_in(await client.get("/admin/keys"))


async def test_a_new_password_ends_other_sessions_and_no_other_users(world):
    user_id = await make_user(world, ADMIN, name="ada")
    other = await visitor(world, VIEWER)
    tokens = [await open_session(world.db, user_id) for _ in range(2)]
    clients = [await visitor(world, STRANGER) for _ in tokens]
    for client, token in zip(clients, tokens, strict=True):
        client.headers["cookie"] = f"{COOKIE}={token}"
    again = {"password": "another long sentence", "again": "another long sentence"}
    answer = await clients[0].post("/admin/password", data=again)
    assert answer.headers["location"] == "/admin?done=password-set"
    statuses = [(await client.get("/admin")).status_code for client in (*clients, other)]
    assert statuses == [200, 303, 200]
    assert await sign_in.verify(world.db, "ada", "another long sentence")
    for client in (*clients, other):
        await client.aclose()


async def test_an_invitation_leads_to_a_password_and_is_of_use_once(world):
    code = await demo.first_sign_in(world.db, world.app.state.context.keys)
    async with await visitor(world, STRANGER) as client:
        assert "Nobody has signed in yet" in (await client.get("/admin/sign-in")).text
        data = {"name": "operator", "password": code}
        first = await client.post("/admin/sign-in", data=data)
        assert first.headers["location"] == "/admin/password"
        client.cookies.clear()
        assert "do not go together" in (await client.post("/admin/sign-in", data=data)).text
        assert "Nobody has signed in yet" not in (await client.get("/admin/sign-in")).text
    assert await demo.first_sign_in(world.db, world.app.state.context.keys) is None


async def test_a_tenants_admin_sees_and_changes_its_own_things_only(world):
    await world.add_adapter("globex", "secret-poet")
    async with await visitor(world, OPERATOR) as operator:
        listed = (await operator.get("/admin/adapters")).text
        adapter = re.search(r"/admin/adapters/(adp_\w+)", listed)[1]
        theirs = {"tenant_id": world.tenants["globex"]}
        keys = (await operator.get("/admin/keys", params=theirs)).text
        key = re.search(r"/admin/keys/(key_\w+)/revoke", keys)[1]
    async with await visitor(world, ADMIN) as client:
        for path in ("/admin/adapters", "/admin/playground", "/admin/audit", "/admin/usage"):
            assert "secret-poet" not in (await client.get(path)).text
        for path in ("/admin/keys", "/admin/upload", "/admin/playground", "/admin/usage"):
            assert (await client.get(path, params=theirs)).status_code == 404
        assert (await client.get(f"/admin/adapters/{adapter}")).status_code == 404
        assert (await client.post(f"/admin/adapters/{adapter}/delete")).status_code == 404
        assert (await client.post(f"/admin/keys/{key}/revoke")).status_code == 404
        made = {"name": "boss", "role": "operator"}
        assert "Only an operator" in (await client.post("/admin/users", data=made)).text
    assert (await world.client("globex").get("/v1/models")).status_code == 200


async def test_pages_never_say_a_secret(world):
    async with await visitor(world, OPERATOR) as client:
        system = (await client.get("/admin/system")).text
        made = await client.post("/admin/keys", data={"name": "k", "scopes": "infer"})
        secret = re.search(r"lpx_\w{38}", made.text)[0]
        assert made.headers["cache-control"] == "no-store"
        pages = ["/admin/keys", "/admin/audit", "/admin/audit?format=csv", "/admin/system"]
        told = system + "".join([(await client.get(path)).text for path in pages])
    assert secret not in told
    assert world.settings.pepper().hex() not in told


async def test_a_part_that_is_polled_leads_to_the_sign_in_once_the_session_is_over(world):
    async with await visitor(world, STRANGER) as client:
        answer = await client.get("/admin/overview/live", headers={"hx-request": "true"})
    assert answer.status_code == 401
    assert answer.headers["hx-redirect"].startswith("/admin/sign-in")


async def test_charts_and_refusals_show_what_was_counted(world):
    world.app.state.context.metrics.count_limited("tenant", "tokens_per_minute")
    async with await visitor(world, OPERATOR) as client:
        text = (await client.get("/admin")).text
    assert "tenant tokens_per_minute" in text


async def test_an_address_without_a_page_is_a_page_that_says_so(world):
    async with await visitor(world, VIEWER) as client:
        answer = await client.get("/admin/nowhere/at/all")
    assert answer.status_code == 404
    assert "There is no such page" in answer.text


async def test_a_key_of_one_adapter_is_shown_with_a_request_that_it_may_make(world):
    await world.add_adapter("acme", "poet")
    async with await visitor(world, ADMIN) as client:
        filled = (await client.get("/admin/keys", params={"adapters": "poet"})).text
        assert 'name="adapters" type="text" value="poet"' in filled
        form = {"name": "shop", "scopes": "infer", "adapters": "nobody, poet"}
        bound = (await client.post("/admin/keys", data=form)).text
        reader = await client.post("/admin/keys", data={"name": "r", "scopes": "adapters:read"})
    assert '"model": "poet"' in html.unescape(bound)
    assert "<bdi>nobody</bdi> is not there yet" in bound
    assert "curl" not in reader.text


async def test_the_audit_log_names_what_changed_and_leads_to_all_its_changes(world):
    async with await visitor(world, ADMIN) as client:
        await client.post("/admin/keys", data={"name": "shop", "scopes": "infer"})
        keys = (await client.get("/admin/keys")).text
        key = re.search(r"<bdi>shop</bdi>.*?/admin/keys/(key_\w+)/", keys, re.DOTALL)[1]
        await client.post(f"/admin/keys/{key}/revoke")
        everything = (await client.get("/admin/audit")).text
        link = f"/admin/audit?target={key}"
        only = (await client.get(link)).text
    assert f'<a href="{link}"><bdi>key shop</bdi></a>' in everything
    assert re.findall(r"<code>([a-z.]+)</code>", only) == ["key.revoked", "key.created"]


async def test_usage_has_a_bar_for_each_day_and_links_to_days(world):
    async with await visitor(world, ADMIN) as client:
        asked = {"since": "2026-01-01", "until": "2026-01-03", "group_by": "key"}
        empty = (await client.get("/admin/usage", params=asked)).text
        assert "No requests in these days" in empty
        body = {"model": "tiny-base", "prompt": "a", "max_tokens": 1}
        async with world.client() as caller:
            assert (await caller.post("/v1/completions", json=body)).status_code == 200
        month = (await client.get("/admin/usage")).text
        today = (await client.get("/admin/usage", params={"since": f"{utc_now():%Y-%m-%d}"})).text
    assert month.count("data-day>") == 30
    assert "data-day>" not in today and "aria-current" in today
    assert re.findall(r'aria-current="true">([^<]+)<', today) == ["Today"]


async def test_a_page_of_ten_thousand_names_is_paged(world):
    for number in range(55):
        await world.add_adapter("acme", f"poet-{number:03}", f"{number:064x}")
    async with await visitor(world, ADMIN) as client:
        first = await client.get("/admin/adapters")
        assert first.text.count('href="/admin/adapters/adp_') == 50
        following = re.search(r'href="([^"]+after=[^"]+)"', first.text)[1].replace("&amp;", "&")
        assert (await client.get(following)).text.count('href="/admin/adapters/adp_') == 5
        found = await client.get("/admin/adapters", params={"query": "poet-01"})
        assert found.text.count('href="/admin/adapters/adp_') == 10
        wild = await client.get("/admin/adapters", params={"query": "%"})
        assert wild.text.count('href="/admin/adapters/adp_') == 0
