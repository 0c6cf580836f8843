"""What the sensor said of a pipeline when it looked last, and when that was."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loop_dagster.store.schema import Utc

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("pipelines", sa.Column("looked_at", Utc(), nullable=True))
    op.add_column("pipelines", sa.Column("look_said", sa.Text(), nullable=True))
