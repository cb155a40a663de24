"""Who may use whose adapter, by which name, and what is left when it is taken back."""

from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import select

from loraplex.platform import audit, bases, registry, resolving, sharing
from loraplex.platform.audit import SYSTEM
from loraplex.platform.db.models import Adapter, AdapterShare, ApiKey, Tenant, UsageRecord
from loraplex.platform.db.session import Database
from loraplex.platform.errors import BadRequest, ModelNotFound, NotFound
from loraplex.platform.keys import KeyRing
from loraplex.platform.quotas import Limits
from loraplex.platform.resolving import Resolved
from loraplex.platform.tenants import create_tenant, set_suspended

pytestmark = pytest.mark.anyio
BASE = "Base"


@pytest.fixture
async def initech(db: Database) -> Tenant:
    async with db.session(None) as session:
        return await create_tenant(session, "initech", actor=SYSTEM)


@pytest.fixture(autouse=True)
async def poet(db: Database, acme: Tenant) -> None:
    """acme's `poet` with two versions."""
    await publish(db, acme, "poet")
    await publish(db, acme, "poet")


async def publish(db: Database, tenant: Tenant, name: str) -> None:
    async with db.session(tenant.id) as session:
        await registry.add_version(
            session,
            tenant.id,
            name,
            digest=f"{tenant.name}-{name}",
            base="f" * 64,
            base_name=BASE,
            report={"rank": 8, "bytes": 1024},
            actor=SYSTEM,
        )


async def change(db: Database, tenant: Tenant, name: str = "poet", **changes: Any) -> Adapter:
    shared_with = changes.pop("shared_with", None)
    async with db.session(None) as session:
        return await sharing.change_adapter(
            session, tenant.id, name, changes, shared_with=shared_with, actor=SYSTEM
        )


async def resolve(db: Database, tenant: Tenant, model: str) -> Resolved:
    async with db.read(resolving.view(tenant.id, model)) as session:
        return await resolving.resolve(session, tenant.id, model, BASE)


async def may_use(db: Database, tenant: Tenant, model: str = "acme/poet") -> bool:
    try:
        return (await resolve(db, tenant, model)).digest == "acme-poet"
    except ModelNotFound:
        return False


async def listed(db: Database, tenant: Tenant, **page: Any) -> list[str]:
    async with db.read(None) as session:
        found = await sharing.list_foreign(session, tenant.id, **page)
    return [f"{owner}/{adapter.name}" for owner, adapter in found.items]


async def test_an_adapter_is_private_until_its_owner_says_otherwise(
    db: Database, acme: Tenant, globex: Tenant, initech: Tenant
) -> None:
    async def users() -> list[bool]:
        return [await may_use(db, tenant) for tenant in (acme, globex, initech)]

    assert await users() == [True, False, False]
    await change(db, acme, shared_with=["globex"])
    assert await users() == [True, False, False]
    await change(db, acme, visibility="shared")
    assert await users() == [True, True, False]
    await change(db, acme, visibility="public")
    assert await users() == [True, True, True]
    await change(db, acme, visibility="shared", shared_with=[initech.id])
    assert await users() == [True, False, True]
    await change(db, acme, shared_with=[])
    assert await users() == [True, False, False]
    for tenant in (globex, initech):
        assert not await may_use(db, tenant, "poet")
        assert await listed(db, tenant) == []


async def test_what_a_foreign_name_resolves_to(db: Database, acme: Tenant, globex: Tenant) -> None:
    adapter = await change(db, acme, visibility="public", requests_per_minute=7)
    for model, number in (("acme/poet", 2), ("acme/poet@1", 1)):
        assert await resolve(db, globex, model) == Resolved(
            f"acme/poet@{number}",
            "acme-poet",
            "acme/poet",
            number,
            adapter_id=adapter.id,
            limits=Limits(requests_per_minute=7),
            owner=acme.id,
            public=True,
        )
    own = await resolve(db, acme, "acme/poet")
    assert own == await resolve(db, acme, "poet")
    assert (own.adapter, own.owner, own.public) == ("poet", None, True)


async def test_a_foreign_name_that_means_nothing_looks_like_one_that_is_not_shared(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    await publish(db, acme, "secret")
    await change(db, acme, visibility="public")
    told = set()
    for model in ("acme/secret", "acme/nothing", "acme/secret@1", "nobody/secret", "acme/poet@9"):
        with pytest.raises(ModelNotFound) as caught:
            await resolve(db, globex, model)
        told.add(caught.value.message.replace(model, "MODEL"))
    assert len(told) == 1


@pytest.mark.parametrize("model", ["acme/", "/poet", "acme/poet/x", "Acme/poet", "acme//poet"])
async def test_what_is_no_foreign_name_means_nothing(
    db: Database, acme: Tenant, globex: Tenant, model: str
) -> None:
    await change(db, acme, visibility="public")
    with pytest.raises(ModelNotFound):
        await resolve(db, globex, model)


async def test_a_tenants_own_session_reaches_no_foreign_adapter(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    await change(db, acme, visibility="public")
    async with db.read(globex.id) as session:
        with pytest.raises(ModelNotFound):
            await resolving.resolve(session, globex.id, "acme/poet", BASE)


async def test_a_suspended_owners_adapters_do_not_resolve(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    await change(db, acme, visibility="public")
    for suspended in (True, False):
        async with db.session(None) as session:
            await set_suspended(session, acme.id, suspended, actor=SYSTEM)
        assert await may_use(db, globex) is not suspended
        assert await listed(db, globex) == ([] if suspended else ["acme/poet"])


async def test_a_deleted_adapters_shares_do_not_come_back_with_its_name(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    await change(
        db,
        acme,
        visibility="shared",
        description="in verse",
        tokens_per_day=5,
        shared_with=[globex.id],
    )
    async with db.session(acme.id) as session:
        await registry.delete_adapter(session, acme.id, "poet", actor=SYSTEM)
    assert not await may_use(db, globex)
    await publish(db, acme, "poet")
    assert not await may_use(db, globex)
    async with db.read(None) as session:
        adapter = await registry.get_adapter(session, acme.id, "poet")
        assert list(await session.scalars(select(AdapterShare))) == []
    assert (adapter.visibility, adapter.description) == ("private", None)
    assert Limits.of(adapter) == Limits()


async def test_changes_that_cannot_be_are_refused_whole(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    refusals: Sequence[tuple[dict[str, Any], type[Exception]]] = [
        ({"shared_with": ["nobody"]}, NotFound),
        ({"shared_with": [acme.id]}, BadRequest),
        ({"shared_with": ["acme"]}, BadRequest),
        ({"requests_per_minute": 0}, BadRequest),
        ({"name": "none"}, ModelNotFound),
    ]
    for given, error in refusals:
        with pytest.raises(error):
            await change(db, acme, **({"visibility": "public"} | given))
    with pytest.raises(ModelNotFound):
        await change(db, globex, visibility="public")
    assert not await may_use(db, globex)


async def test_a_tenants_name_never_stands_for_another_tenants_id(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    async with db.session(None) as session:
        await create_tenant(session, globex.id, actor=SYSTEM)
    await change(db, acme, visibility="shared", shared_with=[globex.id])
    assert await may_use(db, globex)


async def test_foreign_adapters_are_listed_a_page_at_a_time(
    db: Database, acme: Tenant, globex: Tenant, initech: Tenant
) -> None:
    for tenant, names in ((acme, "ab"), (initech, "ba")):
        for name in names:
            await publish(db, tenant, name)
            await change(db, tenant, name, visibility="public")
    every = ["acme/a", "acme/b", "initech/a", "initech/b"]
    assert await listed(db, globex) == every
    found: list[str] = []
    while page := await listed(db, globex, limit=1, after=found[-1] if found else None):
        found += page
    assert found == every
    assert await listed(db, globex, names={"initech/a", "a", "acme/z"}) == ["initech/a"]
    assert await listed(db, acme) == ["initech/a", "initech/b"]


@pytest.mark.parametrize("text", ["\0", "acme\0/poet", "acme/\0", "/"])
async def test_no_text_breaks_a_lookup(
    db: Database, acme: Tenant, globex: Tenant, text: str
) -> None:
    await change(db, acme, visibility="public")
    assert await listed(db, globex, names={text}) == []
    await listed(db, globex, after=text)
    with pytest.raises(NotFound):
        await change(db, acme, shared_with=[text])
    with pytest.raises(ModelNotFound):
        await resolve(db, globex, text)
    async with db.read(None) as session:
        assert (await bases.list_bases(session, after=(text, text))).items == []
        await bases.list_stale(session, acme.id, text, after=(text, 1))
        assert await bases.count_versions(session, text, [text]) == {}
        assert (await audit.list_entries(session, target=text, before=text)).items == []
        assert (await sharing.uses(session, acme.id, "poet", after=text)).items == []


async def test_an_owner_sees_who_uses_an_adapter(
    db: Database, ring: KeyRing, acme: Tenant, globex: Tenant
) -> None:
    keys: dict[str, ApiKey] = {}
    async with db.session(None) as session:
        for tenant in (acme, globex):
            keys[tenant.id], _ = await ring.create(session, tenant.id, "k", ["infer"], actor=SYSTEM)
        calls = [(acme, "poet")] * 2 + [(globex, "acme/poet")] * 3 + [(globex, "poet")]
        for number, (tenant, adapter) in enumerate(calls):
            session.add(
                UsageRecord(
                    tenant_id=tenant.id,
                    request_id=f"req_{number}",
                    key_id=keys[tenant.id].id,
                    adapter=adapter,
                    model=f"{adapter}@1",
                    outcome="stop",
                    prompt_tokens=10,
                    completion_tokens=2,
                )
            )
    async with db.read(None) as session:
        page = await sharing.uses(session, acme.id, "poet")
        rest = await sharing.uses(session, acme.id, "poet", after=page.items[0].tenant_id, limit=1)
    assert [(use.tenant, use.requests, use.prompt_tokens) for use in page.items] == [
        ("acme", 2, 20),
        ("globex", 3, 30),
    ]
    assert [use.tenant for use in rest.items] == ["globex"]
