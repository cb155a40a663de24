"""Engine policy: the weight, sequences and KV share that a tenant is granted."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

COLUMNS = ("weight", "max_running", "kv_share")


def upgrade() -> None:
    for column in (
        sa.Column("weight", sa.Double, nullable=False, server_default="1"),
        sa.Column("max_running", sa.Integer),
        sa.Column("kv_share", sa.Double, nullable=False, server_default="1"),
    ):
        op.add_column("tenants", column)


def downgrade() -> None:
    for name in COLUMNS:
        op.drop_column("tenants", name)
