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
OWNED_LENGTH = 127  # "tenant/adapter"
MODEL_LENGTH = 160
CHANGING = frozenset({"retired_at", "deleted_at"})  # of a version


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


class Limited:
    """Columns of a row that has limits of its own; None is no limit."""

    requests_per_minute: Mapped[int | None] = mapped_column(default=None)
    tokens_per_minute: Mapped[int | None] = mapped_column(default=None)
    max_concurrency: Mapped[int | None] = mapped_column(default=None)
    tokens_per_day: Mapped[int | None] = mapped_column(BigInteger, default=None)
    tokens_per_month: Mapped[int | None] = mapped_column(BigInteger, default=None)


class Tenant(Limited, Base):
    """A customer and its limits."""

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(
        Text(ID_LENGTH), primary_key=True, default=lambda: new_id("ten")
    )
    name: Mapped[str] = mapped_column(Text(NAME_LENGTH), unique=True)
    weight: Mapped[float] = mapped_column(default=1.0, server_default="1")
    max_running: Mapped[int | None] = mapped_column(default=None)
    kv_share: Mapped[float] = mapped_column(default=1.0, server_default="1")
    resident_bytes: Mapped[int | None] = mapped_column(BigInteger, default=None)
    storage_bytes: Mapped[int | None] = mapped_column(BigInteger, default=None)
    max_adapters: Mapped[int | None] = mapped_column(default=None)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    suspended_at: Mapped[datetime | None] = mapped_column(default=None)


class User(TenantOwned, Base):
    """Who signs in to the pages: an operator, who has no tenant, or a tenant's admin or viewer."""

    __tablename__ = "users"

    id: Mapped[str] = mapped_column(
        Text(ID_LENGTH), primary_key=True, default=lambda: new_id("usr")
    )
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"), index=True)
    name: Mapped[str] = mapped_column(Text(NAME_LENGTH), unique=True)
    role: Mapped[str] = mapped_column(Text(16))
    password: Mapped[str | None] = mapped_column(Text(160))  # Argon2's string; None: none was set
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    disabled_at: Mapped[datetime | None] = mapped_column(default=None)
    signed_in_at: Mapped[datetime | None] = mapped_column(default=None)


class UserSession(Base):
    """A user's stay on the pages, known by the hash of an id that only their browser has."""

    __tablename__ = "user_sessions"

    digest: Mapped[str] = mapped_column(Text(64), primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), index=True)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    expires_at: Mapped[datetime] = mapped_column(index=True)


class ApiKey(Limited, TenantOwned, Base):
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
    adapters: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True), default=None)
    rotated_from: Mapped[str | None] = mapped_column(Text(ID_LENGTH), default=None)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    expires_at: Mapped[datetime | None] = mapped_column(default=None)
    revoked_at: Mapped[datetime | None] = mapped_column(default=None)
    last_used_at: Mapped[datetime | None] = mapped_column(default=None)


class Adapter(Limited, TenantOwned, Base):
    """A name of one tenant. A deleted name can be taken again; its version numbers go on."""

    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("tenant_id", "name"), UniqueConstraint("tenant_id", "id"))

    id: Mapped[str] = mapped_column(
        Text(ID_LENGTH), primary_key=True, default=lambda: new_id("adp")
    )
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(Text(NAME_LENGTH))
    last_version: Mapped[int] = mapped_column(default=0)  # ever given, deleted ones among them
    visibility: Mapped[str] = mapped_column(Text(8), default="private", server_default="private")
    description: Mapped[str | None] = mapped_column(Text(500), default=None)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    deleted_at: Mapped[datetime | None] = mapped_column(default=None)


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
    dtype: Mapped[str] = mapped_column(Text(8), default="bf16", server_default="bf16")
    created_by: Mapped[str | None] = mapped_column(Text(ID_LENGTH), default=None)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    retired_at: Mapped[datetime | None] = mapped_column(default=None)
    deleted_at: Mapped[datetime | None] = mapped_column(default=None)

    variants: Mapped[list["ImageVariant"]] = relationship(
        lazy="raise", order_by="ImageVariant.dtype", viewonly=True
    )


@event.listens_for(AdapterVersion, "before_update")
def _refuse_to_change(_: Mapper[Any], __: Connection, version: AdapterVersion) -> None:
    for attribute in inspect(version).attrs:
        if attribute.key not in CHANGING and attribute.history.has_changes():
            raise ImmutableVersion(f"a version's {attribute.key} cannot be changed")


class ImageVariant(TenantOwned, Base):
    """Another image of a version, of another dtype than the version's own."""

    __tablename__ = "image_variants"

    version_id: Mapped[str] = mapped_column(ForeignKey("adapter_versions.id"), primary_key=True)
    dtype: Mapped[str] = mapped_column(Text(8), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(Text(ID_LENGTH))
    digest: Mapped[str] = mapped_column(Text(64), index=True)
    image_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class AdapterShare(TenantOwned, Base):
    """An adapter that its owner, `tenant_id`, lets another tenant use."""

    __tablename__ = "adapter_shares"
    __table_args__ = (
        ForeignKeyConstraint(("tenant_id", "adapter_id"), ("adapters.tenant_id", "adapters.id")),
    )

    adapter_id: Mapped[str] = mapped_column(Text(ID_LENGTH), primary_key=True)
    with_tenant_id: Mapped[str] = mapped_column(
        ForeignKey("tenants.id"), primary_key=True, index=True
    )
    tenant_id: Mapped[str] = mapped_column(Text(ID_LENGTH))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


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
    canary_number: Mapped[int | None] = mapped_column(default=None)
    canary_percent: Mapped[float | None] = mapped_column(default=None)  # of its conversations
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
    canary_number: Mapped[int | None] = mapped_column(default=None)
    canary_percent: Mapped[float | None] = mapped_column(default=None)
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
    __table_args__ = (Index(None, "tenant_id", "day", "adapter"), Index(None, "adapter", "day"))

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    request_id: Mapped[str] = mapped_column(Text(MODEL_LENGTH), primary_key=True)
    key_id: Mapped[str] = mapped_column(Text(ID_LENGTH))  # or a user's, in the playground
    adapter: Mapped[str | None] = mapped_column(Text(OWNED_LENGTH))  # None: the bare base
    model: Mapped[str] = mapped_column(Text(MODEL_LENGTH))  # "name@3", or the base
    arm: Mapped[str | None] = mapped_column(Text(8), default=None)  # of a canary split
    digest: Mapped[str | None] = mapped_column(Text(64))
    outcome: Mapped[str] = mapped_column(Text(32))  # a finish reason or an error's code
    prompt_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    cached_tokens: Mapped[int] = mapped_column(default=0)
    queue_ms: Mapped[float | None] = mapped_column(default=None)
    load_ms: Mapped[float | None] = mapped_column(default=None)
    first_token_ms: Mapped[float | None] = mapped_column(default=None)
    total_ms: Mapped[float | None] = mapped_column(default=None)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    day: Mapped[date] = mapped_column(default=_day)


class Upload(TenantOwned, Base):
    """An upload as a job: what it is to become, what has come of it, and what it came to."""

    __tablename__ = "uploads"
    __table_args__ = (Index(None, "tenant_id", "id"),)

    id: Mapped[str] = mapped_column(
        Text(ID_LENGTH), primary_key=True, default=lambda: new_id("upl")
    )
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(Text(NAME_LENGTH))  # of the adapter
    state: Mapped[str] = mapped_column(Text(16), index=True)
    options: Mapped[dict[str, Any]] = mapped_column(JSON)
    parts: Mapped[dict[str, Any]] = mapped_column(JSON)
    report: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True), default=None)
    number: Mapped[int | None] = mapped_column(default=None)  # of the version that it became
    created_by: Mapped[str] = mapped_column(Text(ID_LENGTH))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    updated_at: Mapped[datetime] = mapped_column(default=utc_now)


class AuditEntry(TenantOwned, Base):
    """One change: who made it, what it was, and what it changed. Rows are added, never changed."""

    __tablename__ = "audit_entries"
    __table_args__ = (Index(None, "tenant_id", "id"),)

    id: Mapped[str] = mapped_column(
        Text(ID_LENGTH), primary_key=True, default=lambda: new_id("aud")
    )
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"))
    actor: Mapped[str] = mapped_column(Text(ID_LENGTH))  # a key's or a user's id, or "system"
    action: Mapped[str] = mapped_column(Text(64))  # "adapter.published"
    target: Mapped[str] = mapped_column(Text(MODEL_LENGTH))
    details: Mapped[dict[str, Any]] = mapped_column(JSON)
    request_id: Mapped[str | None] = mapped_column(Text(ID_LENGTH), default=None)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class IdempotentRequest(Base):
    """A request that named itself: the answer to it, kept so that a second one gets the same."""

    __tablename__ = "idempotent_requests"

    actor: Mapped[str] = mapped_column(Text(ID_LENGTH), primary_key=True)
    name: Mapped[str] = mapped_column(Text(255), primary_key=True)  # the Idempotency-Key
    fingerprint: Mapped[str] = mapped_column(Text(64))  # of method, path and body
    status: Mapped[int | None] = mapped_column(default=None)  # None: in progress
    body: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True), default=None)
    created_at: Mapped[datetime] = mapped_column(default=utc_now, index=True)


class ServedBase(Base):
    """A base model that this platform has served, and how."""

    __tablename__ = "bases"

    fingerprint: Mapped[str] = mapped_column(Text(64), primary_key=True)
    variant: Mapped[str] = mapped_column(Text(32), primary_key=True)  # "bfloat16", "int8"
    name: Mapped[str] = mapped_column(Text(MODEL_LENGTH))
    num_layers: Mapped[int]
    hidden_size: Mapped[int]
    vocab_size: Mapped[int]
    first_served_at: Mapped[datetime] = mapped_column(default=utc_now)
    last_served_at: Mapped[datetime] = mapped_column(default=utc_now)
