"""What the gateway did not record, counted, and sample ids that it gave out."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loop_dagster.store.schema import Utc

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "capture_misses",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("tag", sa.String(length=63), nullable=False),
        sa.Column("reason", sa.String(length=12), nullable=False),
        sa.Column("calls", sa.Integer(), nullable=False),
        sa.Column("last_at", Utc(), nullable=False),
        sa.PrimaryKeyConstraint("workspace", "day", "tag", "reason", name=op.f("pk_capture_misses")),
    )
    op.create_table(
        "issued_ids",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("sample_id", sa.String(length=36), nullable=False),
        sa.Column("seen_at", Utc(), nullable=False),
        sa.Column("first_id", sa.String(length=36), nullable=True),
        sa.PrimaryKeyConstraint("workspace", "sample_id", name=op.f("pk_issued_ids")),
    )
    op.create_index("ix_issued_ids_seen_at", "issued_ids", ["workspace", "seen_at"])
