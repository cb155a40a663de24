"""The audit log: every change leaves its entry in the change's own transaction, and who may read.

Each route that changes something is called twice, in an order in which all are valid: once while
no entry can be written, which must leave the database as it was, and once for good.
"""

import csv
import dataclasses
import io
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx
import pytest
from access_table import TABLE
from command_line import command_line
from sqlalchemy import event, select

from loraplex.platform.db.models import AuditEntry, Base

pytestmark = pytest.mark.anyio
UNSAFE = ("POST", "PUT", "PATCH", "DELETE")
FILES = {"adapter_config": ("c", b'{"r": 8}'), "adapter_model": ("m", b"ok")}
ALIAS = "/v1/adapters/{name}/aliases/{alias}"
VERSION = "/v1/adapters/{name}/versions/{number}"
PART = "/v1/uploads/{upload_id}/parts/{part}"
NO_CHANGE = {  # what a route without an entry changes instead
    ("POST", "/v1/chat/completions"): "the ledger of usage",
    ("POST", "/v1/completions"): "the ledger of usage",
    ("POST", "/v1/responses"): "the ledger of usage",
    ("POST", "/v1/responses/input_tokens"): "nothing",
    ("POST", "/v1/messages"): "the ledger of usage",
    ("POST", "/v1/messages/count_tokens"): "nothing",
    ("POST", "/v1/quota/explain"): "nothing",
    ("PUT", PART): "bytes in quarantine, under an upload that has its entry",
    ("POST", "/v1/storage/collect"): "the store; an entry says so where something was removed",
}


class Step(NamedTuple):
    """A valid call of a route, and the entries that it leaves; `keep` names the answer's id."""

    method: str
    path: str
    actions: tuple[str, ...]
    body: Any = None
    key: str = "acme"
    keep: str = ""
    files: Any = None
    headers: dict[str, str] | None = None
    content: bytes | None = None
    params: dict[str, str] | None = None


def zipped() -> bytes:
    """An adapter as a zip."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("adapter_config.json", '{"r": 8}')
        archive.writestr("adapter_model.safetensors", "ok")
    return buffer.getvalue()


PUBLISHED = ("upload.created", "version.published")
SPLIT = {"version": 1, "canary": {"version": 2, "percent": 10}}
OFFSET = {"upload-offset": "0"}
STEPS = [
    Step("POST", "/v1/tenants", ("tenant.created",), {"name": "new"}, "operator", "tenant_id"),
    Step("PATCH", "/v1/tenants/{tenant_id}", ("tenant.changed",), {"weight": 2.0}, "operator"),
    Step(
        "PATCH", "/v1/tenants/{tenant_id}", ("tenant.suspended",), {"suspended": True}, "operator"
    ),
    Step("POST", "/v1/keys", ("key.created",), {"name": "k", "scopes": ["infer"]}, keep="key_id"),
    Step("PATCH", "/v1/keys/{key_id}", ("key.changed",), {"name": "other"}),
    Step("POST", "/v1/keys/{key_id}/rotate", ("key.rotated",), {"overlap_s": 60}),
    Step("DELETE", "/v1/keys/{key_id}", ("key.revoked",)),
    Step(
        "POST",
        "/v1/users",
        ("user.created",),
        {"name": "u@acme", "role": "viewer"},
        keep="user_id",
    ),
    Step(
        "PUT",
        "/v1/users/{user_id}/password",
        ("user.changed",),
        {"password": "good enough words"},
    ),
    Step("POST", "/v1/users/{user_id}/invitations", ("user.changed",), {"lasts_s": 60}),
    Step("PATCH", "/v1/users/{user_id}", ("user.disabled",), {"disabled": True}),
    Step("POST", "/v1/adapters", PUBLISHED, {"name": "poet"}, files=FILES),
    Step("POST", "/v1/adapters", PUBLISHED, {"name": "poet"}, files=FILES),
    Step("PATCH", "/v1/adapters/{name}", ("adapter.changed",), {"visibility": "shared"}),
    Step("PATCH", "/v1/adapters/{name}", ("adapter.shared",), {"shared_with": ["globex"]}),
    Step("PATCH", "/v1/adapters/{name}", ("adapter.unshared",), {"shared_with": []}),
    Step("PUT", ALIAS, ("alias.moved",), {"revision": 0, **SPLIT}),
    Step("POST", f"{ALIAS}/promote", ("canary.promoted",), {"revision": 1}),
    Step("POST", f"{ALIAS}/rollback", ("alias.rolled_back",), {"revision": 2}),
    Step("POST", f"{ALIAS}/abort", ("canary.aborted",), {"revision": 3}),
    Step("DELETE", ALIAS, ("alias.removed",), params={"revision": "4"}),
    Step("POST", f"{VERSION}/retire", ("version.retired",)),
    Step("POST", f"{VERSION}/restore", ("version.restored",)),
    Step("DELETE", VERSION, ("version.deleted",)),
    Step("POST", "/v1/uploads", ("upload.created",), {"name": "poet"}, keep="upload_id"),
    Step("DELETE", "/v1/uploads/{upload_id}", ("upload.cancelled",)),
    Step("POST", "/v1/uploads", ("upload.created",), {"name": "poet"}, keep="upload_id"),
    Step("PUT", PART, (), headers=OFFSET, content=zipped()),
    Step(
        "POST",
        "/v1/uploads/{upload_id}/finish",
        ("version.published",),
        params={"wait": "true"},
    ),
    Step("POST", "/v1/load_lora_adapter", PUBLISHED, {"lora_name": "v", "lora_path": "v"}),
    Step("POST", "/v1/unload_lora_adapter", ("adapter.deleted",), {"lora_name": "v"}),
    Step("DELETE", "/v1/adapters/{name}", ("adapter.deleted",)),
]
BEHIND = {"/v1/uploads/{upload_id}/finish"}  # work goes on after the answer, so not all is undone


def test_every_route_that_changes_something_has_its_step():
    covered = {(step.method, step.path) for step in STEPS} | NO_CHANGE.keys()
    assert covered == {route for route in TABLE if route[0] in UNSAFE}


@contextmanager
def no_entries() -> Iterator[None]:
    """Let every attempt to write an entry fail."""

    def refuse(*_: object) -> None:
        raise RuntimeError("the entry cannot be written")

    event.listen(AuditEntry, "before_insert", refuse)
    try:
        yield
    finally:
        event.remove(AuditEntry, "before_insert", refuse)


async def rows(world) -> dict[str, list[Any]]:
    """All that the database holds, but for when keys were used and what was replayed."""
    async with world.db.read(None) as session:
        return {
            table.name: [
                tuple(row)
                for row in await session.execute(
                    select(*(c for c in table.columns if c.name != "last_used_at")).order_by(
                        *table.primary_key
                    )
                )
            ]
            for table in Base.metadata.sorted_tables
            if table.name != "idempotent_requests"
        }


async def entries(world) -> list[AuditEntry]:
    async with world.db.read(None) as session:
        return list(await session.scalars(select(AuditEntry).order_by(AuditEntry.id)))


@pytest.fixture
def folder(world, tmp_path):
    """The operator's folder with an adapter in it, which the server is told of."""
    folder = tmp_path / "adapters" / "acme" / "v"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_text("ok")
    context = world.app.state.context
    settings = context.settings.model_copy(update={"adapter_dir": tmp_path / "adapters"})
    world.app.state.context = dataclasses.replace(context, settings=settings)


async def call(world, step: Step, facts: dict[str, str]) -> httpx.Response:
    transport = httpx.ASGITransport(app=world.app, raise_app_exceptions=False)
    options: dict[str, Any] = {"params": step.params, "content": step.content}
    if step.files:
        options |= {"data": step.body, "files": step.files}
    elif step.body is not None:
        options["json"] = step.body
    headers = {"authorization": f"Bearer {world.keys[step.key]}"} | (step.headers or {})
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers=headers, timeout=60
    ) as client:
        return await client.request(step.method, step.path.format(**facts), **options)


async def test_every_change_leaves_its_entry_or_none_is_made(world, folder):
    facts = {"name": "poet", "alias": "prod", "number": "1", "part": "archive"}
    for step in STEPS:
        if step.actions and step.path not in BEHIND:
            before = await rows(world)
            with no_entries():
                failed = await call(world, step, facts)
            assert failed.status_code == 500, (step, failed.text)
            assert await rows(world) == before, step
        seen = {entry.id for entry in await entries(world)}
        answer = await call(world, step, facts)
        assert answer.is_success, (step, answer.text)
        added = [entry for entry in await entries(world) if entry.id not in seen]
        assert sorted(entry.action for entry in added) == sorted(step.actions), step
        for entry in added:
            assert_told(world, step, answer, entry)
        if step.keep:
            facts[step.keep] = answer.json()["id"]


def assert_told(world, step: Step, answer: httpx.Response, entry: AuditEntry) -> None:
    """Who, in which request and of whom; and no secret."""
    assert entry.actor.startswith("key_")
    if step.path not in BEHIND:
        assert entry.request_id == answer.headers["x-request-id"]
    if step.key == "acme":
        assert entry.tenant_id == world.tenants["acme"]
    assert "lpx_" not in json.dumps(entry.details)
    assert "good enough" not in json.dumps(entry.details)


async def test_what_is_refused_leaves_no_entry(world):
    await world.add_adapter("acme", "poet")
    seen = len(await entries(world))
    refused = [
        Step("PUT", ALIAS, (), {"version": 9, "revision": 0}),
        Step("PUT", ALIAS, (), {"version": 1, "revision": 3}),
        Step("DELETE", VERSION, ()),
        Step("PATCH", "/v1/adapters/{name}", (), {"visibility": "public"}, key="globex"),
        Step("PATCH", "/v1/adapters/{name}", (), {"shared_with": ["nobody"]}),
        Step("POST", "/v1/tenants", (), {"name": "acme"}, key="operator"),
        Step("POST", "/v1/tenants", (), {"name": "mine"}),
        Step("POST", "/v1/adapters", (), {"name": "No Good"}, files=FILES),
    ]
    facts = {"name": "poet", "alias": "prod", "number": "1"}
    for step in refused[:-1]:
        assert (await call(world, step, facts)).is_client_error, step
    assert len(await entries(world)) == seen
    assert (await call(world, refused[-1], facts)).is_client_error
    added = [entry.action for entry in await entries(world)][seen:]
    assert added in ([], ["upload.created", "upload.rejected"])


# --- reading it ------------------------------------------------------------------------------


@pytest.fixture
async def told(world):
    """Two changes of acme's and one of globex's, with their answers' request ids."""
    await world.add_adapter("acme", "poet")
    await world.add_adapter("globex", "poet")
    body = {"description": "=1+1"}
    for tenant in ("acme", "globex"):
        async with world.client(tenant) as client:
            assert (await client.patch("/v1/adapters/poet", json=body)).is_success


async def audit(world, key, **params):
    async with world.client(key) as client:
        answer = await client.get("/v1/audit", params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()


async def test_a_tenant_reads_its_own_entries_and_an_operator_all(world, told):
    def of(page):
        return {(entry["tenant_id"], entry["action"]) for entry in page["data"]}

    acme, globex = world.tenants["acme"], world.tenants["globex"]
    own = of(await audit(world, "acme"))
    assert {(acme, "version.published"), (acme, "adapter.changed")} <= own
    assert {tenant for tenant, _ in own} == {acme}
    everything = await audit(world, "operator", limit=1000)
    assert {(acme, "adapter.changed"), (globex, "adapter.changed")} <= of(everything)
    assert {t for t, _ in of(await audit(world, "operator", tenant_id=globex))} == {globex}
    async with world.client("acme") as client:
        assert (await client.get("/v1/audit", params={"tenant_id": globex})).status_code == 404
    reader = await world.make_key(acme, "infer", "adapters:read", "adapters:write")
    async with world.client(reader) as client:
        assert (await client.get("/v1/audit")).status_code == 403


async def test_entries_are_found_and_paged_the_newest_first(world, told):
    newest = (await audit(world, "acme"))["data"]
    assert [entry["id"] for entry in newest] == sorted((e["id"] for e in newest), reverse=True)
    changed = newest[0]
    assert (changed["action"], changed["target"]) == ("adapter.changed", "poet")
    assert changed["details"] == {"description": "=1+1"}
    assert changed["request_id"].startswith("req_")
    for name in ("action", "actor", "target"):
        found = (await audit(world, "acme", **{name: changed[name]}))["data"]
        assert changed in found
        assert {entry[name] for entry in found} == {changed[name]}
    found, params = [], {"limit": 1}
    while True:
        page = await audit(world, "acme", **params)
        found += page["data"]
        if not page["has_more"]:
            break
        params["after"] = page["last_id"]
    assert found == newest
    assert (await audit(world, "acme", since="2020-01-01T00:00:00Z"))["data"] == newest
    assert (await audit(world, "acme", since="2999-01-01T00:00:00Z"))["data"] == []


async def test_entries_are_told_as_a_table_that_no_spreadsheet_runs(world, told):
    async with world.client("acme") as client:
        asked = await client.get("/v1/audit", params={"format": "csv"})
        accepted = await client.get("/v1/audit", headers={"accept": "text/csv"})
    assert asked.headers["content-type"].startswith("text/csv")
    assert asked.text == accepted.text
    table = list(csv.DictReader(io.StringIO(asked.text)))
    entries = (await audit(world, "acme"))["data"]
    assert [row["id"] for row in table] == [entry["id"] for entry in entries]
    assert json.loads(table[0]["details"]) == entries[0]["details"]
    assert not any(cell.startswith(("=", "+", "-", "@")) for row in table for cell in row.values())


async def test_the_command_lists_what_is_asked_for(world, told):
    async with command_line(world, "operator", "audit") as run:
        acme = world.tenants["acme"]
        found = await run("--tenant", acme, "--action", "adapter.changed", "--json")
        assert [(entry["tenant_id"], entry["target"]) for entry in found] == [(acme, "poet")]
        assert "adapter.changed" in (await run("--limit", "1")).splitlines()[1]
        assert await run("--since", "2999-01-01", "--json") == []
