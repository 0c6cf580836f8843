"""Fixtures that every test may use: a home of its own, and a registry on SQLite and on a real PostgreSQL.

Belongs here: what more than one folder of tests needs. The PostgreSQL server comes from a package, starts with the
first test that asks for it (marker `postgres`) and ends with the session; each test gets a database of its own.
"""

from __future__ import annotations

import itertools
import multiprocessing
import shutil
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from homes import administer, database_at, postgres

from loop_dagster.store.registry import Registry

if TYPE_CHECKING:
    from doctor_patient import Patient

#: What the modules of tests import, so that a new process only has to import the one module that it works for.
PRELOADED = [
    "alembic.command",
    "hypothesis.strategies",
    "loop_dagster.store.artifacts",
    "loop_dagster.store.inbox",
    "loop_dagster.store.leases",
    "loop_dagster.store.pipelines",
    "loop_dagster.store.versions",
    "polars.testing",
    "psycopg2",
    "pytest",
    "sqlalchemy.dialects.sqlite",
]
_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that no process ends with one of them while the others have nothing left to do."""
    items.sort(key=lambda item: item.get_closest_marker("loop") is None)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty LOOP_HOME."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def tiny_model(request: pytest.FixtureRequest) -> Path:
    """Folder of a real tiny chat model (tests/models/tiny.py); built on first use and kept in pytest's cache."""
    import tiny

    cache = request.config.cache
    assert cache is not None
    return tiny.tiny_model(Path(cache.mkdir("tiny-model")))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of the administration database of a running server that holds a migrated template."""
    with postgres() as url:
        administer(url, "CREATE DATABASE loop_template")
        template = Registry(database_at(url, "loop_template"))
        template.migrate()
        template.dispose()
        yield url


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """URL of a migrated database that nobody else uses."""
    name = f"loop_{next(_numbers)}"
    administer(postgres_server, f"CREATE DATABASE {name} TEMPLATE loop_template")
    yield database_at(postgres_server, name)
    administer(postgres_server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def empty_postgres_url(postgres_server: str) -> Iterator[str]:
    """URL of a database without any table."""
    name = f"loop_empty_{next(_numbers)}"
    administer(postgres_server, f"CREATE DATABASE {name}")
    yield database_at(postgres_server, name)
    administer(postgres_server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def sqlite_url(home: Path) -> str:
    """URL of a SQLite file that does not exist yet."""
    return f"sqlite:///{home / 'registry.db'}"


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy, since migrating takes a tenth of a second."""
    path = tmp_path_factory.mktemp("template") / "registry.db"
    template = Registry(f"sqlite:///{path}")
    template.migrate()
    template.dispose()
    return path


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def registry(request: pytest.FixtureRequest) -> Iterator[Registry]:
    """A migrated registry; the test runs once on SQLite and once on PostgreSQL."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sqlite_registry")
        return
    registry = Registry(request.getfixturevalue("postgres_url"))
    yield registry
    registry.dispose()


@pytest.fixture
def sqlite_registry(sqlite_url: str, sqlite_template: Path) -> Iterator[Registry]:
    """A migrated registry on SQLite alone, for tests of what stands on it."""
    registry = Registry(sqlite_url)
    assert registry.path is not None
    shutil.copy(sqlite_template, registry.path)
    yield registry
    registry.dispose()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of an empty bucket, reached as an S3 server that is not Amazon's is: by variables of the environment."""
    import s3_server

    bucket = f"loop-{next(_numbers)}"  # buckets are there for all servers of a process
    with s3_server.running(bucket) as options:
        for name, value in options.items():
            monkeypatch.setenv(name.upper(), value)
        yield f"s3://{bucket}/lake"


@pytest.fixture
def patient(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Patient]:
    """A whole healthy installation, for the doctor's tests to plant mistakes in."""
    from doctor_patient import admitted

    yield from admitted(tmp_path, tiny_model, monkeypatch, capsys)


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """Starts real processes quickly: they fork from a server that has imported the stores and opened nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
