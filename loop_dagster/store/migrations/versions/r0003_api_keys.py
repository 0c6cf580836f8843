"""Keys of the API, and answers of writes that came with an Idempotency-Key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loop_dagster.store.schema import Utc

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("key_id", sa.String(length=36), nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("prefix", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=80), nullable=False),
        sa.Column("scopes", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("workspaces", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", Utc(), nullable=False),
        sa.Column("last_used_at", Utc(), nullable=True),
        sa.Column("revoked_at", Utc(), nullable=True),
        sa.PrimaryKeyConstraint("workspace", "key_id", name=op.f("pk_api_keys")),
    )
    op.create_index("ix_api_keys_key_hash", "api_keys", ["key_hash"])
    op.create_table(
        "idempotent_calls",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("call_key", sa.String(length=64), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("token", sa.String(length=36), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("answer", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", Utc(), nullable=False),
        sa.PrimaryKeyConstraint("workspace", "call_key", name=op.f("pk_idempotent_calls")),
    )
    op.create_index("ix_idempotent_calls_created_at", "idempotent_calls", ["workspace", "created_at"])
