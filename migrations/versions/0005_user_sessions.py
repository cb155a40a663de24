"""Sessions of the admin pages; the ledger counts users' requests beside those of keys."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

FOREIGN_KEY = "fk_usage_records_key_id_api_keys"


def upgrade() -> None:
    op.create_table(
        "user_sessions",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("user_id", sa.String(40), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_user_sessions"),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name="fk_user_sessions_user_id_users"),
    )
    op.create_index("ix_user_sessions_user_id", "user_sessions", ["user_id"])
    op.create_index("ix_user_sessions_expires_at", "user_sessions", ["expires_at"])
    with op.batch_alter_table("usage_records") as batch:
        batch.drop_constraint(FOREIGN_KEY, type_="foreignkey")
    op.create_index("ix_usage_records_adapter_day", "usage_records", ["adapter", "day"])


def downgrade() -> None:
    # What users asked in the playground has no key, and no place in the older ledger.
    op.execute(sa.text("DELETE FROM usage_records WHERE key_id NOT IN (SELECT id FROM api_keys)"))
    op.drop_index("ix_usage_records_adapter_day", "usage_records")
    with op.batch_alter_table("usage_records") as batch:
        batch.create_foreign_key(FOREIGN_KEY, "api_keys", ["key_id"], ["id"])
    op.drop_table("user_sessions")
