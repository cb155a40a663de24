"""The commands of tenants, keys and users against an API behind a real socket."""

import argon2
import pytest
from command_line import command_line

from loraplex.platform import passwords
from loraplex.platform.sign_in import verify

pytestmark = pytest.mark.anyio
PASSWORD = "correct horse battery staple"


@pytest.fixture
async def run(world, tmp_path, monkeypatch):
    """Run a command with the operator's key; returns its output once its exit code is checked."""
    cheap = argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    monkeypatch.setattr(passwords, "_HASHER", cheap)
    async with command_line(world, "operator") as run:
        yield run


async def test_keys_are_created_shown_changed_rotated_and_revoked(world, run):
    words = ("keys", "create", "desk", "--tenant", world.tenants["acme"], "--adapter", "support")
    made = await run(*words, "--tokens-per-day", "1000", "--days", "3", "--json")
    assert (made["scopes"], made["adapters"]) == (["infer"], ["support"])
    assert (made["tokens_per_day"], made["secret"].startswith("lpx_")) == (1000, True)
    key = made["id"]
    lifted = ("--lift", "adapters", "--lift", "expires-at", "--tokens-per-day", "unlimited")
    changed = await run("keys", "change", key, "--name", "new", *lifted, "--json")
    assert [changed[name] for name in ("name", "adapters", "expires_at", "tokens_per_day")] == [
        "new",
        None,
        None,
        None,
    ]
    shown = await run("keys", "show", key)
    assert "new" in shown
    assert made["secret"] not in shown
    rotated = await run("keys", "rotate", key, "--overlap-s", "60", "--json")
    assert (rotated["rotated_from"], rotated["secret"] != made["secret"]) == (key, True)
    assert "already" in await run("keys", "rotate", key, code=1)
    assert await run("keys", "revoke", key) == f"{key} is revoked\n"
    listed = await run("keys", "list", "--tenant", world.tenants["acme"])
    assert key in listed
    assert rotated["id"] in listed
    assert (await run("keys", "create", "second", "--json"))["scopes"] == ["admin"]


async def test_tenants_and_users_are_said_by_name(world, run):
    made = await run("keys", "create", "by name", "--tenant", "acme", "--json")
    assert made["tenant_id"] == world.tenants["acme"]
    assert [
        made["id"] in await run("keys", "list", "--tenant", name) for name in world.tenants
    ] == [name == "acme" for name in world.tenants]
    assert await run("tenants", "suspend", "acme") == "acme is suspended\n"
    assert (await run("tenants", "limits", "acme", "--json"))["suspended"] is True
    user = await run("users", "create", "ada", "--tenant", "globex", "--json")
    assert (await run("users", "invite", "ada", "--json"))["user_id"] == user["id"]
    assert "no tenant 'initech'" in await run("tenants", "limits", "initech", code=1)
    assert "no user 'bob'" in await run("users", "invite", "bob", code=1)


async def test_one_thing_is_shown_line_by_line_and_several_as_a_table(world, run):
    lines = (await run("tenants", "limits", "acme", "--kv-share", "0.5")).splitlines()
    assert lines[1:3] == ["name:                 acme", "suspended:            no"]
    assert "kv share:             0.5" in lines
    assert (await run("tenants", "list")).splitlines()[0].split()[:2] == ["id", "name"]


async def test_tenants_are_created_limited_and_suspended(world, run):
    made = await run("tenants", "create", "initech", "--tokens-per-day", "1000", "--json")
    tenant = made["id"]
    assert (made["tokens_per_day"], made["weight"]) == (1000, 1.0)
    words = ("--storage-bytes", "5", "--tokens-per-day", "unlimited", "--kv-share", "0.5", "--json")
    changed = await run("tenants", "limits", tenant, *words)
    assert [changed[name] for name in ("storage_bytes", "tokens_per_day", "kv_share")] == [
        5,
        None,
        0.5,
    ]
    assert await run("tenants", "limits", tenant, "--json") == changed | {"service": None}
    assert await run("tenants", "suspend", tenant) == f"{tenant} is suspended\n"
    (row,) = [row for row in await run("tenants", "list", "--json") if row["id"] == tenant]
    assert row["suspended"] is True
    assert await run("tenants", "resume", tenant) == f"{tenant} is resumed\n"
    for bad in ("many", "-1", "1.5"):
        assert "unlimited" in await run("tenants", "limits", tenant, "--max-running", bad, code=2)


async def test_users_are_created_invited_and_disabled_and_passwords_are_not_arguments(world, run):
    made = await run("users", "create", "ada", "--tenant", world.tenants["acme"], "--json")
    user = made["id"]
    assert (await run("users", "role", user, "admin", "--json"))["role"] == "admin"
    invited = await run("users", "invite", user, "--lasts-s", "60", "--json")
    assert invited["secret"].startswith(f"{user}.")
    said = await run("users", "password", user, typed=f"{PASSWORD}\n")
    assert said == f"the password of {user} is set\n"
    assert (await verify(world.db, "ada", PASSWORD)).id == user
    assert await run("users", "disable", user) == f"{user} is disabled\n"
    assert await verify(world.db, "ada", PASSWORD) is None
    assert await run("users", "enable", user) == f"{user} is enabled\n"
    assert user in await run("users", "list")
    assert "15 to 256" in await run("users", "password", user, typed="short\n", code=1)
    assert (await run("users", "create", "root", "--json"))["role"] == "operator"
