"""A key that is bound to adapters and writes, as CI has one: its own adapters, and no others."""

import dataclasses
import re

import pytest
from access_table import READ, TABLE, WRITE
from upload_kit import CONFIG, PATH, at, begin, finish

pytestmark = pytest.mark.anyio
ADAPTER = "/v1/adapters/{name}"
VERSION, ALIAS = f"{ADAPTER}/versions/{{number}}", f"{ADAPTER}/aliases/{{alias}}"
UPLOAD = f"{PATH}/{{upload_id}}"
PART = f"{UPLOAD}/parts/{{part}}"
SPLIT = {"version": 1, "canary": {"version": 2, "percent": 50.0}, "revision": 0}
FILES = {"adapter_config": ("c", CONFIG), "adapter_model": ("m", b"ok")}

LISTS = {("GET", "/v1/adapters"), ("GET", PATH), ("GET", "/v1/models")}
REFUSED = {  # even for its own: who may use an adapter and whether it is there is not CI's to say
    ("PATCH", ADAPTER),
    ("DELETE", ADAPTER),
    ("POST", "/v1/unload_lora_adapter"),
    ("GET", "/v1/bases"),
    ("GET", "/v1/bases/stale"),
    ("GET", "/v1/storage"),
}


def does(name):
    """What it does to an adapter that has two versions, as routes and options, in this order."""
    loads = {"lora_name": name, "lora_path": "poet", "load_inplace": True}
    return {
        ("GET", "/v1/models/{model:path}"): {},
        ("GET", ADAPTER): {},
        ("GET", f"{ADAPTER}/usage"): {},
        ("GET", f"{ADAPTER}/versions"): {},
        ("GET", VERSION): {},
        ("PUT", ALIAS): {"json": SPLIT},
        ("POST", f"{ALIAS}/promote"): {"json": {"revision": 1}},
        ("POST", f"{ALIAS}/rollback"): {"json": {"revision": 2}},
        ("POST", f"{ALIAS}/abort"): {"json": {"revision": 3}},
        ("GET", f"{ADAPTER}/aliases"): {},
        ("GET", f"{ALIAS}/history"): {},
        ("DELETE", ALIAS): {"params": {"revision": "4"}},
        ("POST", f"{VERSION}/retire"): {},
        ("POST", f"{VERSION}/restore"): {},
        ("DELETE", VERSION): {},
        ("POST", "/v1/adapters"): {"data": {"name": name}, "files": FILES},
        ("POST", "/v1/load_lora_adapter"): {"json": loads},
        ("POST", PATH): {"json": {"name": name, "alias": "prod"}},
        ("GET", UPLOAD): {},
        ("GET", PART): {},
        ("HEAD", PART): {},
        ("PUT", PART): {"content": b"", "headers": at(len(CONFIG))},
        ("POST", f"{UPLOAD}/finish"): {"params": {"wait": True}},
        ("DELETE", UPLOAD): {},
    }


@pytest.fixture
async def acme(world, tmp_path):
    """Its own client of all scopes, once it has two adapters and a folder to publish from."""
    root = tmp_path / "adapters" / "acme" / "poet"
    root.mkdir(parents=True)
    (root / "adapter_config.json").write_bytes(CONFIG)
    (root / "adapter_model.safetensors").write_text("ok")
    context = world.app.state.context
    allowed = context.settings.model_copy(update={"adapter_dir": tmp_path / "adapters"})
    world.app.state.context = dataclasses.replace(context, settings=allowed)
    for name in ("mine", "victim"):
        for digest in "ab":
            await world.add_adapter("acme", name, digest * 64)
    async with world.client("acme", timeout=60) as client:
        alias = {"version": 2, "revision": 0}
        await client.put("/v1/adapters/victim/aliases/prod", json=alias)
        yield client


@pytest.fixture
async def ci(world):
    """CI's client."""
    terms = {"adapters": ["mine", "fresh"]}
    secret = await world.make_key(world.tenants["acme"], READ, WRITE, **terms)
    async with world.client(secret, timeout=60) as client:
        yield client


async def ask(client, route, options, **ids):
    method, path = route
    ids |= {"alias": "prod", "number": "1", "part": "adapter_config", "model": ids["name"]}
    filled = re.sub(r"{(\w+)(:path)?}", lambda match: ids[match[1]], path)
    return await client.request(method, filled, **options)


async def facts(acme):
    """All that is to be seen of the adapter that CI's key is not bound to."""
    paths = ("", "/versions", "/aliases", "/aliases/prod/history")
    answers = [await acme.get(f"/v1/adapters/victim{path}") for path in paths]
    return [answer.text for answer in (*answers, await acme.get(PATH))]


def test_the_routes_that_take_more_than_infer_are_all_here():
    more = {route for route, row in TABLE.items() if row.needs & {READ, WRITE}}
    assert {*does("mine")} | LISTS | REFUSED == more


async def test_it_changes_its_own_adapters_as_the_table_says(ci, acme):
    upload, other = await begin(acme, name="mine"), await begin(acme, name="mine")
    for route, options in does("mine").items():
        which = other if route == ("DELETE", UPLOAD) else upload
        answer = await ask(ci, route, options, name="mine", upload_id=which)
        assert answer.is_success, (route, answer.text)
    assert (await ci.get(f"{PATH}/{upload}")).json()["state"] == "ready"
    for method, path in REFUSED:
        options = {"json": {"lora_name": "mine"}} if method == "POST" else {}
        options = {"json": {"visibility": "public"}} if method == "PATCH" else options
        answer = await ask(ci, (method, path), options, name="mine")
        assert answer.status_code == 403, (method, path)
    assert (await ci.get("/v1/adapters/mine")).json()["visibility"] == "private"


async def test_it_neither_changes_nor_sees_another_adapter(ci, acme):
    upload = await begin(acme, name="victim")
    before = await facts(acme)
    for route, options in does("victim").items():
        answer = await ask(ci, route, options, name="victim", upload_id=upload)
        assert answer.status_code in (403, 404), (route, answer.text)
        if route[0] == "GET":
            absent = await ask(acme, route, options, name="absent", upload_id="absent")
            told = answer.text.replace("victim", "absent").replace(upload, "absent")
            assert (answer.status_code, told) == (404, absent.text), route
    for _, path in LISTS:
        listed = await ci.get(path)
        assert (listed.status_code, "victim" in listed.text) == (200, False)
    assert [row["name"] for row in (await ci.get("/v1/adapters")).json()["data"]] == ["mine"]
    assert await facts(acme) == before


async def test_it_makes_an_adapter_of_a_name_in_its_list_and_of_no_other(ci, acme):
    done = await finish(ci, await begin(ci, name="fresh", alias="prod"))
    assert (done["state"], done["version"]) == ("ready", "fresh@1")
    for name in ("mine2", "min", "MINE", "acme/mine", "mine@1", ""):
        form = await ci.post("/v1/adapters", data={"name": name}, files=FILES)
        parts = await ci.post(PATH, json={"name": name})
        assert (form.status_code, parts.status_code) == (403, 403), name
    assert {row["name"] for row in (await acme.get("/v1/adapters")).json()["data"]} == {
        "fresh",
        "mine",
        "victim",
    }


async def test_it_does_what_its_scopes_say_and_no_more(world, acme):
    """A key of one scope, bound; and one that infers too, whose reach is the same everywhere."""
    tenant, terms = world.tenants["acme"], {"adapters": ["mine"]}
    async with world.client(await world.make_key(tenant, READ, **terms)) as reader:
        assert (await reader.get("/v1/adapters/mine")).status_code == 200
        assert (await reader.post(PATH, json={"name": "mine"})).status_code == 403
    async with world.client(await world.make_key(tenant, "infer", WRITE, **terms)) as writer:
        asked = {"prompt": "a", "max_tokens": 1}
        for name, status in (("mine", 200), ("victim", 404), ("tiny-base", 404)):
            answer = await writer.post("/v1/completions", json=asked | {"model": name})
            assert answer.status_code == status
        assert (await writer.post(PATH, json={"name": "victim"})).status_code == 403
        assert (await writer.get("/v1/adapters/mine")).status_code == 403
