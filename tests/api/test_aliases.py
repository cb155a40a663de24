"""Aliases over REST and by command: moved by who has seen the last move, with a way back."""

import asyncio

import pytest
from command_line import command_line

pytestmark = pytest.mark.anyio
ALIASES = "/v1/adapters/poet/aliases"
PROD = f"{ALIASES}/prod"


@pytest.fixture(autouse=True)
async def versions(world):
    """`poet` of acme with three versions."""
    for _ in range(3):
        await world.add_adapter("acme", "poet")


@pytest.fixture
async def client(world):
    async with world.client() as client:
        yield client


async def move(client, version: int, revision: int, path: str = PROD):
    return await client.put(path, json={"version": version, "revision": revision})


async def key_id(world, secret: str) -> str:
    return (await world.app.state.context.keys.authenticate(world.db, secret)).key_id


async def test_an_alias_is_made_moved_and_answers_requests(client):
    made = await move(client, 1, 0)
    assert made.status_code == 200
    moved_at = made.json().pop("moved_at")
    assert made.json() == {
        "id": "poet@prod",
        "object": "adapter.alias",
        "name": "poet",
        "alias": "prod",
        "version": 1,
        "canary": None,
        "revision": 1,
        "moved_at": moved_at,
    }
    body = {"model": "poet@prod", "prompt": "a", "max_tokens": 1}
    assert (await client.post("/v1/completions", json=body)).json()["model"] == "poet@1"
    moved = (await move(client, 3, 1)).json()
    assert (moved["version"], moved["revision"]) == (3, 2)
    assert (await client.post("/v1/completions", json=body)).json()["model"] == "poet@3"
    assert (await client.get("/v1/models/poet@prod")).json()["id"] == "poet@prod"


async def test_aliases_are_listed_by_name(client):
    assert (await client.get(ALIASES)).json()["data"] == []
    prod = (await move(client, 3, 0)).json()
    beta = (await move(client, 2, 0, f"{ALIASES}/beta")).json()
    listed = (await client.get(ALIASES)).json()
    assert listed["data"] == [beta, prod]
    assert (listed["first_id"], listed["has_more"]) == ("poet@beta", False)


async def test_who_has_not_seen_the_last_move_is_told_the_revision(client):
    await move(client, 1, 0)
    await move(client, 2, 1)
    for stale in (0, 1, 3):
        for answer in (
            await move(client, 3, stale),
            await client.post(f"{PROD}/rollback", json={"revision": stale}),
            await client.delete(PROD, params={"revision": stale}),
        ):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (409, "alias_moved")
            assert (error["param"], error["revision"]) == ("revision", 2)
            assert "is at revision 2, not" in error["message"]
            assert answer.headers["x-should-retry"] == "false"
    assert (await client.get(ALIASES)).json()["data"][0]["version"] == 2


async def test_of_those_who_move_it_at_once_one_wins(client):
    answers = await asyncio.gather(*(move(client, i % 3 + 1, 0) for i in range(6)))
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 5
    (won,) = [answer.json() for answer in answers if answer.status_code == 200]
    assert (await client.get(ALIASES)).json()["data"] == [won]


async def test_moves_are_taken_back_and_remembered_with_who_made_them(world, client):
    writer = await world.make_key(world.tenants["acme"], "adapters:write")
    await move(client, 1, 0)
    await move(client, 3, 1)
    async with world.client(writer) as other:
        back = await other.post(f"{PROD}/rollback", json={"revision": 2})
        assert (back.json()["version"], back.json()["revision"]) == (1, 3)
        removed = await other.delete(PROD, params={"revision": 3})
    assert removed.json() == {"id": "poet@prod", "object": "adapter.alias", "deleted": True}
    assert (await client.get(ALIASES)).json()["data"] == []
    assert (await client.get("/v1/models/poet@prod")).status_code == 404
    acme, other = await key_id(world, world.keys["acme"]), await key_id(world, writer)
    moves = (await client.get(f"{PROD}/history")).json()
    assert [(each["id"], each["version"], each["moved_by"]) for each in moves["data"]] == [
        ("4", None, other),
        ("3", 1, other),
        ("2", 3, acme),
        ("1", 1, acme),
    ]
    assert moves["has_more"] is False


async def test_the_history_comes_in_pages(client):
    for revision in range(4):
        await move(client, revision % 3 + 1, revision)
    ids, more, params = [], True, {"limit": 2}
    while more:
        page = (await client.get(f"{PROD}/history", params=params)).json()
        ids += [each["id"] for each in page["data"]]
        more, params = page["has_more"], params | {"after": page["last_id"]}
    assert ids == ["4", "3", "2", "1"]


@pytest.mark.parametrize("body", [{"version": 1}, {"revision": 0}, {"version": "1", "revision": 0}])
async def test_a_move_that_leaves_something_out_is_refused(client, body):
    assert (await client.put(PROD, json=body)).status_code == 400
    assert (await client.delete(PROD)).json()["error"]["param"] == "revision"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (PROD, {"version": 0, "revision": 0}, 400, "version"),
        (PROD, {"version": 1, "revision": -1}, 400, "revision"),
        (PROD, {"version": 1, "revision": 2**31}, 400, "revision"),
        (PROD, {"version": 1, "revision": 0, "weight": 1}, 400, "weight"),
        (PROD, {"version": 4, "revision": 0}, 404, "version"),
        (f"{ALIASES}/latest", {"version": 1, "revision": 0}, 400, "alias"),
        (f"{ALIASES}/1", {"version": 1, "revision": 0}, 400, "alias"),
        (f"{ALIASES}/No%20Good", {"version": 1, "revision": 0}, 400, "alias"),
        ("/v1/adapters/none/aliases/prod", {"version": 1, "revision": 0}, 404, "model"),
        (f"{PROD}/rollback", {"revision": 0}, 404, "alias"),
    ],
)
async def test_a_move_that_cannot_be_is_refused(client, path, body, status, param):
    method = "POST" if path.endswith("rollback") else "PUT"
    answer = await client.request(method, path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert (await client.get(ALIASES)).json()["data"] == []


async def test_a_first_move_cannot_be_taken_back(client):
    await move(client, 1, 0)
    answer = await client.post(f"{PROD}/rollback", json={"revision": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")


async def test_a_tenant_neither_sees_nor_moves_anothers_aliases(world, client):
    await move(client, 1, 0)
    async with world.client("globex") as foreign:
        answers = [
            await foreign.get(ALIASES),
            await foreign.get(f"{PROD}/history"),
            await move(foreign, 2, 1),
            await foreign.post(f"{PROD}/rollback", json={"revision": 1}),
            await foreign.delete(PROD, params={"revision": 1}),
        ]
    assert {answer.status_code for answer in answers} == {404}
    assert (await client.get(ALIASES)).json()["data"][0]["revision"] == 1


async def test_an_operator_moves_it_for_a_tenant_that_it_names(world):
    async with world.client("operator") as operator:
        body, params = {"version": 2, "revision": 0}, {"tenant_id": world.tenants["acme"]}
        assert (await operator.put(PROD, json=body)).json()["error"]["param"] == "tenant_id"
        assert (await operator.put(PROD, json=body, params=params)).status_code == 200
        moves = (await operator.get(f"{PROD}/history", params=params)).json()["data"]
    assert [each["moved_by"] for each in moves] == [await key_id(world, world.keys["operator"])]


async def test_the_routes_are_described_with_examples(world):
    async with world.client(None) as stranger:
        described = (await stranger.get("/openapi.json")).json()
    routes = {path: each for path, each in described["paths"].items() if "/aliases" in path}
    operations = {
        (method, path): operation
        for path, operations in routes.items()
        for method, operation in operations.items()
    }
    assert len(operations) == 7
    for (method, path), operation in operations.items():
        for parameter in operation["parameters"]:
            if parameter.get("required"):
                assert parameter["schema"]["examples"], path
        assert "404" in operation["responses"]
        if method != "get":
            refused = operation["responses"]["409"]["content"]["application/json"]["example"]
            assert refused["error"]["code"] == "alias_moved"
    schemas = described["components"]["schemas"]
    for name in ("AliasIn", "CanaryIn", "SeenIn", "AliasOut", "AliasMoveOut", "CanaryOut"):
        fields = schemas[name]["properties"]
        assert all("examples" in field or "const" in field for field in fields.values()), name


@pytest.fixture
async def run(world):
    """Run `loraplex adapters alias …` against the app, beside it; returns what it printed."""
    async with command_line(world, "acme", "adapters", "alias") as run:
        yield run


async def test_the_commands_set_roll_back_list_and_remove(run):
    made = await run("set", "poet", "prod", "1", "--json")
    assert (made["id"], made["version"], made["revision"]) == ("poet@prod", 1, 1)
    moved = await run("set", "poet", "prod", "3", "--revision", "1", "--json")
    assert (moved["version"], moved["revision"]) == (3, 2)
    back = await run("rollback", "poet", "prod", "--json")
    assert (back["version"], back["revision"]) == (1, 3)
    assert await run("list", "poet", "--json") == [back]
    assert (await run("list", "poet")).splitlines()[1].split()[:4] == ["poet@prod", "1", "–", "3"]
    assert await run("rm", "poet", "prod") == "poet@prod is removed\n"
    assert await run("list", "poet", "--json") == []
    moves = await run("history", "poet", "prod", "--json")
    assert [each["version"] for each in moves] == [None, 1, 3, 1]
    assert "–" in await run("history", "poet", "prod")


async def test_the_commands_split_promote_and_abort(run):
    split = ("set", "poet", "prod", "1", "--canary", "2", "--percent", "12.5")
    made = await run(*split, "--json")
    assert made["canary"] == {"version": 2, "percent": 12.5}
    assert "version=2 percent=12.5" in await run("list", "poet")
    promoted = await run("promote", "poet", "prod", "--json")
    assert (promoted["version"], promoted["canary"]) == (2, None)
    await run("rollback", "poet", "prod")
    aborted = await run("abort", "poet", "prod", "--json")
    assert (aborted["version"], aborted["canary"], aborted["revision"]) == (1, None, 4)
    assert "no canary" in await run("abort", "poet", "prod", code=1)
    assert "go together" in await run("set", "poet", "prod", "1", "--canary", "2", code=1)


async def test_a_command_says_why_nothing_was_moved(run):
    await run("set", "poet", "prod", "1")
    said = await run("set", "poet", "prod", "2", "--revision", "0", code=1)
    assert "poet@prod is at revision 1, not 0" in said
    assert "does not exist" in await run("rollback", "poet", "beta", code=1)
    assert "lower-case letters" in await run("set", "poet", "No Good?", "2", code=1)
