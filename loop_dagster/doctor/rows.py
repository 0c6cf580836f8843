"""Rows of the registry that cannot be read: a column of JSON that holds none, as an edit by hand leaves it.

Belongs here: finding them by SQL alone, since whoever reads the table by its columns ends at the first; the command
that mends one. Does not belong here: a damaged file (registry.py). PostgreSQL lets nothing into such a column that is
no JSON.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Final

import orjson
import sqlalchemy as sa

from loop_dagster.doctor.findings import Finding, mistake
from loop_dagster.store.registry import Registry
from loop_dagster.store.schema import attempts, metadata, pipelines

#: Columns whose readers ask for names in them.
_OBJECTS: Final = (attempts.c.frozen, attempts.c.counts, pipelines.c.settings)
#: Rows of one column that are named.
_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class BrokenRow:
    """A row with the column that cannot be read, and the row's key by column. What stands there is never shown."""

    table: str
    column: str
    key: dict[str, str]


def broken_rows(registry: Registry) -> tuple[BrokenRow, ...]:
    """Every such row of the workspace, at most five of a column; none on PostgreSQL."""
    if registry.backend != "sqlite":
        return ()
    found: list[BrokenRow] = []
    with registry.read() as connection:
        for table in metadata.sorted_tables:
            for column in table.columns:
                if isinstance(column.type, sa.JSON):
                    found += _of(connection, registry.workspace, column)
    return tuple(found)


def _of(connection: sa.Connection, workspace: str, column: sa.Column[object]) -> list[BrokenRow]:
    table = column.table
    text = sa.type_coerce(column, sa.Text)
    kind = sa.case((sa.func.json_valid(text) == 1, sa.func.json_type(text)), else_="none")
    wrong = kind != "object" if column in set(_OBJECTS) else kind == "none"
    keys = [one for one in table.primary_key.columns if one.name != "workspace"]
    query = (
        sa.select(*keys, text.label("_text")).where(table.c.workspace == workspace, column.is_not(None), wrong)
    ).limit(_NAMED)
    rows = connection.execute(query).mappings()
    return [
        BrokenRow(table.name, column.name, {one.name: str(row[one.name]) for one in keys})
        for row in rows
        if column in set(_OBJECTS) or not _is_json(row["_text"])
    ]


def _is_json(text: str | bytes) -> bool:
    try:
        orjson.loads(text)
    except ValueError:
        return False
    return True


def sql_command(registry: Registry, statement: str) -> str:
    """A statement as a command for a shell; it may hold single quotes alone. No password is shown."""
    if registry.path is not None:
        return f'`sqlite3 {shlex.quote(str(registry.path))} "{statement}"`'
    return f'`psql <the registry\'s URL> -c "{statement}"`'


def broken_row(registry: Registry, row: BrokenRow) -> Finding:
    """What cannot be read, and the way out: a copy, or for an attempt what the registry knows elsewhere."""
    mend = "End what runs, and put the registry back from a copy of before."
    where = ", ".join(row.key.values())
    if row.table == attempts.name:
        where = f"attempt {_attempt_key(registry, row.key['run_id'])}"
        if row.column == attempts.c.frozen.name:
            mend += (
                f" If there is none: {sql_command(registry, _frozen_again(row.key['run_id']))} writes down again what "
                "its pipeline had set. If it has not ended, `loop attempts cancel` it then: the rest is lost."
            )
    return mistake(
        "registry_row",
        "registry",
        where=f"{where}, column {row.column} of {row.table}",
        found="it holds no JSON that can be read, so every command that reads this table ends",
        mend=mend,
    )


def _attempt_key(registry: Registry, run_id: str) -> str:
    query = sa.select(attempts.c.pipeline_id, attempts.c.attempt_no).where(
        attempts.c.workspace == registry.workspace, attempts.c.run_id == run_id
    )
    with registry.read() as connection:
        row = connection.execute(query).one()
    return f"{row.pipeline_id}/{row.attempt_no:04d}"


def _frozen_again(run_id: str) -> str:
    """SQLite's statement that puts settings, model and digest of the attempt's own revision in place of what broke."""
    same = "WHERE workspace = a.workspace AND pipeline_id = a.pipeline_id"
    revision = f"FROM pipeline_revisions {same} AND revision = a.revision"
    return (
        "UPDATE attempts AS a SET frozen = json_object("  # noqa: S608  # shown, not run
        f"'settings', json((SELECT settings {revision})), "
        f"'model_id', (SELECT model_id {revision}), "
        f"'base_digest', coalesce(base_digest, (SELECT model_digest FROM pipelines {same})), "
        f"'tags', json_array((SELECT tag FROM pipelines {same})), 'judge', 'unknown', 'max_answer_tokens', 512) "
        f"WHERE run_id = '{run_id}'"
    )
