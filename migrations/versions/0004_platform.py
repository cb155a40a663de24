"""The platform: users, budgets, key rotation, canaries, sharing, variants, upload jobs, audit."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

ID = sa.String(40)
NAME = sa.String(63)
OWNED = sa.String(127)
MODEL = sa.String(160)
DIGEST = sa.String(64)
DTYPE = sa.String(8)
MOMENT = sa.DateTime(timezone=True)

LIMITED = ("api_keys", "adapters")
NEW_TABLES = (
    "bases",
    "idempotent_requests",
    "audit_entries",
    "uploads",
    "adapter_shares",
    "image_variants",
    "users",
)


def _columns() -> dict[str, list[sa.Column[Any]]]:
    """What each table gains."""
    budgets = ("tokens_per_day", "tokens_per_month")
    rates = ("requests_per_minute", "tokens_per_minute", "max_concurrency")
    limits = {
        table: [
            *(sa.Column(name, sa.Integer) for name in rates),
            *(sa.Column(name, sa.BigInteger) for name in budgets),
        ]
        for table in LIMITED
    }
    times = ("queue_ms", "load_ms", "first_token_ms", "total_ms")
    canary = (("canary_number", sa.Integer), ("canary_percent", sa.Double))
    return {
        "tenants": [
            *(sa.Column(name, sa.BigInteger) for name in budgets),
            sa.Column("resident_bytes", sa.BigInteger),
            sa.Column("storage_bytes", sa.BigInteger),
            sa.Column("max_adapters", sa.Integer),
        ],
        "api_keys": [
            *limits["api_keys"],
            sa.Column("adapters", sa.JSON),
            sa.Column("rotated_from", ID),
        ],
        "adapters": [
            *limits["adapters"],
            sa.Column("visibility", sa.String(8), nullable=False, server_default="private"),
            sa.Column("description", sa.String(500)),
        ],
        "adapter_versions": [
            sa.Column("dtype", DTYPE, nullable=False, server_default="bf16"),
            sa.Column("created_by", ID),
            sa.Column("retired_at", MOMENT),
        ],
        "aliases": [sa.Column(name, kind) for name, kind in canary],
        "alias_moves": [sa.Column(name, kind) for name, kind in canary],
        "usage_records": [
            sa.Column("arm", sa.String(8)),
            *(sa.Column(name, sa.Double) for name in times),
        ],
    }


def upgrade() -> None:
    for table, columns in _columns().items():
        for column in columns:
            op.add_column(table, column)
    _size_usage(OWNED, MODEL)
    _create_users()
    _create_images()
    _create_uploads()
    _create_records()


def _size_usage(adapter: sa.String, model: sa.String) -> None:
    """Let the ledger's names be so long; nothing refers to its rows, so SQLite may copy them."""
    with op.batch_alter_table("usage_records") as batch:
        batch.alter_column("adapter", type_=adapter, existing_nullable=True)
        batch.alter_column("model", type_=model, existing_nullable=False)
        batch.alter_column("request_id", type_=model, existing_nullable=False)


def _create_users() -> None:
    op.create_table(
        "users",
        sa.Column("id", ID, nullable=False),
        sa.Column("tenant_id", ID),
        sa.Column("name", NAME, nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("password", sa.String(160)),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("disabled_at", MOMENT),
        sa.Column("signed_in_at", MOMENT),
        sa.PrimaryKeyConstraint("id", name="pk_users"),
        sa.UniqueConstraint("name", name="uq_users_name"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_users_tenant_id_tenants"),
    )
    op.create_index("ix_users_tenant_id", "users", ["tenant_id"])


def _create_images() -> None:
    op.create_table(
        "image_variants",
        sa.Column("version_id", ID, nullable=False),
        sa.Column("dtype", DTYPE, nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("digest", DIGEST, nullable=False),
        sa.Column("image_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("version_id", "dtype", name="pk_image_variants"),
        sa.ForeignKeyConstraint(
            ["version_id"],
            ["adapter_versions.id"],
            name="fk_image_variants_version_id_adapter_versions",
        ),
    )
    op.create_index("ix_image_variants_digest", "image_variants", ["digest"])
    op.create_table(
        "adapter_shares",
        sa.Column("adapter_id", ID, nullable=False),
        sa.Column("with_tenant_id", ID, nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "with_tenant_id", name="pk_adapter_shares"),
        sa.ForeignKeyConstraint(
            ["with_tenant_id"], ["tenants.id"], name="fk_adapter_shares_with_tenant_id_tenants"
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id"],
            ["adapters.tenant_id", "adapters.id"],
            name="fk_adapter_shares_tenant_id_adapter_id_adapters",
        ),
    )
    op.create_index("ix_adapter_shares_with_tenant_id", "adapter_shares", ["with_tenant_id"])


def _create_uploads() -> None:
    op.create_table(
        "uploads",
        sa.Column("id", ID, nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("options", sa.JSON, nullable=False),
        sa.Column("parts", sa.JSON, nullable=False),
        sa.Column("report", sa.JSON),
        sa.Column("number", sa.Integer),
        sa.Column("created_by", ID, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_uploads"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_uploads_tenant_id_tenants"),
    )
    op.create_index("ix_uploads_tenant_id_id", "uploads", ["tenant_id", "id"])
    op.create_index("ix_uploads_state", "uploads", ["state"])


def _create_records() -> None:
    op.create_table(
        "audit_entries",
        sa.Column("id", ID, nullable=False),
        sa.Column("tenant_id", ID),
        sa.Column("actor", ID, nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("target", MODEL, nullable=False),
        sa.Column("details", sa.JSON, nullable=False),
        sa.Column("request_id", ID),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_entries"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_audit_entries_tenant_id_tenants"
        ),
    )
    op.create_index("ix_audit_entries_tenant_id_id", "audit_entries", ["tenant_id", "id"])
    op.create_table(
        "idempotent_requests",
        sa.Column("actor", ID, nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("fingerprint", DIGEST, nullable=False),
        sa.Column("status", sa.Integer),
        sa.Column("body", sa.JSON),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("actor", "name", name="pk_idempotent_requests"),
    )
    op.create_index("ix_idempotent_requests_created_at", "idempotent_requests", ["created_at"])
    op.create_table(
        "bases",
        sa.Column("fingerprint", DIGEST, nullable=False),
        sa.Column("variant", sa.String(32), nullable=False),
        sa.Column("name", MODEL, nullable=False),
        sa.Column("num_layers", sa.Integer, nullable=False),
        sa.Column("hidden_size", sa.Integer, nullable=False),
        sa.Column("vocab_size", sa.Integer, nullable=False),
        sa.Column("first_served_at", MOMENT, nullable=False),
        sa.Column("last_served_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", "variant", name="pk_bases"),
    )


def downgrade() -> None:
    for table in NEW_TABLES:
        op.drop_table(table)
    _size_usage(NAME, sa.String(128))
    for table, columns in _columns().items():
        for column in columns:
            op.drop_column(table, column.name)
