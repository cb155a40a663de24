"""The commands of adapters' terms, versions and bases against an API behind a real socket."""

import pytest
from command_line import command_line

from loraplex.platform import bases

pytestmark = pytest.mark.anyio


@pytest.fixture
async def run(world):
    """Run a command as acme, who has three versions of `poet`; returns what it printed."""
    for digest in "abc":
        await world.add_adapter("acme", "poet", digest * 64)
    async with command_line(world, "acme") as run:
        yield run


async def test_an_adapter_is_shown_changed_shared_and_taken_back(world, run):
    terms = ("--description", "in verse", "--tokens-per-day", "1000")
    shared = ("--visibility", "shared", "--share", "globex")
    changed = await run("adapters", "change", "poet", *terms, *shared, "--json")
    assert (changed["description"], changed["tokens_per_day"]) == ("in verse", 1000)
    assert (changed["visibility"], changed["shared_with"]) == (
        "shared",
        [world.tenants["globex"]],
    )
    assert await run("adapters", "show", "poet", "--json") == changed
    async with world.client("globex") as caller:
        body = {"model": "acme/poet", "prompt": "a", "max_tokens": 1}
        assert (await caller.post("/v1/completions", json=body)).status_code == 200
    (use,) = await run("adapters", "uses", "poet", "--since", "2020-01-01", "--json")
    assert (use["tenant"], use["requests"]) == ("globex", 1)
    assert await run("adapters", "uses", "poet", "--since", "2999-01-01", "--json") == []
    lifts = ("--lift", "shared-with", "--lift", "tokens-per-day", "--lift", "description")
    lifted = await run("adapters", "change", "poet", *lifts, "--json")
    assert (lifted["shared_with"], lifted["tokens_per_day"], lifted["description"]) == (
        [],
        None,
        None,
    )
    assert "no tenant" in await run("adapters", "change", "poet", "--share", "nobody", code=1)


async def test_versions_are_listed_retired_restored_and_removed(run):
    listed = await run("adapters", "versions", "list", "poet", "--json")
    assert [version["id"] for version in listed] == ["poet@3", "poet@2", "poet@1"]
    assert (await run("adapters", "versions", "retire", "poet", "3", "--json"))["retired_at"]
    assert (await run("adapters", "show", "poet", "--json"))["version"] == 2
    await run("adapters", "versions", "restore", "poet", "3")
    assert "bf16" in await run("adapters", "versions", "show", "poet", "3")
    assert await run("adapters", "versions", "rm", "poet", "3") == "poet@3 is removed\n"
    assert "does not exist" in await run("adapters", "versions", "show", "poet", "3", code=1)


async def test_bases_are_listed(world, run):
    async with world.db.session(None) as session:
        await bases.note_served(session, world.base, "bfloat16")
    (base,) = await run("bases", "list", "--json")
    assert (base["name"], base["serving"], base["versions"]) == ("tiny-base", True, 3)
    assert await run("bases", "stale", "--json") == []
