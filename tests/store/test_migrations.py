"""The revisions make exactly the declared tables, once, however many processes start together."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from loop_dagster.errors import RegistryTooNew
from loop_dagster.rules.states import STATES, TERMINAL
from loop_dagster.store import migrations, schema
from loop_dagster.store.registry import Registry

FOLDER = Path(migrations.__file__).parent


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def empty(request: pytest.FixtureRequest) -> Iterator[Registry]:
    registry = Registry(request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "empty_postgres_url"))
    yield registry
    registry.dispose()


def migrate(url: str) -> None:
    Registry(url).migrate()


def test_the_list_of_revisions_is_the_folder() -> None:
    config = Config()
    config.set_main_option("script_location", str(FOLDER))
    script = ScriptDirectory.from_config(config)
    assert tuple(revision.revision for revision in script.walk_revisions())[::-1] == migrations.REVISIONS
    assert script.get_current_head() == migrations.HEAD


def test_from_empty_gives_the_declared_tables(empty: Registry) -> None:
    assert empty.revision() is None
    empty.migrate()
    assert empty.revision() == migrations.HEAD
    with empty.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []


def test_twice_changes_nothing(empty: Registry) -> None:
    empty.migrate()
    with empty.write() as connection:
        connection.execute(
            sa.insert(schema.tombstones).values(workspace="w", sample_id="s", created_at=sa.func.current_timestamp())
        )
    empty.migrate()
    Registry(empty.url).migrate()
    with empty.read() as connection:
        assert connection.execute(sa.select(schema.tombstones.c.sample_id)).scalars().all() == ["s"]


def test_many_processes_at_once(empty: Registry, processes: ForkServerContext) -> None:
    children = [processes.Process(target=migrate, args=(empty.url,)) for _ in range(6)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 6
    assert empty.check().ok


def test_a_newer_registry_is_left_alone(empty: Registry) -> None:
    empty.migrate()
    with empty.write() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(RegistryTooNew, match="9999"):
        empty.migrate()


def test_a_failing_revision_leaves_nothing(empty: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sa.Connection.execute
    seen: list[str] = []

    def breaks(self: sa.Connection, statement: Any, *args: Any, **kwargs: Any) -> Any:
        if "versions" in str(statement) and "CREATE TABLE" in str(statement).upper():
            seen.append(str(statement))
            raise OSError("the disk is full")
        return whole(self, statement, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(sa.Connection, "execute", breaks)
        with pytest.raises(OSError, match="full"):
            empty.migrate()
    assert seen
    assert empty.revision() is None
    with empty.read() as connection:
        assert sa.inspect(connection).get_table_names() == []
    empty.migrate()
    assert empty.check().ok


def test_one_active_attempt_per_pipeline_in_every_state(registry: Registry) -> None:
    """The partial index is out of reach of the comparison above, so each state is tried."""
    for state in STATES:
        with registry.write() as connection:
            connection.execute(sa.insert(schema.attempts).values(**attempt(1, state)))
            connection.execute(sa.insert(schema.attempts).values(**{**attempt(1, state), "workspace": "other"}))
        if state in TERMINAL:
            with registry.write() as connection:
                connection.execute(sa.insert(schema.attempts).values(**attempt(2, state)))
            continue
        with pytest.raises(sa.exc.IntegrityError), registry.write() as connection:
            connection.execute(sa.insert(schema.attempts).values(**attempt(2, "built", of=state)))


def attempt(number: int, state: str, *, of: str | None = None) -> dict[str, Any]:
    """An attempt of a pipeline that is named after the state."""
    now = sa.func.current_timestamp()
    return {
        "workspace": "default",
        "run_id": f"{of or state}-{number}",
        "pipeline_id": of or state,
        "attempt_no": number,
        "state": state,
        "since": now,
        "trigger": "data",
        "revision": 1,
        "frozen": {},
        "counts": {},
        "created_at": now,
    }


def test_every_table_and_unique_key_has_the_workspace() -> None:
    for table in schema.metadata.tables.values():
        assert not table.c.workspace.nullable
        keys = [item for item in table.constraints if isinstance(item, (sa.PrimaryKeyConstraint, sa.UniqueConstraint))]
        for key in [*keys, *(index for index in table.indexes if index.unique)]:
            names = [column.name for column in key.columns]
            assert names[0] == "workspace" or names == ["id"], (table.name, names)


def test_what_was_approved_before_force_was_kept_stays_approved(
    empty: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An inconclusive attempt on its way to live was approved with force: nothing else was ever accepted."""
    cases = {
        "forced": ("promoting", "promoted", "inconclusive"),
        "plain": ("promoting", "promoted", "better"),
        "own": ("promoting", None, "better"),
        "waits": ("awaiting_review", None, "inconclusive"),
    }
    whole = command.upgrade
    with monkeypatch.context() as patch:
        patch.setattr(command, "upgrade", lambda config, _to: whole(config, "0007"))
        empty.migrate()
    with empty.write() as connection:
        for name, (state, decision, verdict) in cases.items():
            row = attempt(1, state, of=name) | {"decision": decision, "verdict": verdict}
            connection.execute(sa.insert(schema.attempts).values(**row))
    empty.migrate()
    with empty.read() as connection:
        columns = schema.attempts.c
        found = connection.execute(sa.select(columns.pipeline_id).where(columns.forced)).scalars().all()
    assert found == ["forced"]


def test_names_of_revision_files() -> None:
    for path in (FOLDER / "versions").glob("r*.py"):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert path.stem.startswith(f"r{module.revision}_")
