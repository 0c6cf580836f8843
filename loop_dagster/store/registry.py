"""The registry: one SQL database for everything that is not a row of the lake, on SQLite or PostgreSQL.

Belongs here: the engine and its settings, transactions, locks, migration, health. Does not belong here: any table's
meaning (pipelines.py, attempts.py, versions.py, inbox.py, leases.py).

A transaction is short: no network call and no Delta call happens inside one. On SQLite every write begins IMMEDIATE,
so that writers queue instead of failing when a read turns into a write. On PostgreSQL a read sees one snapshot, and
writers meet on row locks, unique keys and advisory locks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.engine import URL

from loop_dagster.errors import (
    BadRequest,
    RegistryDamaged,
    RegistryNotReady,
    RegistryNotWritable,
    RegistryTooNew,
    RegistryUnavailable,
)
from loop_dagster.store import migrations

Backend = Literal["sqlite", "postgresql"]

BUSY_S: Final = 30.0
#: Set on every SQLite connection. FULL: what was acknowledged survives a power cut. secure_delete: deleted text does
#: not stay in free pages.
PRAGMAS: Final[Mapping[str, tuple[str, int]]] = {
    "synchronous": ("FULL", 2),
    "secure_delete": ("ON", 1),
    "busy_timeout": (str(int(BUSY_S * 1000)), int(BUSY_S * 1000)),
}
_SECRETS: Final = ("password", "sslpassword", "passfile")
#: What SQLite says of a file that is no database (any more), and what either says when nothing more can be written.
_DAMAGED: Final = ("file is not a database", "disk image is malformed")
_NOT_WRITABLE: Final = ("disk is full", "readonly database", "No space left on device")
#: Engines inherited over a fork. Using or even closing their connections could break the parent's, so they stay open.
_INHERITED: list[sa.Engine] = []


@dataclass(frozen=True, slots=True)
class RegistryHealth:
    """What `Registry.check` found. `problems` is empty when all is well; each is a sentence."""

    where: str
    backend: Backend
    server: str
    revision: str | None
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


class Registry:
    """One workspace of the database at `url`: `sqlite:///<file>` or `postgresql://…` (psycopg2 is put in).

    May be pickled and may cross a fork; each process gets an engine of its own. Statements of one workspace never see
    another's rows, since every statement of the stores names `workspace`. With `read_only` nothing changes, not even
    a file beside SQLite's that stays.
    """

    def __init__(self, url: str, workspace: str = "default", *, read_only: bool = False) -> None:
        self._url = _parse(url)
        self.workspace = workspace
        self._read_only = read_only
        self._lock = threading.Lock()
        self._engine: sa.Engine | None = None
        self._pid = 0

    def __reduce__(self) -> tuple[type[Registry], tuple[str, str]]:
        return Registry, (self.url, self.workspace)

    def __repr__(self) -> str:
        return f"Registry({self.where!r}, {self.workspace!r})"

    @property
    def url(self) -> str:
        """The whole URL, password included: for a child's environment, never for a message or an argument list."""
        return self._url.render_as_string(hide_password=False)

    @property
    def where(self) -> str:
        """The URL without any password, for messages."""
        hidden = {key: "***" for key in self._url.query if key.lower() in _SECRETS}
        return self._url.update_query_dict(hidden).render_as_string(hide_password=True)

    @property
    def backend(self) -> Backend:
        return "sqlite" if self._url.get_backend_name() == "sqlite" else "postgresql"

    @property
    def path(self) -> Path | None:
        """The database file on SQLite, None on PostgreSQL."""
        return Path(self._url.database) if self.backend == "sqlite" and self._url.database else None

    @property
    def engine(self) -> sa.Engine:
        """This process's engine; made on first use, again after a fork."""
        if self._engine is None or self._pid != os.getpid():
            if self._pid not in (0, os.getpid()):
                self._lock = threading.Lock()  # the parent's may have been held at the moment of the fork
            with self._lock:
                if self._engine is not None and self._pid != os.getpid():
                    _INHERITED.append(self._engine)
                    self._engine = None
                if self._engine is None:
                    self._engine, self._pid = _make_engine(self._url, read_only=self._read_only), os.getpid()
        return self._engine

    # transactions

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """One read-only transaction over one snapshot.

        Raises RegistryUnavailable when the database does not answer, RegistryNotReady when its tables are missing.
        """
        options: dict[str, Any] = {}
        if self.backend == "postgresql":
            options = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        with self._transaction(options) as connection:
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """One writing transaction: committed when the block ends, rolled back when it raises.

        On SQLite it waits up to 30 s for other writers. Those of this process queue up: SQLite itself only tries again
        and again, and whoever sleeps longest between two tries may come last each time. Errors as in `read`.
        """
        with self._turn(), self._transaction({"begin": "IMMEDIATE"}) as connection:
            yield connection

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if self.path is None:
            yield
            return
        turn = _turns(str(self.path))
        if not turn.acquire(timeout=BUSY_S):
            raise RegistryUnavailable(self.where, "database is locked")
        try:
            yield
        finally:
            turn.release()

    @contextlib.contextmanager
    def _transaction(self, options: dict[str, Any]) -> Iterator[sa.Connection]:
        try:
            with self.engine.connect() as connection:
                chosen = connection.execution_options(**options)
                with chosen.begin():
                    yield chosen
        except (sa.exc.DBAPIError, sa.exc.TimeoutError, sqlite3.Error) as error:
            known = self._explain(error)
            if known is None:
                raise
            raise known from error

    def _explain(self, error: sa.exc.SQLAlchemyError | sqlite3.Error) -> RegistryUnavailable | RegistryNotReady | None:
        original = getattr(error, "orig", None) or error
        found = str(original).strip().partition("\n")[0]
        if "no such table" in found or getattr(original, "pgcode", None) == "42P01":
            return RegistryNotReady(self.where, "without its tables", migrations.HEAD)
        if any(sign in found for sign in _DAMAGED):
            return RegistryDamaged(self.where, found)
        if any(sign in found for sign in _NOT_WRITABLE):
            return RegistryNotWritable(self.where, found)
        if isinstance(error, sa.exc.TimeoutError):
            return RegistryUnavailable(self.where, "no connection became free within 30 s")
        if isinstance(error, (sa.exc.OperationalError, sa.exc.InterfaceError, sqlite3.OperationalError)):
            return RegistryUnavailable(self.where, _without(found, self._url) or type(original).__name__)
        return None

    def lock(self, connection: sa.Connection, name: str, *, shared: bool = False) -> None:
        """Hold the lock `name` until the transaction ends; others wait, unless all of them share it.

        Nothing to do on SQLite, where writing transactions follow each other anyway. Take it first in a transaction.
        """
        if self.backend == "postgresql":
            number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
            function = "pg_advisory_xact_lock_shared" if shared else "pg_advisory_xact_lock"
            connection.execute(sa.text(f"SELECT {function}(:number)"), {"number": number})

    def now(self, connection: sa.Connection) -> datetime:
        """The one clock that all users of this database share: the server's; on SQLite, this machine's."""
        if self.backend == "postgresql":
            moment: datetime = connection.execute(sa.text("SELECT clock_timestamp()")).scalar_one()
            return moment.astimezone(UTC)
        return datetime.now(UTC)

    # migration and health

    def revision(self) -> str | None:
        """Revision of the tables; None while there are none."""
        if self.path is not None and not self.path.exists():
            return None
        with self.read() as connection:
            return migrations.revision_of(connection)

    def migrate(self) -> None:
        """Create or upgrade the tables to this version's revision, all at once or not at all.

        Safe when several processes start together: one does it and the others find it done. Raises RegistryTooNew,
        RegistryUnavailable.
        """
        if self._known(self.revision()) == migrations.HEAD:
            return
        if self.path is not None:
            self._prepare_file(self.path)
        with self.write() as connection:
            self.lock(connection, "loop/migrate")
            if self._known(migrations.revision_of(connection)) != migrations.HEAD:
                migrations.upgrade(connection)

    def _known(self, revision: str | None) -> str | None:
        if revision is not None and revision not in migrations.REVISIONS:
            raise RegistryTooNew(self.where, revision, migrations.HEAD)
        return revision

    def _prepare_file(self, path: Path) -> None:
        """The database file, readable by its owner alone, in WAL mode (which the file remembers)."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise RegistryUnavailable(self.where, str(error)) from error
        give_up = time.monotonic() + BUSY_S
        while True:  # two processes that switch at once: SQLite refuses one at once instead of letting it wait
            try:
                self._outside("PRAGMA journal_mode = WAL")
                return
            except RegistryUnavailable as error:
                if time.monotonic() > give_up or "locked" not in str(error):
                    raise
                time.sleep(0.05)

    def check(self) -> RegistryHealth:
        """Whether the database answers, is at this version's revision and keeps what it acknowledges."""
        problems: list[str] = []
        server, revision = "", None
        if self.path is not None and not self.path.exists():
            return RegistryHealth(
                self.where, self.backend, "", None, ("There is no database file yet: run `loop init`.",)
            )
        try:
            revision = self.revision()
            with self.read() as connection:
                server, problems = self._settings(connection)
        except (RegistryUnavailable, RegistryNotReady) as error:
            problems.append(error.message)
        if not problems and revision != migrations.HEAD:
            problems.append(
                f"The tables are at revision {revision or 'none'}, needed {migrations.HEAD}: run `loop init`."
            )
        return RegistryHealth(self.where, self.backend, server, revision, tuple(problems))

    def _settings(self, connection: sa.Connection) -> tuple[str, list[str]]:
        problems = []
        if self.backend == "postgresql":
            version = connection.execute(sa.text("SHOW server_version")).scalar_one()
            for name in ("fsync", "synchronous_commit"):
                value = connection.execute(sa.text(f"SHOW {name}")).scalar_one()
                if value == "off":
                    problems.append(
                        f"The server's {name} is off: acknowledged samples can be lost in a crash. Turn it on."
                    )
            return f"PostgreSQL {version}", problems
        version = connection.execute(sa.text("SELECT sqlite_version()")).scalar_one()
        wanted: dict[str, str | int] = {name: want for name, (_, want) in PRAGMAS.items()}
        if self.path is not None and os.access(self.path.parent, os.W_OK):  # elsewhere no log can be, nor is needed
            wanted["journal_mode"] = "wal"
        for name, want in wanted.items():
            value = connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            if value != want:
                problems.append(
                    f"SQLite's {name} is {value}, needed {want}: run `loop init`, or use another file system."
                )
        return f"SQLite {version}", problems

    def scrub(self) -> bool:
        """Take deleted rows out of the files as well; part of every purge. False when a reader was in the way.

        SQLite: the write-ahead log is moved into the database and cut to nothing (secure_delete has zeroed the pages).
        PostgreSQL: the inbox, the only table with text, is rewritten; its own write-ahead log lasts as its owner says.
        """
        try:
            if self.backend == "sqlite":
                return bool(self._outside("PRAGMA wal_checkpoint(TRUNCATE)")[0] == 0)
            with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql("VACUUM (FULL) inbox")
            return True
        except sa.exc.DBAPIError as error:
            known = self._explain(error)
            if known is None:
                raise
            raise known from error

    def _outside(self, statement: str) -> tuple[Any, ...]:
        """First row of a SQLite statement that cannot run inside a transaction."""
        connection = self.engine.raw_connection()
        try:
            row: tuple[Any, ...] = connection.cursor().execute(statement).fetchone()
            return row
        except sqlite3.Error as error:
            raise self._explain(error) or RegistryUnavailable(self.where, str(error)) from error
        finally:
            connection.close()

    def takes_writes(self, *, within_s: float) -> bool:
        """Whether a write could begin within so many seconds; PostgreSQL, whose writers wait for rows alone, says yes.

        Nothing is written.
        """
        if self.path is None:
            return True
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=within_s, isolation_level=None)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            return False
        return True

    def dispose(self) -> None:
        """Close this process's connections; the registry can be used again afterwards."""
        if self._engine is not None and self._pid == os.getpid():
            self._engine.dispose()


#: Whose turn it is to write, by process and SQLite file: a lock that a parent held at a fork is none of the child's.
_TURNS: Final[dict[tuple[int, str], threading.Lock]] = {}


def _turns(path: str) -> threading.Lock:
    return _TURNS.setdefault((os.getpid(), path), threading.Lock())


def insert_new(connection: sa.Connection, table: sa.Table, row: Mapping[str, Any]) -> bool:
    """Insert one row; False, and nothing else happens, when one with the same unique key is there."""
    insert = postgres_insert if connection.dialect.name == "postgresql" else sqlite_insert
    return connection.execute(insert(table).values(**row).on_conflict_do_nothing()).rowcount == 1


def insert_many_new(connection: sa.Connection, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows that have the same columns; those whose unique key is there already are left as they are."""
    if rows:
        connection.execute(_insert_new(connection.dialect.name, table), [dict(row) for row in rows])


@functools.cache
def _insert_new(dialect: str, table: sa.Table) -> sa.Insert:
    insert = postgres_insert if dialect == "postgresql" else sqlite_insert
    return insert(table).on_conflict_do_nothing()


def put_row(connection: sa.Connection, table: sa.Table, row: Mapping[str, Any]) -> None:
    """Insert one row, or replace every column of the one with its primary key."""
    insert = postgres_insert if connection.dialect.name == "postgresql" else sqlite_insert
    key = [column.name for column in table.primary_key]
    rest = {name: value for name, value in row.items() if name not in key}
    connection.execute(insert(table).values(**row).on_conflict_do_update(index_elements=key, set_=rest))


def _parse(url: str) -> URL:
    try:
        parsed = sa.make_url(url.replace("postgres://", "postgresql://", 1) if url.startswith("postgres://") else url)
    except sa.exc.ArgumentError:
        raise BadRequest(
            "The registry's URL cannot be read (it is not shown, it may hold a password). Needed "
            "sqlite:///<absolute file> or postgresql://user:password@host/database; see LOOP_REGISTRY_URL."
        ) from None
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise BadRequest("The registry needs a file (several processes share it): sqlite:///<absolute file>.")
        return parsed.set(drivername="sqlite", database=str(Path(parsed.database).expanduser().absolute()))
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg2")
    raise BadRequest(f"The registry lives in sqlite or postgresql, the URL says {backend!r}. See LOOP_REGISTRY_URL.")


def _without(text: str, url: URL) -> str:
    for secret in (url.password, *(url.query.get(name) for name in _SECRETS)):
        if isinstance(secret, str) and secret:
            text = text.replace(secret, "***")
    return text.rstrip(".")


def _make_engine(url: URL, *, read_only: bool) -> sa.Engine:
    # hide_parameters: no error or log line may show a row of a failing statement.
    if url.get_backend_name() == "postgresql":
        return sa.create_engine(
            url,
            hide_parameters=True,
            pool_pre_ping=True,
            max_overflow=20,
            json_serializer=_dump,
            json_deserializer=orjson.loads,
            connect_args={"connect_timeout": 4 if read_only else 10, "application_name": "loop"},
        )
    engine = sa.create_engine(
        url,
        hide_parameters=True,
        max_overflow=50,
        json_serializer=_dump,
        json_deserializer=orjson.loads,
        connect_args={"timeout": BUSY_S},
        **({"creator": functools.partial(open_to_read, str(url.database))} if read_only else {}),
    )
    sa.event.listen(engine, "connect", _set_pragmas)
    sa.event.listen(engine, "begin", _begin)
    return engine


def open_to_read(path: str) -> sqlite3.Connection:
    """A connection to a SQLite file that leaves the files as they are. Raises sqlite3.OperationalError.

    One that finds a write-ahead log would move it into the database when it closes, unless it may only read; one that
    may only read leaves the files behind that it makes where there is none. So each is used where the other would not
    do. In a folder that cannot be written to nobody makes a log, and SQLite is told so.
    """
    if not Path(path).is_file():
        raise sqlite3.OperationalError("unable to open database file")
    how = "mode=ro"
    if not Path(path + "-wal").exists():
        how = "mode=rw" if os.access(Path(path).parent, os.W_OK) and os.access(path, os.W_OK) else "immutable=1"
    connection = sqlite3.connect(
        f"{Path(path).as_uri()}?{how}", uri=True, timeout=BUSY_S, check_same_thread=False, isolation_level=None
    )
    connection.execute("PRAGMA query_only = ON")
    return connection


def _dump(value: object) -> str:
    return orjson.dumps(value).decode()


def _set_pragmas(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself; `_begin` does
    cursor = connection.cursor()
    for name, (value, _) in PRAGMAS.items():
        cursor.execute(f"PRAGMA {name} = {value}")
    cursor.close()


def _begin(connection: sa.Connection) -> None:
    connection.exec_driver_sql(f"BEGIN {connection.get_execution_options().get('begin', 'DEFERRED')}")
