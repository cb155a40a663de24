"""Runs revisions on a connection, and compares with the metadata, that the caller passes.

`config.attributes` holds `connection` and, where revisions are compared, `metadata`. This file
knows neither tables nor where the database is. The caller's transaction is the revision's.
"""

from alembic import context

_attributes = context.config.attributes

context.configure(
    connection=_attributes["connection"],
    target_metadata=_attributes.get("metadata"),
    render_as_batch=True,
    compare_server_default=True,
)
with context.begin_transaction():
    context.run_migrations()
