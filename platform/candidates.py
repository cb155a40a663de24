"""The versions that a model's name may mean to a caller: one query, whatever the name.

Every request asks, so there is one statement for each kind of name, built once, and it fetches no
more than an answer needs. Knows the registry's tables, and who may use whose adapter; refuses to
choose among what it finds.
"""

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Final, Literal

from sqlalchemy import ColumnElement, Select, bindparam, exists, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.canaries import Canary
from loraplex.platform.db.models import (
    Adapter,
    AdapterShare,
    AdapterVersion,
    Alias,
    ImageVariant,
    Tenant,
)
from loraplex.platform.model_names import ModelName
from loraplex.platform.quotas import Limits

Kind = Literal["newest", "number", "alias"]
LIMITS: Final = tuple(each.name for each in fields(Limits))
COLUMNS: Final = {
    "number": AdapterVersion.number,
    "digest": AdapterVersion.digest,
    "dtype": AdapterVersion.dtype,
    "variant_digest": ImageVariant.digest,
    "variant_dtype": ImageVariant.dtype,
    "adapter_id": Adapter.id,
    "tenant_id": Adapter.tenant_id,
    "visibility": Adapter.visibility,
    **{name: getattr(Adapter, name) for name in LIMITS},
}
SPLIT: Final = {
    "stable_number": Alias.number,
    "canary_number": Alias.canary_number,
    "canary_percent": Alias.canary_percent,
}


@dataclass(frozen=True)
class Candidate:
    """A version that a name may mean: its own image, the variant asked for, and its adapter.

    `stable` and `canary` are where the alias is that was named, if one was.
    """

    number: int
    digest: str
    dtype: str
    variant: tuple[str, str] | None  # digest and dtype
    adapter_id: str
    tenant_id: str
    public: bool
    limits: Limits
    stable: int | None = None
    canary: Canary | None = None


async def find(
    session: AsyncSession, tenant_id: str, wanted: ModelName, dtype: str | None
) -> list[Candidate]:
    """What `wanted` may mean to the tenant, with images of `dtype` where there are any.

    Two versions where an alias is split, else one or none. A name with an owner needs an
    operator's session: a tenant's own sees no other's rows.
    """
    kind: Kind = "newest"
    if wanted.number is not None:
        kind = "number"
    elif wanted.alias is not None:
        kind = "alias"
    given = vars(wanted) | {"caller": tenant_id, "dtype": dtype}
    rows = await session.execute(_statement(kind, wanted.owner is not None), given)
    return [_candidate(row) for row in rows.mappings()]


def is_named() -> ColumnElement[bool]:
    """Whether an adapter's bare name means a version: one that is not retired."""
    return _exists(
        AdapterVersion.adapter_id == Adapter.id,
        AdapterVersion.deleted_at.is_(None),
        AdapterVersion.retired_at.is_(None),
    )


def foreign(tenant_id: str | ColumnElement[str]) -> ColumnElement[bool]:
    """Whether an adapter is another tenant's that lets this one use it, and is not suspended."""
    let = _exists(AdapterShare.adapter_id == Adapter.id, AdapterShare.with_tenant_id == tenant_id)
    owner = _exists(Tenant.id == Adapter.tenant_id, Tenant.suspended_at.is_(None))
    shared = (Adapter.visibility == "public") | ((Adapter.visibility == "shared") & let)
    return (Adapter.tenant_id != tenant_id) & shared & owner


def _exists(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """Whether there is a row with what `conditions` say of an adapter."""
    return exists().where(*conditions).correlate(Adapter)


@lru_cache
def _statement(kind: Kind, has_owner: bool) -> Select[Any]:
    """The query for a kind of name; its parameters are a `ModelName`'s fields and `caller`."""
    columns = COLUMNS | (SPLIT if kind == "alias" else {})
    same = (ImageVariant.version_id == AdapterVersion.id) & (
        ImageVariant.dtype == bindparam("dtype")
    )
    statement = (
        select(*(column.label(name) for name, column in columns.items()))
        .select_from(AdapterVersion)
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .outerjoin(ImageVariant, same)
        .where(
            Adapter.name == bindparam("name"),
            Adapter.deleted_at.is_(None),
            AdapterVersion.deleted_at.is_(None),
            _usable(has_owner),
        )
    )
    return _which(statement, kind)


def _usable(has_owner: bool) -> ColumnElement[bool]:
    caller: ColumnElement[str] = bindparam("caller")
    own = Adapter.tenant_id == caller
    if not has_owner:
        return own
    named = _exists(Tenant.id == Adapter.tenant_id, Tenant.name == bindparam("owner"))
    return named & or_(own, foreign(caller))


def _which(statement: Select[Any], kind: Kind) -> Select[Any]:
    if kind == "number":
        return statement.where(AdapterVersion.number == bindparam("number"))
    if kind == "alias":
        named = (Alias.adapter_id == Adapter.id) & (Alias.name == bindparam("alias"))
        either = AdapterVersion.number.in_((Alias.number, Alias.canary_number))
        return statement.join(Alias, named).where(either)
    unretired = statement.where(AdapterVersion.retired_at.is_(None))
    return unretired.order_by(AdapterVersion.number.desc()).limit(1)


def _candidate(row: Any) -> Candidate:
    percent = row.get("canary_percent")
    variant = row["variant_digest"]
    return Candidate(
        number=row["number"],
        digest=row["digest"],
        dtype=row["dtype"],
        variant=None if variant is None else (variant, row["variant_dtype"]),
        adapter_id=row["adapter_id"],
        tenant_id=row["tenant_id"],
        public=row["visibility"] == "public",
        limits=Limits(**{name: row[name] for name in LIMITS}),
        stable=row.get("stable_number"),
        canary=None if percent is None else Canary(row["canary_number"], percent),
    )
