"""Datasets: saved sets of conditions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loop_dagster.store.schema import Utc

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "datasets",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.String(length=80), nullable=False),
        sa.Column("name_key", sa.String(length=200), nullable=False),
        sa.Column("conditions", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("created_by", sa.String(length=80), nullable=True),
        sa.Column("created_at", Utc(), nullable=False),
        sa.Column("updated_at", Utc(), nullable=False),
        sa.PrimaryKeyConstraint("workspace", "dataset_id", name=op.f("pk_datasets")),
        sa.UniqueConstraint("workspace", "name_key", name=op.f("uq_datasets_workspace_name_key")),
    )
