"""The tables. A row that is `TenantOwned` is seen and written by its tenant's sessions only.

Knows columns, keys and constraints; refuses to know sessions, HTTP and rules of business.
"""

from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    JSON,
    BigInteger,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    MetaData,
    UniqueConstraint,
    event,
    inspect,
)
from sqlalchemy.engine import Connection
from sqlalchemy.engine.default import DefaultExecutionContext
from sqlalchemy.orm import DeclarativeBase, Mapped, Mapper, mapped_column, relationship

from loraplex.platform.db.types import Text, UtcDateTime, utc_now
from loraplex.platform.ids import new_id

ID_LENGTH = 40
NAME_LENGTH = 63
MODEL_LENGTH = 128


class ImmutableVersion(RuntimeError):
    """Code of ours tried to change a version; a change is a new version."""


class Base(DeclarativeBase):
    """The root of all tables; constraints are named, so that migrations can name them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {datetime: UtcDateTime}  # noqa: RUF012 (SQLAlchemy's own idiom)


class TenantOwned:
    """Marks a table whose rows belong to one tenant; it has a column `tenant_id`."""

    if TYPE_CHECKING:
        tenant_id: Mapped[Any]


class Tenant(Base):
    """A customer and its limits; a limit of None is no limit."""

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(
        Text(ID_LENGTH), primary_key=True, default=lambda: new_id("ten")
    )
    name: Mapped[str] = mapped_column(Text(NAME_LENGTH), unique=True)
    requests_per_minute: Mapped[int | None] = mapped_column(default=None)
    tokens_per_minute: Mapped[int | None] = mapped_column(default=None)
    max_concurrency: Mapped[int | None] = mapped_column(default=None)
    weight: Mapped[float] = mapped_column(default=1.0, server_default="1")
    max_running: Mapped[int | None] = mapped_column(default=None)
    kv_share: Mapped[float] = mapped_column(default=1.0, server_default="1")
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    suspended_at: Mapped[datetime | None] = mapped_column(default=None)


class ApiKey(TenantOwned, Base):
    """A key, known by the digest of its secret; without a tenant it is an operator's."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(
        Text(ID_LENGTH), primary_key=True, default=lambda: new_id("key")
    )
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"), index=True)
    name: Mapped[str] = mapped_column(Text(NAME_LENGTH))
    digest: Mapped[str] = mapped_column(Text(64), unique=True)
    redacted: Mapped[str] = mapped_column(Text(16))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    expires_at: Mapped[datetime | None] = mapped_column(default=None)
    revoked_at: Mapped[datetime | None] = mapped_column(default=None)
    last_used_at: Mapped[datetime | None] = mapped_column(default=None)


class Adapter(TenantOwned, Base):
    """A name of one tenant. A deleted name can be taken again; its version numbers go on."""

    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("tenant_id", "name"), UniqueConstraint("tenant_id", "id"))

    id: Mapped[str] = mapped_column(
        Text(ID_LENGTH), primary_key=True, default=lambda: new_id("adp")
    )
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(Text(NAME_LENGTH))
    last_version: Mapped[int] = mapped_column(default=0)  # ever given, deleted ones among them
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    deleted_at: Mapped[datetime | None] = mapped_column(default=None)

    versions: Mapped[list["AdapterVersion"]] = relationship(
        lazy="raise",
        order_by="AdapterVersion.number",
        primaryjoin="and_(Adapter.id == AdapterVersion.adapter_id,"
        " AdapterVersion.deleted_at.is_(None))",
        viewonly=True,
    )


class AdapterVersion(TenantOwned, Base):
    """One immutable image under a number; `name@number` never means other weights."""

    __tablename__ = "adapter_versions"
    __table_args__ = (
        UniqueConstraint("adapter_id", "number"),
        ForeignKeyConstraint(("tenant_id", "adapter_id"), ("adapters.tenant_id", "adapters.id")),
    )

    id: Mapped[str] = mapped_column(
        Text(ID_LENGTH), primary_key=True, default=lambda: new_id("ver")
    )
    tenant_id: Mapped[str] = mapped_column(Text(ID_LENGTH))
    adapter_id: Mapped[str] = mapped_column(Text(ID_LENGTH))
    number: Mapped[int]
    digest: Mapped[str] = mapped_column(Text(64), index=True)  # of the image
    base: Mapped[str] = mapped_column(Text(64))  # fingerprint
    rank: Mapped[int]
    image_bytes: Mapped[int] = mapped_column(BigInteger)
    report: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    deleted_at: Mapped[datetime | None] = mapped_column(default=None)

    adapter: Mapped[Adapter] = relationship(lazy="raise", viewonly=True)


@event.listens_for(AdapterVersion, "before_update")
def _refuse_to_change(_: Mapper[Any], __: Connection, version: AdapterVersion) -> None:
    for attribute in inspect(version).attrs:
        if attribute.key != "deleted_at" and attribute.history.has_changes():
            raise ImmutableVersion(f"a version's {attribute.key} cannot be changed")


class Alias(TenantOwned, Base):
    """A name for one version of an adapter; its revision counts its moves, removal among them."""

    __tablename__ = "aliases"
    __table_args__ = (
        ForeignKeyConstraint(("tenant_id", "adapter_id"), ("adapters.tenant_id", "adapters.id")),
        ForeignKeyConstraint(
            ("adapter_id", "number"), ("adapter_versions.adapter_id", "adapter_versions.number")
        ),
    )

    adapter_id: Mapped[str] = mapped_column(Text(ID_LENGTH), primary_key=True)
    name: Mapped[str] = mapped_column(Text(NAME_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(Text(ID_LENGTH))
    number: Mapped[int | None]  # None: removed
    revision: Mapped[int] = mapped_column(default=0)
    moved_at: Mapped[datetime] = mapped_column(default=utc_now)


class AliasMove(TenantOwned, Base):
    """One move of an alias: to which version, by which key, and when."""

    __tablename__ = "alias_moves"
    __table_args__ = (
        ForeignKeyConstraint(("adapter_id", "alias"), ("aliases.adapter_id", "aliases.name")),
        ForeignKeyConstraint(("tenant_id", "adapter_id"), ("adapters.tenant_id", "adapters.id")),
    )

    adapter_id: Mapped[str] = mapped_column(Text(ID_LENGTH), primary_key=True)
    alias: Mapped[str] = mapped_column(Text(NAME_LENGTH), primary_key=True)
    revision: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[str] = mapped_column(Text(ID_LENGTH))
    number: Mapped[int | None]
    moved_by: Mapped[str] = mapped_column(Text(ID_LENGTH))
    moved_at: Mapped[datetime]


def _day(context: DefaultExecutionContext) -> date:
    """The UTC day of `created_at`."""
    parameters = context.get_current_parameters()  # type: ignore[no-untyped-call]
    moment: datetime = parameters["created_at"]
    return moment.astimezone(UTC).date()


class UsageRecord(TenantOwned, Base):
    """What one request used; there is one row a request, however often it is recorded."""

    __tablename__ = "usage_records"
    __table_args__ = (Index(None, "tenant_id", "day", "adapter"),)

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    request_id: Mapped[str] = mapped_column(Text(MODEL_LENGTH), primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    adapter: Mapped[str | None] = mapped_column(Text(NAME_LENGTH))  # None: the bare base
    model: Mapped[str] = mapped_column(Text(MODEL_LENGTH))  # "name@3", or the base
    digest: Mapped[str | None] = mapped_column(Text(64))
    outcome: Mapped[str] = mapped_column(Text(32))  # a finish reason or an error's code
    prompt_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    cached_tokens: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    day: Mapped[date] = mapped_column(default=_day)
