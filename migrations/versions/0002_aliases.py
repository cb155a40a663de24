"""Aliases: names for versions that can be moved, and the history of their moves."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

ID = sa.String(40)
NAME = sa.String(63)
MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "aliases",
        sa.Column("adapter_id", ID, nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("number", sa.Integer),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("moved_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "name", name="pk_aliases"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id"],
            ["adapters.tenant_id", "adapters.id"],
            name="fk_aliases_tenant_id_adapter_id_adapters",
        ),
        sa.ForeignKeyConstraint(
            ["adapter_id", "number"],
            ["adapter_versions.adapter_id", "adapter_versions.number"],
            name="fk_aliases_adapter_id_number_adapter_versions",
        ),
    )
    op.create_table(
        "alias_moves",
        sa.Column("adapter_id", ID, nullable=False),
        sa.Column("alias", NAME, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("number", sa.Integer),
        sa.Column("moved_by", ID, nullable=False),
        sa.Column("moved_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "alias", "revision", name="pk_alias_moves"),
        sa.ForeignKeyConstraint(
            ["adapter_id", "alias"],
            ["aliases.adapter_id", "aliases.name"],
            name="fk_alias_moves_adapter_id_alias_aliases",
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id"],
            ["adapters.tenant_id", "adapters.id"],
            name="fk_alias_moves_tenant_id_adapter_id_adapters",
        ),
    )


def downgrade() -> None:
    for table in ("alias_moves", "aliases"):
        op.drop_table(table)
