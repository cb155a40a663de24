"""Keeps tenants apart inside the session, so that no query can forget to.

In a tenant's session every SELECT sees that tenant's rows only, through joins and subqueries too;
new rows get its `tenant_id`; anything that could slip past (raw SQL, bulk statements, another
tenant's row) is refused. An operator's session sees all. Knows the models; refuses to know who is
asking.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, cast

from sqlalchemy import event, inspect
from sqlalchemy.orm import (
    LoaderCriteriaOption,
    ORMExecuteState,
    Session,
    UOWTransaction,
    with_loader_criteria,
)

from loraplex.platform.db.models import (
    Adapter,
    AdapterShare,
    AdapterVersion,
    Alias,
    Base,
    ImageVariant,
    Tenant,
    TenantOwned,
)

TENANT, READ_ONLY, RENAMED = "tenant_id", "read_only", "renamed"  # keys of a session's info
NAMING = (Tenant, Adapter, AdapterVersion, ImageVariant, AdapterShare, Alias)  # what names mean


class TenancyError(RuntimeError):
    """Code of ours reached beyond what its session may touch; never the caller's fault."""


class GuardedSession(Session):
    """A session that knows from its info whose it is, and whether it may write."""

    @property
    def tenant_id(self) -> str | None:
        """Whose session it is; None: an operator's."""
        return self.info.get(TENANT)

    @property
    def read_only(self) -> bool:
        """Whether a write is refused."""
        return bool(self.info.get(READ_ONLY))


@event.listens_for(GuardedSession, "do_orm_execute")
def _guard_statement(state: ORMExecuteState) -> None:
    session = cast("GuardedSession", state.session)
    writes = state.is_insert or state.is_update or state.is_delete
    if session.read_only and writes:
        raise TenancyError("this session only reads")
    if session.tenant_id is None:
        return
    if not state.is_orm_statement or writes:
        raise TenancyError("a tenant's session runs no raw SQL and no bulk statements")
    state.statement = state.statement.options(*_criteria(session.tenant_id))


@event.listens_for(GuardedSession, "before_flush")
def _guard_flush(session: GuardedSession, _: UOWTransaction, __: object) -> None:
    changed = [row for row in session.dirty if session.is_modified(row)]
    if session.read_only and (session.new or session.deleted or changed):
        raise TenancyError("this session only reads")
    if any(isinstance(row, NAMING) for row in (*session.new, *changed, *session.deleted)):
        session.info[RENAMED] = True
    if session.tenant_id is not None:
        _stamp(session.tenant_id, session.new)
        _check(session.tenant_id, (*session.new, *changed, *session.deleted))


def _stamp(tenant_id: str, rows: Iterable[object]) -> None:
    for row in rows:
        if isinstance(row, TenantOwned) and row.tenant_id is None:
            row.tenant_id = tenant_id


def _check(tenant_id: str, rows: Iterable[object]) -> None:
    for row in rows:
        if not isinstance(row, TenantOwned):
            raise TenancyError(f"a tenant's session cannot write a {type(row).__name__}")
        history = inspect(row, raiseerr=True).attrs.tenant_id.history
        if {*history.sum()} != {tenant_id}:
            raise TenancyError(f"a {type(row).__name__} of another tenant")


@lru_cache(maxsize=1024)
def _criteria(tenant_id: str) -> tuple[LoaderCriteriaOption, ...]:
    owned: list[type[Any]] = [
        mapper.class_ for mapper in Base.registry.mappers if issubclass(mapper.class_, TenantOwned)
    ]
    return (
        with_loader_criteria(Tenant, Tenant.id == tenant_id, include_aliases=True),
        *(
            with_loader_criteria(model, model.tenant_id == tenant_id, include_aliases=True)
            for model in sorted(owned, key=lambda model: model.__name__)
        ),
    )
