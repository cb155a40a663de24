"""Names, immutable versions, and what a request's `model` means."""

import asyncio
import re
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.platform import images_kept, registry, resolving, versions
from loraplex.platform.audit import SYSTEM
from loraplex.platform.db.models import AdapterVersion, Tenant
from loraplex.platform.db.session import Database
from loraplex.platform.errors import BadRequest, ModelNotFound, NameConflict, NotFound
from loraplex.platform.keys import get_key
from loraplex.platform.model_names import NAME
from loraplex.platform.resolving import Resolved
from loraplex.platform.tenants import get_tenant

pytestmark = pytest.mark.anyio
BASE = "SmolLM2-135M-Instruct"


async def publish(
    db: Database, tenant: Tenant, name: str = "poet", digest: str = "d" * 64
) -> AdapterVersion:
    async with db.session(tenant.id) as session:
        return await registry.add_version(
            session,
            tenant.id,
            name,
            digest=digest,
            base="f" * 64,
            base_name=BASE,
            report={"rank": 8, "bytes": 1024, "warnings": []},
            actor=SYSTEM,
        )


async def resolve(db: Database, tenant: Tenant, model: str) -> Resolved:
    async with db.read(tenant.id) as session:
        return await resolving.resolve(session, tenant.id, model, BASE)


async def test_versions_are_numbered_and_the_newest_is_meant(db: Database, acme: Tenant) -> None:
    for number in (1, 2, 3):
        version = await publish(db, acme, digest=f"{number}" * 64)
        assert version.number == number
    for model, number in (("poet", 3), ("poet@1", 1)):
        found = await resolve(db, acme, model)
        assert found.adapter_id
        assert replace(found, adapter_id=None) == Resolved(
            f"poet@{number}", f"{number}" * 64, "poet", number
        )


async def test_the_base_has_no_digest(db: Database, acme: Tenant) -> None:
    assert await resolve(db, acme, BASE) == Resolved(BASE)


MEANINGLESS = [
    "other",
    "poet@2",
    "poet@0",
    "poet@01",
    "poet@",
    "poet@-1",
    "poet@1@1",
    "poet@1 ",
    "poet@9999999999999999999999",
    "poet@١",
    "Poet",
    "",
    "@1",
    BASE + "@1",
    BASE.lower(),
    "poet\x00",
    "x" * 100_000,
    "poet@prod",
    "poet@Prod",
    "poet@-prod",
    "poet@prod\x00",
]


async def test_what_means_nothing_is_not_found(db: Database, acme: Tenant) -> None:
    await publish(db, acme)
    for model in MEANINGLESS:
        with pytest.raises(ModelNotFound):
            await resolve(db, acme, model)


async def test_anothers_adapter_is_not_found(db: Database, acme: Tenant, globex: Tenant) -> None:
    await publish(db, globex, "secret")
    await publish(db, acme, "shared", "a" * 64)
    await publish(db, globex, "shared", "b" * 64)
    assert (await resolve(db, acme, "shared")).digest == "a" * 64
    assert (await resolve(db, globex, "shared")).digest == "b" * 64
    with pytest.raises(ModelNotFound):
        await resolve(db, acme, "secret")
    delete = partial(registry.delete_adapter, actor=SYSTEM)
    for call in (registry.get_adapter, delete):
        with pytest.raises(ModelNotFound):
            async with db.session(acme.id) as session:
                await call(session, acme.id, "secret")
        with pytest.raises(ModelNotFound):  # nor by naming its owner
            async with db.session(acme.id) as session:
                await call(session, globex.id, "secret")
    assert (await resolve(db, globex, "secret")).version == 1


async def test_an_operators_session_is_held_to_the_tenant_it_names(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    await publish(db, globex, "secret")
    async with db.read(None) as session:
        with pytest.raises(ModelNotFound):
            await resolving.resolve(session, acme.id, "secret", BASE)
        assert (await registry.list_adapters(session, acme.id)).items == []
        assert (await resolving.resolve(session, globex.id, "secret", BASE)).version == 1


async def test_a_deleted_name_is_free_and_its_numbers_go_on(db: Database, acme: Tenant) -> None:
    await publish(db, acme, digest="1" * 64)
    await publish(db, acme, digest="2" * 64)
    async with db.session(acme.id) as session:
        await registry.delete_adapter(session, acme.id, "poet", actor=SYSTEM)
    for model in ("poet", "poet@1", "poet@2"):
        with pytest.raises(ModelNotFound):
            await resolve(db, acme, model)
    assert (await publish(db, acme, digest="3" * 64)).number == 3
    assert (await resolve(db, acme, "poet")).digest == "3" * 64
    with pytest.raises(ModelNotFound):
        await resolve(db, acme, "poet@1")
    async with db.read(acme.id) as session:
        page = await versions.list_versions(session, acme.id, "poet")
    assert [version.number for version in page.items] == [3]


async def test_adapters_are_listed_with_what_their_names_mean(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    for name in ("c", "a", "b", "a"):
        await publish(db, acme, name)
    await publish(db, globex, "z")
    async with db.read(acme.id) as session:
        page = await registry.list_adapters(session, acme.id, limit=2)
        rest = await registry.list_adapters(session, acme.id, after="b", limit=2)
        current = await versions.current(session, page.items)
    listed = {adapter.name: current[adapter.id].number for adapter in page.items}
    assert listed == {"a": 2, "b": 1}
    assert [adapter.name for adapter in rest.items] == ["c"]
    assert (page.has_more, rest.has_more) == (True, False)


async def test_an_image_is_kept_while_any_tenant_names_it(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    await publish(db, acme, digest="1" * 64)
    await publish(db, acme, digest="2" * 64)
    await publish(db, globex, digest="2" * 64)
    async with db.session(acme.id) as session:
        await registry.delete_adapter(session, acme.id, "poet", actor=SYSTEM)
    async with db.read(None) as session:
        assert await images_kept.unneeded(session, {"1" * 64, "2" * 64}) == {"1" * 64}
        assert await images_kept.unneeded(session, []) == set()


async def test_versions_published_at_once_get_numbers_of_their_own(
    db: Database, acme: Tenant
) -> None:
    versions = await asyncio.gather(*(publish(db, acme) for _ in range(20)))
    assert sorted(version.number for version in versions) == list(range(1, 21))


@pytest.mark.parametrize("text", ["\0", "poet\0", "\0poet"])
async def test_no_name_or_id_breaks_a_lookup(db: Database, acme: Tenant, text: str) -> None:
    await publish(db, acme)
    async with db.read(None) as session:
        for look in (
            registry.get_adapter(session, acme.id, text),
            registry.get_adapter(session, text, "poet"),
            get_tenant(session, text),
            get_key(session, text),
        ):
            with pytest.raises(NotFound):
                await look
        assert (await registry.list_adapters(session, acme.id, after=text)).has_more is False


async def test_an_adapter_cannot_take_the_bases_name(db: Database, acme: Tenant) -> None:
    with pytest.raises(NameConflict, match="base"):
        await publish(db, acme, BASE.lower())
    with pytest.raises(BadRequest, match="lower-case"):
        await publish(db, acme, BASE)


def _follows_the_grammar(name: str) -> bool:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    return (
        1 <= len(name) <= 63
        and name[0] in letters
        and all(character in letters + "._-" for character in name)
    )


NAMES = st.text() | st.from_regex(r"[a-z0-9._@-]{0,66}") | st.from_regex(NAME)


@settings(max_examples=300)
@given(NAMES)
def test_the_grammar_of_names(name: str) -> None:
    try:
        accepted = registry.check_name(name, BASE) == name
    except BadRequest:
        accepted = False
    assert accepted == _follows_the_grammar(name)


async def test_no_model_breaks_the_lookup(db: Database, acme: Tenant) -> None:
    await publish(db, acme)
    models: list[str] = []

    @settings(max_examples=60, database=None)
    @given(NAMES | NAMES.map("poet@{}".format) | st.integers().map("poet@{}".format))
    def collect(model: str) -> None:
        models.append(model)

    collect()
    for model in models:
        try:
            found = await resolve(db, acme, model)
        except ModelNotFound as error:
            assert error.param == "model"
        else:
            assert re.fullmatch(r"poet(@1)?", model), model
            assert found.model_id == "poet@1"
