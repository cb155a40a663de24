"""Moves a database between revisions of the schema, on a connection of the caller's.

Knows Alembic and where the revisions are; the caller's transaction decides whether it happened.
"""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

from loraplex import migrations
from loraplex.platform.db.locks import lock_name
from loraplex.platform.db.models import Base

LOCK = "schema"


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Apply what is missing up to `revision`; others that do so at once wait for the end."""
    lock_name(connection, LOCK)
    command.upgrade(_config(connection), revision)


def downgrade(connection: Connection, revision: str) -> None:
    """Undo what came after `revision`; "base" undoes all."""
    lock_name(connection, LOCK)
    command.downgrade(_config(connection), revision)


def _config(connection: Connection) -> Config:
    config = Config()
    folder = Path(str(migrations.__file__)).parent
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.attributes.update(connection=connection, metadata=Base.metadata)
    return config
