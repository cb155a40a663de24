"""Foundation: tenants, API keys, adapters and their versions, usage."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.String(40)
NAME = sa.String(63)
DIGEST = sa.String(64)
MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("requests_per_minute", sa.Integer),
        sa.Column("tokens_per_minute", sa.Integer),
        sa.Column("max_concurrency", sa.Integer),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("suspended_at", MOMENT),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", ID, nullable=False),
        sa.Column("tenant_id", ID),
        sa.Column("name", NAME, nullable=False),
        sa.Column("digest", DIGEST, nullable=False),
        sa.Column("redacted", sa.String(16), nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT),
        sa.Column("revoked_at", MOMENT),
        sa.Column("last_used_at", MOMENT),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("digest", name="uq_api_keys_digest"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_api_keys_tenant_id_tenants"
        ),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])
    op.create_table(
        "adapters",
        sa.Column("id", ID, nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("last_version", sa.Integer, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("deleted_at", MOMENT),
        sa.PrimaryKeyConstraint("id", name="pk_adapters"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_adapters_tenant_id_name"),
        sa.UniqueConstraint("tenant_id", "id", name="uq_adapters_tenant_id_id"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_adapters_tenant_id_tenants"
        ),
    )
    op.create_table(
        "adapter_versions",
        sa.Column("id", ID, nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("adapter_id", ID, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("digest", DIGEST, nullable=False),
        sa.Column("base", DIGEST, nullable=False),
        sa.Column("rank", sa.Integer, nullable=False),
        sa.Column("image_bytes", sa.BigInteger, nullable=False),
        sa.Column("report", sa.JSON, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("deleted_at", MOMENT),
        sa.PrimaryKeyConstraint("id", name="pk_adapter_versions"),
        sa.UniqueConstraint("adapter_id", "number", name="uq_adapter_versions_adapter_id_number"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id"],
            ["adapters.tenant_id", "adapters.id"],
            name="fk_adapter_versions_tenant_id_adapter_id_adapters",
        ),
    )
    op.create_index("ix_adapter_versions_digest", "adapter_versions", ["digest"])
    op.create_table(
        "usage_records",
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("request_id", sa.String(128), nullable=False),
        sa.Column("key_id", ID, nullable=False),
        sa.Column("adapter", NAME),
        sa.Column("model", sa.String(128), nullable=False),
        sa.Column("digest", DIGEST),
        sa.Column("outcome", sa.String(32), nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("completion_tokens", sa.Integer, nullable=False),
        sa.Column("cached_tokens", sa.Integer, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("day", sa.Date, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "request_id", name="pk_usage_records"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_usage_records_tenant_id_tenants"
        ),
        sa.ForeignKeyConstraint(
            ["key_id"], ["api_keys.id"], name="fk_usage_records_key_id_api_keys"
        ),
    )
    op.create_index(
        "ix_usage_records_tenant_id_day_adapter", "usage_records", ["tenant_id", "day", "adapter"]
    )


def downgrade() -> None:
    for table in ("usage_records", "adapter_versions", "adapters", "api_keys", "tenants"):
        op.drop_table(table)
