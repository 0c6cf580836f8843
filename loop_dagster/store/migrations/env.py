"""Alembic's entry: runs the revisions on the connection that `upgrade` hands over, or prints them as SQL.

Belongs here: nothing but that hand-over. It opens no database and configures no logging of its own.
"""

from __future__ import annotations

from alembic import context

from loop_dagster.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    compare_type=True,
    compare_server_default=False,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
