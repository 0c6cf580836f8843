"""The scoring of unreviewed samples: what it did for each pipeline, and which judge was asked about which sample."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loop_dagster.store.schema import Utc

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "scorings",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("pipeline_id", sa.String(length=80), nullable=False),
        sa.Column("nanocents", sa.BigInteger(), nullable=False),
        sa.Column("scored", sa.Integer(), nullable=False),
        sa.Column("picked", sa.Integer(), nullable=False),
        sa.Column("last_chunk", sa.String(length=36), nullable=True),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("hold_code", sa.String(length=40), nullable=True),
        sa.Column("hold_sentence", sa.Text(), nullable=True),
        sa.Column("hold_until", Utc(), nullable=True),
        sa.Column("hold_key", sa.String(length=64), nullable=True),
        sa.Column("updated_at", Utc(), nullable=False),
        sa.PrimaryKeyConstraint("workspace", "pipeline_id", name=op.f("pk_scorings")),
    )
    op.create_table(
        "scores",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("sample_id", sa.String(length=36), nullable=False),
        sa.Column("judge_key", sa.String(length=32), nullable=False),
        sa.Column("scored", sa.Boolean(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("next_try_at", Utc(), nullable=True),
        sa.Column("created_at", Utc(), nullable=False),
        sa.PrimaryKeyConstraint("workspace", "sample_id", "judge_key", name=op.f("pk_scores")),
    )
