"""Users of the pages: roles, passwords that are never kept, and invitations that work once."""

import asyncio
from collections.abc import Callable
from datetime import timedelta

import argon2
import pytest
from made_keys import audited
from sqlalchemy import select

from loraplex.platform import passwords
from loraplex.platform.audit import SYSTEM, Actor
from loraplex.platform.db.models import Tenant, User
from loraplex.platform.db.session import Database
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import BadRequest, Conflict, NameConflict, NotFound
from loraplex.platform.key_terms import SCOPES
from loraplex.platform.peppers import Peppers
from loraplex.platform.sign_in import LONGEST, invite, redeem, verify
from loraplex.platform.tenants import set_suspended
from loraplex.platform.users import (
    ROLES,
    change_role,
    create_user,
    get_user,
    list_users,
    principal_of,
    scopes_of,
    set_disabled,
    set_password,
)

pytestmark = pytest.mark.anyio
PEPPERS = Peppers(b"a pepper for tests")
PASSWORD = "correct horse battery staple"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Argon2 with the least work: what is tested is what is done with its hashes."""
    cheap = argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    monkeypatch.setattr(passwords, "_HASHER", cheap)
    passwords._nobodys.cache_clear()


async def make(db: Database, tenant_id: str | None, name: str, role: str = "admin") -> User:
    async with db.session(tenant_id) as session:
        return await create_user(session, tenant_id, name, role, actor=SYSTEM)


async def give_password(db: Database, user: User, password: str = PASSWORD) -> None:
    hashed = await passwords.hash_password(password)
    async with db.session(None) as session:
        await set_password(session, user.id, hashed, actor=SYSTEM)


async def invited(db: Database, user: User, lasts: timedelta = timedelta(hours=1)) -> str:
    async with db.session(None) as session:
        return (await invite(session, PEPPERS, user.id, lasts, actor=SYSTEM))[0]


def test_each_role_has_scopes_that_exist() -> None:
    assert all(set(scopes_of(role)) <= set(SCOPES) for role in ROLES)
    assert scopes_of("viewer") == ("adapters:read",)
    assert set(scopes_of("admin")) == set(SCOPES)
    assert "infer" not in scopes_of("operator")


async def test_a_user_calls_with_the_scopes_of_their_role(db: Database, acme: Tenant) -> None:
    root = principal_of(await make(db, None, "root", "operator"), None)
    assert (root.is_operator, root.is_user, root.tenant_id) == (True, True, None)
    admin = principal_of(await make(db, acme.id, "ada"), acme)
    assert (admin.is_operator, admin.scopes) == (False, set(SCOPES))
    viewer = await make(db, acme.id, "vera", "viewer")
    assert principal_of(viewer, acme).key_id == viewer.id


@pytest.mark.parametrize(
    ("name", "role", "of_tenant", "param"),
    [
        ("", "admin", True, "name"),
        ("No Spaces", "admin", True, "name"),
        ("x" * 64, "admin", True, "name"),
        ("ada\n", "admin", True, "name"),
        ("ada", "operator", True, "role"),
        ("ada", "admin", False, "role"),
        ("ada", "viewer", False, "role"),
    ],
)
async def test_a_user_that_cannot_be_is_refused(
    db: Database, acme: Tenant, name: str, role: str, of_tenant: bool, param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        await make(db, acme.id if of_tenant else None, name, role)
    assert caught.value.param == param


async def test_a_name_is_taken_once_whoever_asks(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    await make(db, acme.id, "ada@example.org")
    for tenant_id, role in ((acme.id, "admin"), (globex.id, "viewer"), (None, "operator")):
        with pytest.raises(NameConflict):
            await make(db, tenant_id, "ada@example.org", role)
    with pytest.raises(NotFound):
        await make(db, "ten_none", "bob")
    async with db.read(None) as session:
        assert len((await session.scalars(select(User))).all()) == 1


async def test_a_tenant_sees_and_changes_its_own_users_only(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    mine = [await make(db, acme.id, f"u{i}") for i in range(3)]
    others = [await make(db, globex.id, "theirs"), await make(db, None, "root", "operator")]
    async with db.read(acme.id) as session:
        page = await list_users(session, limit=2)
        rest = await list_users(session, after=page.items[-1].id)
        assert [user.id for user in (*page.items, *rest.items)] == [user.id for user in mine]
    for other in others:
        for change in (
            lambda s, i: set_disabled(s, i, True, actor=SYSTEM),
            lambda s, i: change_role(s, i, "viewer", actor=SYSTEM),
            lambda s, i: set_password(s, i, "x", actor=SYSTEM),
            lambda s, i: invite(s, PEPPERS, i, timedelta(hours=1), actor=SYSTEM),
            get_user,
        ):
            with pytest.raises(NotFound):
                async with db.session(acme.id) as session:
                    await change(session, other.id)


async def test_a_role_changes_within_the_tenant(db: Database, acme: Tenant) -> None:
    user = await make(db, acme.id, "ada")
    async with db.session(acme.id) as session:
        assert (await change_role(session, user.id, "viewer", actor=SYSTEM)).role == "viewer"
    with pytest.raises(BadRequest):
        async with db.session(None) as session:
            await change_role(session, user.id, "operator", actor=SYSTEM)


async def test_the_right_password_signs_in_and_no_other(db: Database, acme: Tenant) -> None:
    user = await make(db, acme.id, "ada")
    assert await verify(db, "ada", PASSWORD) is None  # none was set
    await give_password(db, user)
    before = utc_now()
    signed_in = await verify(db, "ada", PASSWORD)
    assert (signed_in.id, signed_in.signed_in_at >= before) == (user.id, True)
    for name, password in (
        ("ada", PASSWORD + " "),
        ("ada", ""),
        ("ada", PASSWORD * 20),
        ("bob", PASSWORD),
        ("\0", PASSWORD),
    ):
        assert await verify(db, name, password) is None


async def test_a_password_is_the_same_however_it_was_typed(db: Database, acme: Tenant) -> None:
    await give_password(db, await make(db, acme.id, "ada"), "caf\u00e9 noir caf\u00e9 au lait")
    assert await verify(db, "ada", "cafe\u0301 noir cafe\u0301 au lait") is not None


@pytest.mark.parametrize("password", ["", "x" * 14, "x" * 257])
async def test_a_password_has_a_length(password: str) -> None:
    with pytest.raises(BadRequest) as caught:
        await passwords.hash_password(password)
    assert caught.value.param == "password"


async def test_an_unknown_name_costs_as_much_as_a_known_one(
    db: Database, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await give_password(db, await make(db, acme.id, "ada"))
    await verify(db, "bob", PASSWORD)
    worked: list[str] = []
    work = passwords._HASHER.verify

    class Counted:
        def verify(self, stored: str, password: str) -> bool:
            worked.append(stored.rpartition("$")[0].rpartition("$")[0])
            return work(stored, password)

    monkeypatch.setattr(passwords, "_HASHER", Counted())
    for name in ("ada", "bob"):
        assert await verify(db, name, "wrong") is None
    assert len(worked) == 2
    assert len(set(worked)) == 1  # the same parameters


async def test_a_hash_of_older_parameters_is_made_anew(
    db: Database, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = await make(db, acme.id, "ada")
    await give_password(db, user)
    stronger = argon2.PasswordHasher(time_cost=2, memory_cost=8, parallelism=1)
    monkeypatch.setattr(passwords, "_HASHER", stronger)
    assert "t=2" in (await verify(db, "ada", PASSWORD)).password
    assert await verify(db, "ada", PASSWORD) is not None


async def test_a_user_who_may_not_sign_in_does_not(db: Database, acme: Tenant) -> None:
    user = await make(db, acme.id, "ada")
    await give_password(db, user)
    token = await invited(db, user)

    async def may() -> list[bool]:
        return [await verify(db, "ada", PASSWORD) is not None, await redeem_copy() is not None]

    async def redeem_copy() -> User | None:
        return await redeem(db, PEPPERS, token)

    async with db.session(None) as session:
        await set_disabled(session, user.id, True, actor=SYSTEM)
    assert await may() == [False, False]
    with pytest.raises(Conflict):
        await invited(db, user)
    async with db.session(None) as session:
        await set_disabled(session, user.id, False, actor=SYSTEM)
        await set_suspended(session, acme.id, True, actor=SYSTEM)
    assert await may() == [False, False]
    async with db.session(None) as session:
        await set_suspended(session, acme.id, False, actor=SYSTEM)
    assert await redeem_copy() is not None
    assert await verify(db, "ada", PASSWORD) is not None


async def test_an_invitation_works_once_however_many_come_at_once(
    db: Database, acme: Tenant
) -> None:
    user = await make(db, acme.id, "ada")
    token = await invited(db, user)
    results = await asyncio.gather(*(redeem(db, PEPPERS, token) for _ in range(4)))
    assert [found.id for found in results if found] == [user.id]
    assert await redeem(db, PEPPERS, await invited(db, user)) is not None


async def test_an_invitation_dies_with_a_sign_in_a_password_and_time(
    db: Database, acme: Tenant
) -> None:
    user = await make(db, acme.id, "ada")
    first = await invited(db, user)
    await give_password(db, user)
    assert await redeem(db, PEPPERS, first) is None
    second = await invited(db, user)
    assert await verify(db, "ada", PASSWORD) is not None
    assert await redeem(db, PEPPERS, second) is None
    past = await invited(db, user, timedelta(microseconds=1))  # ends within this second
    assert await redeem(db, PEPPERS, past) is None
    for lasts in (timedelta(0), LONGEST + timedelta(seconds=1)):
        with pytest.raises(BadRequest):
            await invited(db, user, lasts)


CHANGES: dict[str, Callable[[str], str]] = {
    "empty": lambda _: "",
    "another user": lambda token: f"usr_{'0' * 26}{token[30:]}",
    "later": lambda token: token.replace(token.split(".")[1], "9999999999"),
    "another end": lambda token: token[:-1] + ("0" if token[-1] != "0" else "1"),
    "cut": lambda token: token[:-1],
    "more": lambda token: token + "\n",
    "not ascii": lambda token: token[:-1] + "é",
}


async def test_a_changed_invitation_is_none(db: Database, acme: Tenant) -> None:
    user = await make(db, acme.id, "ada")
    token = await invited(db, user)
    for name, change in CHANGES.items():
        assert await redeem(db, PEPPERS, change(token)) is None, name
    assert await redeem(db, Peppers(b"another pepper"), token) is None
    assert await redeem(db, Peppers(b"a newer", [b"a pepper for tests"]), token) is not None


async def test_every_change_of_a_user_is_audited_without_a_secret(
    db: Database, acme: Tenant
) -> None:
    actor = Actor("key_someone", "req_1")
    hashed = await passwords.hash_password(PASSWORD)
    async with db.session(acme.id) as session:
        user = await create_user(session, acme.id, "ada", "admin", actor=actor)
        for _ in range(2):
            await change_role(session, user.id, "viewer", actor=actor)
            await set_disabled(session, user.id, True, actor=actor)
        for _ in range(2):
            await set_disabled(session, user.id, False, actor=actor)
        await set_password(session, user.id, hashed, actor=actor)
        token, ends = await invite(session, PEPPERS, user.id, timedelta(hours=1), actor=actor)
    entries = [entry for entry in await audited(db) if entry.target == user.id]
    assert [(entry.action, entry.details) for entry in entries] == [
        ("user.created", {"name": "ada", "role": "admin"}),
        ("user.changed", {"role": "viewer"}),
        ("user.disabled", {}),
        ("user.changed", {"disabled": False}),
        ("user.changed", {"password": True}),
        ("user.changed", {"invited_until": ends}),
    ]
    told = "".join(str(vars(entry)) for entry in entries)
    assert token.rpartition(".")[2] not in told
    assert hashed not in told
