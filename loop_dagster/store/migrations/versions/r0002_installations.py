"""Which registry this is: a mark of its own, by which a lake knows who writes it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loop_dagster.store.schema import Utc

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "installations",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("registry_id", sa.String(length=36), nullable=False),
        sa.Column("created_at", Utc(), nullable=False),
        sa.PrimaryKeyConstraint("workspace", name=op.f("pk_installations")),
    )
