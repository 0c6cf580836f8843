"""The registry's first tables: pipelines, attempts, versions, inbox and leases."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loop_dagster.store.schema import Utc

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

#: As the states were when this revision was written.
ACTIVE = sa.text(
    "state NOT IN ('promoted', 'rejected', 'expired', 'failed', 'budget_stopped', "
    "'cancelled', 'superseded', 'rolled_back')"
)


def upgrade() -> None:
    _pipelines()
    _attempts()
    _versions()
    _intake()
    _rest()


def _pipelines() -> None:
    """A pipeline, its revisions and the sources that feed it."""
    op.create_table(
        "pipelines",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("pipeline_id", sa.String(length=80), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("name_key", sa.String(length=200), nullable=False),
        sa.Column("tag", sa.String(length=63), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("model_digest", sa.String(length=64), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("paused_reason", sa.String(length=40), nullable=True),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("settings", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("next_due_at", Utc(), nullable=True),
        sa.Column("failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("train_now", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("created_at", Utc(), nullable=False),
        sa.Column("updated_at", Utc(), nullable=False),
        sa.Column("deleted_at", Utc(), nullable=True),
        sa.PrimaryKeyConstraint("workspace", "pipeline_id", name=op.f("pk_pipelines")),
        sa.UniqueConstraint("workspace", "name_key", name=op.f("uq_pipelines_workspace_name_key")),
        sa.UniqueConstraint("workspace", "tag", name=op.f("uq_pipelines_workspace_tag")),
    )
    op.create_table(
        "pipeline_revisions",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("pipeline_id", sa.String(length=80), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("settings", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("created_at", Utc(), nullable=False),
        sa.PrimaryKeyConstraint("workspace", "pipeline_id", "revision", name=op.f("pk_pipeline_revisions")),
    )
    op.create_table(
        "sources",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("source", sa.String(length=200), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("retention_days", sa.Integer(), nullable=True),
        sa.Column("sample_rate", sa.Float(), nullable=True),
        sa.Column("tags", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("updated_at", Utc(), nullable=False),
        sa.PrimaryKeyConstraint("workspace", "source", name=op.f("pk_sources")),
    )


def _attempts() -> None:
    """Attempts, of which a pipeline has one active at most, with their timeline and claimed steps."""
    op.create_table(
        "attempts",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("run_id", sa.String(length=36), nullable=False),
        sa.Column("pipeline_id", sa.String(length=80), nullable=False),
        sa.Column("attempt_no", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=24), nullable=False),
        sa.Column("since", Utc(), nullable=False),
        sa.Column("trigger", sa.String(length=12), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("frozen", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("try_no", sa.Integer(), server_default="1", nullable=False),
        sa.Column("train_rows", sa.Integer(), nullable=True),
        sa.Column("holdout_rows", sa.Integer(), nullable=True),
        sa.Column("counts", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("base_digest", sa.String(length=64), nullable=True),
        sa.Column("adapter_digest", sa.String(length=64), nullable=True),
        sa.Column("compared_with", sa.String(length=10), nullable=True),
        sa.Column("compared_with_version", sa.Integer(), nullable=True),
        sa.Column("verdict", sa.String(length=16), nullable=True),
        sa.Column("report", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("decision", sa.String(length=16), nullable=True),
        sa.Column("decided_at", Utc(), nullable=True),
        sa.Column("version_no", sa.Integer(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("error_code", sa.String(length=60), nullable=True),
        sa.Column("review_until", Utc(), nullable=True),
        sa.Column("cancel_requested", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("gpu_seconds", sa.Integer(), nullable=True),
        sa.Column("created_at", Utc(), nullable=False),
        sa.Column("finished_at", Utc(), nullable=True),
        sa.PrimaryKeyConstraint("workspace", "run_id", name=op.f("pk_attempts")),
        sa.UniqueConstraint(
            "workspace", "pipeline_id", "attempt_no", name=op.f("uq_attempts_workspace_pipeline_id_attempt_no")
        ),
    )
    op.create_index(
        "uq_attempts_active",
        "attempts",
        ["workspace", "pipeline_id"],
        unique=True,
        sqlite_where=ACTIVE,
        postgresql_where=ACTIVE,
    )
    op.create_table(
        "attempt_events",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("run_id", sa.String(length=36), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=24), nullable=False),
        sa.Column("at", Utc(), nullable=False),
        sa.Column("sentence", sa.Text(), nullable=False),
        sa.Column("error_code", sa.String(length=60), nullable=True),
        sa.Column("actor", sa.String(length=80), nullable=False),
        sa.PrimaryKeyConstraint("workspace", "run_id", "seq", name=op.f("pk_attempt_events")),
    )
    op.create_table(
        "attempt_steps",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("run_id", sa.String(length=36), nullable=False),
        sa.Column("step", sa.String(length=24), nullable=False),
        sa.Column("try_no", sa.Integer(), nullable=False),
        sa.Column("dagster_run_id", sa.String(length=36), nullable=False),
        sa.Column("claimed_at", Utc(), nullable=False),
        sa.Column("ended_at", Utc(), nullable=True),
        sa.Column("outcome", sa.String(length=12), nullable=True),
        sa.PrimaryKeyConstraint("workspace", "run_id", "step", "try_no", name=op.f("pk_attempt_steps")),
    )


def _versions() -> None:
    """What went live and what answers now."""
    op.create_table(
        "versions",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("pipeline_id", sa.String(length=80), nullable=False),
        sa.Column("version_no", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=36), nullable=False),
        sa.Column("base_digest", sa.String(length=64), nullable=False),
        sa.Column("adapters", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("promoted_at", Utc(), nullable=False),
        sa.Column("rolled_back_at", Utc(), nullable=True),
        sa.PrimaryKeyConstraint("workspace", "pipeline_id", "version_no", name=op.f("pk_versions")),
        sa.UniqueConstraint("workspace", "run_id", name=op.f("uq_versions_workspace_run_id")),
    )
    op.create_table(
        "live",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("tag", sa.String(length=63), nullable=False),
        sa.Column("pipeline_id", sa.String(length=80), nullable=False),
        sa.Column("version_no", sa.Integer(), nullable=False),
        sa.Column("moved_at", Utc(), nullable=False),
        sa.PrimaryKeyConstraint("workspace", "tag", name=op.f("pk_live")),
    )


def _intake() -> None:
    """Small writes on their way to the lake, deletions and imports."""
    op.create_table(
        "inbox",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("table_name", sa.String(length=24), nullable=False),
        sa.Column("row_key", sa.String(length=80), nullable=False),
        sa.Column("sample_id", sa.String(length=36), nullable=False),
        sa.Column("payload", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", Utc(), nullable=False),
        sa.Column("batch", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_inbox")),
        sa.UniqueConstraint("workspace", "table_name", "row_key", name=op.f("uq_inbox_workspace_table_name_row_key")),
    )
    op.create_index("ix_inbox_batch", "inbox", ["workspace", "batch"])
    op.create_index("ix_inbox_sample", "inbox", ["workspace", "sample_id"])
    op.create_table(
        "batches",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("batch", sa.BigInteger(), nullable=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("opened_at", Utc(), nullable=False),
        sa.Column("done_at", Utc(), nullable=True),
        sa.PrimaryKeyConstraint("workspace", "batch", name=op.f("pk_batches")),
    )
    op.create_table(
        "tombstones",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("sample_id", sa.String(length=36), nullable=False),
        sa.Column("created_at", Utc(), nullable=False),
        sa.PrimaryKeyConstraint("workspace", "sample_id", name=op.f("pk_tombstones")),
    )
    op.create_table(
        "imports",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("import_id", sa.String(length=80), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("source", sa.String(length=200), nullable=False),
        sa.Column("rows", sa.Integer(), nullable=True),
        sa.Column("result", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("started_at", Utc(), nullable=False),
        sa.Column("finished_at", Utc(), nullable=True),
        sa.PrimaryKeyConstraint("workspace", "import_id", name=op.f("pk_imports")),
    )


def _rest() -> None:
    """Token counts per sample and the leases."""
    op.create_table(
        "token_counts",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("tokenizer", sa.String(length=64), nullable=False),
        sa.Column("sample_id", sa.String(length=36), nullable=False),
        sa.Column("right_key", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("workspace", "tokenizer", "sample_id", "right_key", name=op.f("pk_token_counts")),
    )
    op.create_table(
        "leases",
        sa.Column("workspace", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("token", sa.String(length=36), nullable=True),
        sa.Column("holder", sa.String(length=200), nullable=False),
        sa.Column("taken_at", Utc(), nullable=False),
        sa.Column("heartbeat_at", Utc(), nullable=False),
        sa.Column("ttl_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("workspace", "name", name=op.f("pk_leases")),
    )
