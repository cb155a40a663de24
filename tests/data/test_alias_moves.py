"""Aliases move by compare-and-swap, remember their moves and take the last one back."""

import asyncio

import pytest
from sqlalchemy.exc import IntegrityError

from loraplex.platform import aliases, registry, resolving
from loraplex.platform.audit import SYSTEM, Actor
from loraplex.platform.db.models import Alias, Tenant
from loraplex.platform.db.session import Database
from loraplex.platform.errors import BadRequest, Conflict, ModelNotFound

pytestmark = pytest.mark.anyio
BASE = "Base"


@pytest.fixture(autouse=True)
async def versions(db: Database, acme: Tenant, globex: Tenant) -> None:
    """`poet` of each tenant, acme's with three versions and globex's with one."""
    for tenant, count in ((acme, 3), (globex, 1)):
        for number in range(1, count + 1):
            await publish(db, tenant, f"{tenant.name}-{number}")


async def publish(db: Database, tenant: Tenant, digest: str) -> None:
    async with db.session(tenant.id) as session:
        report = {"rank": 8, "bytes": 1024}
        await registry.add_version(
            session,
            tenant.id,
            "poet",
            digest=digest,
            base="f",
            base_name=BASE,
            report=report,
            actor=SYSTEM,
        )


async def move(
    db: Database, tenant: Tenant, number: int, seen: int, alias: str = "prod", name: str = "poet"
) -> Alias:
    async with db.session(tenant.id) as session:
        return await aliases.move_alias(
            session, tenant.id, name, alias, number, seen=seen, actor=Actor("key_1")
        )


async def roll_back(db: Database, tenant: Tenant, seen: int) -> Alias:
    async with db.session(tenant.id) as session:
        return await aliases.roll_back(
            session, tenant.id, "poet", "prod", seen=seen, actor=Actor("key_2")
        )


async def remove(db: Database, tenant: Tenant, seen: int) -> None:
    async with db.session(tenant.id) as session:
        await aliases.remove_alias(
            session, tenant.id, "poet", "prod", seen=seen, actor=Actor("key_3")
        )


async def delete(db: Database, tenant: Tenant) -> None:
    async with db.session(tenant.id) as session:
        await registry.delete_adapter(session, tenant.id, "poet", actor=SYSTEM)


async def meaning(db: Database, tenant: Tenant, model: str = "poet@prod") -> str:
    async with db.read(tenant.id) as session:
        return (await resolving.resolve(session, tenant.id, model, BASE)).model_id


async def moves(db: Database, tenant: Tenant, **page: int) -> list[tuple[int, int | None, str]]:
    async with db.read(tenant.id) as session:
        found = await aliases.list_moves(session, tenant.id, "poet", "prod", **page)
    return [(move.revision, move.number, move.moved_by) for move in found]


async def listed(db: Database, tenant: Tenant) -> dict[str, tuple[int | None, int]]:
    async with db.read(tenant.id) as session:
        found = await aliases.list_aliases(session, tenant.id, "poet")
    return {alias.name: (alias.number, alias.revision) for alias in found}


async def test_an_alias_means_the_version_it_was_moved_to(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    await move(db, acme, 1, seen=0)
    assert await meaning(db, acme) == "poet@1"
    await move(db, acme, 3, seen=1)
    await move(db, acme, 2, seen=0, alias="beta")
    await move(db, globex, 1, seen=0)
    assert await meaning(db, acme) == "poet@3"
    assert await meaning(db, acme, "poet@beta") == "poet@2"
    assert await meaning(db, globex) == "poet@1"
    assert await listed(db, acme) == {"beta": (2, 1), "prod": (3, 2)}
    assert await listed(db, globex) == {"prod": (1, 1)}
    with pytest.raises(ModelNotFound):
        await meaning(db, globex, "poet@beta")


async def test_who_has_not_seen_the_last_move_is_refused(db: Database, acme: Tenant) -> None:
    await move(db, acme, 1, seen=0)
    await move(db, acme, 2, seen=1)
    for seen in (0, 1, 3):
        with pytest.raises(Conflict, match="revision 2") as caught:
            await move(db, acme, 3, seen=seen)
        assert (caught.value.code, caught.value.param) == ("alias_moved", "revision")
        for change in (roll_back, remove):
            with pytest.raises(Conflict, match="revision 2"):
                await change(db, acme, seen)
    assert await meaning(db, acme) == "poet@2"
    assert len(await moves(db, acme)) == 2


@pytest.mark.parametrize("seen", [0, 1])
async def test_of_those_who_move_it_at_once_one_wins(db: Database, acme: Tenant, seen: int) -> None:
    if seen:
        await move(db, acme, 1, seen=0)
    tries = (move(db, acme, number % 3 + 1, seen=seen) for number in range(8))
    results = await asyncio.gather(*tries, return_exceptions=True)
    (won,) = [result for result in results if isinstance(result, Alias)]
    assert sum(isinstance(result, Conflict) for result in results) == 7
    assert await listed(db, acme) == {"prod": (won.number, seen + 1)}
    assert [revision for revision, *_ in await moves(db, acme)] == list(range(seen + 1, 0, -1))


async def test_the_last_move_is_taken_back_and_back_again(db: Database, acme: Tenant) -> None:
    await move(db, acme, 1, seen=0)
    await move(db, acme, 3, seen=1)
    assert (await roll_back(db, acme, 2)).number == 1
    assert await meaning(db, acme) == "poet@1"
    assert (await roll_back(db, acme, 3)).number == 3
    assert await moves(db, acme) == [
        (4, 3, "key_2"),
        (3, 1, "key_2"),
        (2, 3, "key_1"),
        (1, 1, "key_1"),
    ]
    assert await moves(db, acme, before=3, limit=1) == [(2, 3, "key_1")]


async def test_a_first_move_cannot_be_taken_back(db: Database, acme: Tenant) -> None:
    with pytest.raises(ModelNotFound):
        await roll_back(db, acme, 0)
    await move(db, acme, 1, seen=0)
    with pytest.raises(Conflict, match="no version to go back to"):
        await roll_back(db, acme, 1)


async def test_a_removed_alias_means_nothing_and_its_revisions_go_on(
    db: Database, acme: Tenant
) -> None:
    await move(db, acme, 1, seen=0)
    await remove(db, acme, 1)
    assert await listed(db, acme) == {}
    with pytest.raises(ModelNotFound):
        await meaning(db, acme)
    with pytest.raises(ModelNotFound):
        await remove(db, acme, 0)
    assert (await move(db, acme, 2, seen=0)).revision == 3
    assert await moves(db, acme) == [(3, 2, "key_1"), (2, None, "key_3"), (1, 1, "key_1")]
    with pytest.raises(Conflict, match="no version to go back to"):
        await roll_back(db, acme, 3)


async def test_a_deleted_adapters_aliases_do_not_come_back_with_its_name(
    db: Database, acme: Tenant
) -> None:
    await move(db, acme, 1, seen=0)
    await move(db, acme, 2, seen=1)
    await delete(db, acme)
    for call in (meaning, listed, moves):
        with pytest.raises(ModelNotFound):
            await call(db, acme)
    await publish(db, acme, "acme-4")
    with pytest.raises(ModelNotFound):
        await meaning(db, acme)
    assert await listed(db, acme) == {}
    assert (await move(db, acme, 4, seen=0)).revision == 3
    with pytest.raises(Conflict, match="no version to go back to"):
        await roll_back(db, acme, 3)


async def test_an_alias_needs_a_version_that_is_there(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    for tenant, number, name in ((acme, 4, "poet"), (acme, 1, "none"), (globex, 2, "poet")):
        with pytest.raises(ModelNotFound):
            await move(db, tenant, number, seen=0, name=name)
    with pytest.raises(ModelNotFound):
        async with db.session(globex.id) as session:
            await aliases.move_alias(
                session, acme.id, "poet", "prod", 1, seen=0, actor=Actor("key_1")
            )


async def test_the_grammar_of_aliases(db: Database, acme: Tenant) -> None:
    for alias in ("", "1", "1a", "-a", "A", "a b", "a@b", "a\0", "latest", "a" * 64):
        with pytest.raises(BadRequest) as caught:
            await move(db, acme, 1, seen=0, alias=alias)
        assert caught.value.param == "alias"
    for alias in ("a", "v1.2_rc-3", "a" * 63):
        await move(db, acme, 1, seen=0, alias=alias)
        assert await meaning(db, acme, f"poet@{alias}") == "poet@1"


async def test_an_adapter_has_so_many_aliases(
    db: Database, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aliases, "MAX_ALIASES", 2)
    await move(db, acme, 1, seen=0, alias="a")
    await move(db, acme, 1, seen=0, alias="b")
    with pytest.raises(BadRequest, match="at most 2"):
        await move(db, acme, 1, seen=0, alias="c")
    await move(db, acme, 2, seen=1, alias="b")


async def test_the_database_itself_refuses_an_alias_to_nothing(db: Database, acme: Tenant) -> None:
    with pytest.raises(IntegrityError):
        async with db.session(acme.id) as session:
            adapter = await registry.get_adapter(session, acme.id, "poet")
            session.add(Alias(adapter_id=adapter.id, name="prod", number=9, revision=1))
