"""Revisions of the registry's tables, and the one way to bring a database to the newest.

Belongs here: the list of revisions, oldest first, and `upgrade`. Does not belong here: who calls it, and the lock that
lets only one process do it (registry.py). Alembic is imported only when there is something to upgrade.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import sqlalchemy as sa

#: Every revision, oldest first. The newest is what this version works with.
REVISIONS: Final[tuple[str, ...]] = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008")
HEAD: Final[str] = REVISIONS[-1]


def revision_of(connection: sa.Connection) -> str | None:
    """Revision that the database is at; None while it has no tables of ours."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()


def upgrade(connection: sa.Connection) -> None:
    """Run what is missing, inside the transaction that `connection` is in: all of it happens, or nothing."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
