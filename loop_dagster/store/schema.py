"""The registry's SQL tables. Alembic's first migration creates exactly these.

Belongs here: columns, keys and indices, valid on SQLite and PostgreSQL alike. Every table carries the workspace, and
every unique key begins with it. Times are timezone-aware UTC.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

from loop_dagster.rules.states import TERMINAL

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class Utc(TypeDecorator[datetime]):
    """A timezone-aware UTC time on both databases; a naive value is refused before it can be stored."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"a time without a zone cannot be stored: {value!r}")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


Json = sa.JSON(none_as_null=True)


def _workspace() -> sa.Column[Any]:
    return sa.Column("workspace", sa.String(63), nullable=False)


pipelines = sa.Table(
    "pipelines",
    metadata,
    _workspace(),
    sa.Column("pipeline_id", sa.String(80), nullable=False),  # `<tag>-<4 hex>`, immutable
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("name_key", sa.String(200), nullable=False),  # folded name; never free again, also after a delete
    sa.Column("tag", sa.String(63), nullable=False),
    sa.Column("model_id", sa.Text, nullable=False),
    sa.Column("model_digest", sa.String(64)),  # the exact base, pinned on save
    sa.Column("seed", sa.BigInteger, nullable=False),  # of the hold-back order; never changes
    sa.Column("enabled", sa.Boolean, nullable=False),
    sa.Column("paused_reason", sa.String(40)),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("settings", Json, nullable=False),  # rules/pipelines.py `PipelineSettings`
    sa.Column("next_due_at", Utc),  # the sensor looks again then even if nothing changed
    sa.Column("looked_at", Utc),  # when it looked last, and what it said
    sa.Column("look_said", sa.Text),
    sa.Column("failures", sa.Integer, nullable=False, server_default="0"),  # attempts in a row that kept no adapter
    sa.Column("train_now", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("created_at", Utc, nullable=False),
    sa.Column("updated_at", Utc, nullable=False),
    sa.Column("deleted_at", Utc),
    sa.PrimaryKeyConstraint("workspace", "pipeline_id"),
    sa.UniqueConstraint("workspace", "name_key"),
    sa.UniqueConstraint("workspace", "tag"),
)

pipeline_revisions = sa.Table(
    "pipeline_revisions",
    metadata,
    _workspace(),
    sa.Column("pipeline_id", sa.String(80), nullable=False),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("settings", Json, nullable=False),
    sa.Column("model_id", sa.Text, nullable=False),
    sa.Column("created_at", Utc, nullable=False),
    sa.PrimaryKeyConstraint("workspace", "pipeline_id", "revision"),
)

sources = sa.Table(
    "sources",
    metadata,
    _workspace(),
    sa.Column("source", sa.String(200), nullable=False),
    sa.Column("enabled", sa.Boolean, nullable=False),
    sa.Column("retention_days", sa.Integer),
    sa.Column("sample_rate", sa.Float),
    sa.Column("tags", Json, nullable=False),
    sa.Column("updated_at", Utc, nullable=False),
    sa.PrimaryKeyConstraint("workspace", "source"),
)

attempts = sa.Table(
    "attempts",
    metadata,
    _workspace(),
    sa.Column("run_id", sa.String(36), nullable=False),  # UUIDv7; the wire's id of an attempt
    sa.Column("pipeline_id", sa.String(80), nullable=False),
    sa.Column("attempt_no", sa.Integer, nullable=False),
    sa.Column("state", sa.String(24), nullable=False),
    sa.Column("since", Utc, nullable=False),  # when it entered that state
    sa.Column("trigger", sa.String(12), nullable=False),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("frozen", Json, nullable=False),  # settings, model, judge and limits as they were when it opened
    sa.Column("try_no", sa.Integer, nullable=False, server_default="1"),  # of the step that its state needs
    sa.Column("train_rows", sa.Integer),
    sa.Column("holdout_rows", sa.Integer),
    sa.Column("counts", Json, nullable=False),  # new, carried, replayed, left out by reason
    sa.Column("base_digest", sa.String(64)),
    sa.Column("adapter_digest", sa.String(64)),
    sa.Column("compared_with", sa.String(10)),
    sa.Column("compared_with_version", sa.Integer),
    sa.Column("verdict", sa.String(16)),
    sa.Column("report", Json),  # the numbers of the report that lists show
    sa.Column("decision", sa.String(16)),
    sa.Column("decided_at", Utc),
    sa.Column("forced", sa.Boolean, nullable=False, server_default=sa.false()),  # the approval was with force
    sa.Column("version_no", sa.Integer),
    sa.Column("reason", sa.Text),  # its last sentence
    sa.Column("error_code", sa.String(60)),
    sa.Column("review_until", Utc),
    sa.Column("cancel_requested", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("gpu_seconds", sa.Integer),
    sa.Column("created_at", Utc, nullable=False),
    sa.Column("finished_at", Utc),
    sa.PrimaryKeyConstraint("workspace", "run_id"),
    sa.UniqueConstraint("workspace", "pipeline_id", "attempt_no"),
)
# One attempt of a pipeline at a time: two daemons, a restart or a repeated tick never open two.
sa.Index(
    "uq_attempts_active",
    attempts.c.workspace,
    attempts.c.pipeline_id,
    unique=True,
    sqlite_where=attempts.c.state.not_in(TERMINAL),
    postgresql_where=attempts.c.state.not_in(TERMINAL),
)

attempt_events = sa.Table(
    "attempt_events",
    metadata,
    _workspace(),
    sa.Column("run_id", sa.String(36), nullable=False),
    sa.Column("seq", sa.Integer, nullable=False),
    sa.Column("state", sa.String(24), nullable=False),
    sa.Column("at", Utc, nullable=False),
    sa.Column("sentence", sa.Text, nullable=False),
    sa.Column("error_code", sa.String(60)),
    sa.Column("actor", sa.String(80), nullable=False),  # `loop`, or the person or key that asked for it
    sa.PrimaryKeyConstraint("workspace", "run_id", "seq"),
)

# A run's first act is to claim (attempt, step, try); a second run of the same claim ends as skipped.
attempt_steps = sa.Table(
    "attempt_steps",
    metadata,
    _workspace(),
    sa.Column("run_id", sa.String(36), nullable=False),
    sa.Column("step", sa.String(24), nullable=False),
    sa.Column("try_no", sa.Integer, nullable=False),
    sa.Column("dagster_run_id", sa.String(36), nullable=False),
    sa.Column("claimed_at", Utc, nullable=False),
    sa.Column("ended_at", Utc),
    sa.Column("outcome", sa.String(12)),  # done, failed, lost
    sa.PrimaryKeyConstraint("workspace", "run_id", "step", "try_no"),
)

versions = sa.Table(
    "versions",
    metadata,
    _workspace(),
    sa.Column("pipeline_id", sa.String(80), nullable=False),
    sa.Column("version_no", sa.Integer, nullable=False),
    sa.Column("run_id", sa.String(36), nullable=False),
    sa.Column("base_digest", sa.String(64), nullable=False),
    sa.Column("adapters", Json, nullable=False),  # ordered adapter digests: a version is base + adapters
    sa.Column("promoted_at", Utc, nullable=False),
    sa.Column("rolled_back_at", Utc),
    sa.PrimaryKeyConstraint("workspace", "pipeline_id", "version_no"),
    sa.UniqueConstraint("workspace", "run_id"),
)

live = sa.Table(
    "live",
    metadata,
    _workspace(),
    sa.Column("tag", sa.String(63), nullable=False),  # answers as `loop-<tag>`
    sa.Column("pipeline_id", sa.String(80), nullable=False),
    sa.Column("version_no", sa.Integer, nullable=False),
    sa.Column("moved_at", Utc, nullable=False),
    sa.PrimaryKeyConstraint("workspace", "tag"),
)

inbox = sa.Table(
    "inbox",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    _workspace(),
    sa.Column("table_name", sa.String(24), nullable=False),  # samples, feedback or labels
    sa.Column("row_key", sa.String(80), nullable=False),  # identity of a sample, id of feedback or label
    sa.Column("sample_id", sa.String(36), nullable=False),
    sa.Column("payload", Json, nullable=False),  # one row of the Delta table, times as ISO text
    sa.Column("created_at", Utc, nullable=False),
    sa.Column("batch", sa.BigInteger),  # frozen membership of a drain; null while it waits
    sa.UniqueConstraint("workspace", "table_name", "row_key"),
    sa.Index("ix_inbox_batch", "workspace", "batch"),
    sa.Index("ix_inbox_sample", "workspace", "sample_id"),
)

batches = sa.Table(
    "batches",
    metadata,
    _workspace(),
    sa.Column("batch", sa.BigInteger, nullable=False),
    sa.Column("rows", sa.Integer, nullable=False),
    sa.Column("opened_at", Utc, nullable=False),
    sa.Column("done_at", Utc),
    sa.PrimaryKeyConstraint("workspace", "batch"),
)

tombstones = sa.Table(
    "tombstones",
    metadata,
    _workspace(),
    sa.Column("sample_id", sa.String(36), nullable=False),
    sa.Column("created_at", Utc, nullable=False),
    sa.PrimaryKeyConstraint("workspace", "sample_id"),
)

imports = sa.Table(
    "imports",
    metadata,
    _workspace(),
    sa.Column("import_id", sa.String(80), nullable=False),
    sa.Column("name", sa.Text, nullable=False),  # file name, never a path
    sa.Column("source", sa.String(200), nullable=False),
    sa.Column("rows", sa.Integer),
    sa.Column("result", Json),  # the counts of the last call that finished
    sa.Column("started_at", Utc, nullable=False),
    sa.Column("finished_at", Utc),
    sa.PrimaryKeyConstraint("workspace", "import_id"),
)

token_counts = sa.Table(
    "token_counts",
    metadata,
    _workspace(),
    sa.Column("tokenizer", sa.String(64), nullable=False),  # digest of tokenizer and template
    sa.Column("sample_id", sa.String(36), nullable=False),
    sa.Column("right_key", sa.BigInteger, nullable=False),
    sa.Column("tokens", sa.Integer, nullable=False),  # -1: the template refuses this conversation
    sa.PrimaryKeyConstraint("workspace", "tokenizer", "sample_id", "right_key"),
)

#: What the scoring of unreviewed samples did for each pipeline since its last attempt opened, and what holds it.
scorings = sa.Table(
    "scorings",
    metadata,
    _workspace(),
    sa.Column("pipeline_id", sa.String(80), nullable=False),
    sa.Column("nanocents", sa.BigInteger, nullable=False),  # what no attempt has taken over yet
    sa.Column("scored", sa.Integer, nullable=False),
    sa.Column("picked", sa.Integer, nullable=False),
    sa.Column("last_chunk", sa.String(36)),  # the newest chunk that is stored: stored once, however often
    sa.Column("failures", sa.Integer, nullable=False),  # times in a row that the judge was away or rated nothing
    sa.Column("hold_code", sa.String(40)),
    sa.Column("hold_sentence", sa.Text),
    sa.Column("hold_until", Utc),  # null with a code: until something is changed
    sa.Column("hold_key", sa.String(64)),  # the settings that the hold is about
    sa.Column("updated_at", Utc, nullable=False),
    sa.PrimaryKeyConstraint("workspace", "pipeline_id"),
)

#: Which judge was asked about which unreviewed sample; the score itself is feedback.
scores = sa.Table(
    "scores",
    metadata,
    _workspace(),
    sa.Column("sample_id", sa.String(36), nullable=False),
    sa.Column("judge_key", sa.String(32), nullable=False),  # judge, model and rubric
    sa.Column("scored", sa.Boolean, nullable=False),
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("next_try_at", Utc),  # of one that could not be rated; null: never again
    sa.Column("created_at", Utc, nullable=False),
    sa.PrimaryKeyConstraint("workspace", "sample_id", "judge_key"),
)

leases = sa.Table(
    "leases",
    metadata,
    _workspace(),
    sa.Column("name", sa.String(120), nullable=False),
    sa.Column("token", sa.String(36)),  # null: free, or revoked
    sa.Column("holder", sa.String(200), nullable=False),
    sa.Column("taken_at", Utc, nullable=False),
    sa.Column("heartbeat_at", Utc, nullable=False),
    sa.Column("ttl_s", sa.Float, nullable=False),
    sa.PrimaryKeyConstraint("workspace", "name"),
)

#: One row a workspace: which registry this is (owner.py).
installations = sa.Table(
    "installations",
    metadata,
    _workspace(),
    sa.Column("registry_id", sa.String(36), nullable=False),
    sa.Column("created_at", Utc, nullable=False),
    sa.PrimaryKeyConstraint("workspace"),
)

#: Keys of the API. The key itself is never kept, only its hash; `workspace` is the one that it was made in.
api_keys = sa.Table(
    "api_keys",
    metadata,
    _workspace(),
    sa.Column("key_id", sa.String(36), nullable=False),
    sa.Column("key_hash", sa.String(64), nullable=False),  # sha256 of the key, hex
    sa.Column("prefix", sa.String(16), nullable=False),  # the first characters, by which people tell keys apart
    sa.Column("name", sa.String(80), nullable=False),
    sa.Column("scopes", Json, nullable=False),
    sa.Column("workspaces", Json, nullable=False),  # what it may be used for
    sa.Column("created_at", Utc, nullable=False),
    sa.Column("last_used_at", Utc),  # to the minute: a call does not cost a write
    sa.Column("revoked_at", Utc),
    sa.PrimaryKeyConstraint("workspace", "key_id"),
    sa.Index("ix_api_keys_key_hash", "key_hash"),
)

#: Calls through the gateway that were not recorded, by day (UTC), tag and reason.
capture_misses = sa.Table(
    "capture_misses",
    metadata,
    _workspace(),
    sa.Column("day", sa.Date, nullable=False),
    sa.Column("tag", sa.String(63), nullable=False),
    sa.Column("reason", sa.String(12), nullable=False),  # no_pipeline, too_large, incomplete
    sa.Column("calls", sa.Integer, nullable=False),
    sa.Column("last_at", Utc, nullable=False),
    sa.PrimaryKeyConstraint("workspace", "day", "tag", "reason"),
)

#: Sample ids that the gateway gave out and that say of themselves too little: of a call that takes long (when it was
#: last seen under way), or of a request id that came again (the id of its first sample).
issued_ids = sa.Table(
    "issued_ids",
    metadata,
    _workspace(),
    sa.Column("sample_id", sa.String(36), nullable=False),
    sa.Column("seen_at", Utc, nullable=False),
    sa.Column("first_id", sa.String(36)),
    sa.PrimaryKeyConstraint("workspace", "sample_id"),
    sa.Index("ix_issued_ids_seen_at", "workspace", "seen_at"),
)

#: Writes that came with an Idempotency-Key: the answer of the first one, for a day.
idempotent_calls = sa.Table(
    "idempotent_calls",
    metadata,
    _workspace(),
    sa.Column("call_key", sa.String(64), nullable=False),  # hash of the API key's id and the Idempotency-Key
    sa.Column("fingerprint", sa.String(64), nullable=False),  # hash of method, address and body
    sa.Column("token", sa.String(36), nullable=False),  # whose turn it is while there is no answer
    sa.Column("status", sa.Integer),  # null while the first call is under way
    sa.Column("answer", Json),
    sa.Column("created_at", Utc, nullable=False),
    sa.PrimaryKeyConstraint("workspace", "call_key"),
    sa.Index("ix_idempotent_calls_created_at", "workspace", "created_at"),
)

#: Saved sets of conditions. A name is free again once its dataset is deleted.
datasets = sa.Table(
    "datasets",
    metadata,
    _workspace(),
    sa.Column("dataset_id", sa.String(36), nullable=False),
    sa.Column("name", sa.String(80), nullable=False),
    sa.Column("name_key", sa.String(200), nullable=False),  # folded name
    sa.Column("conditions", Json, nullable=False),  # rules/conditions.py `DatasetConditions`
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("created_by", sa.String(80)),  # the key that saved it; null for the command line
    sa.Column("created_at", Utc, nullable=False),
    sa.Column("updated_at", Utc, nullable=False),
    sa.PrimaryKeyConstraint("workspace", "dataset_id"),
    sa.UniqueConstraint("workspace", "name_key"),
)
