"""Dagster's home: the variable that names it, its dagster.yaml, and where Dagster keeps its own records.

Belongs here: files and addresses. Does not belong here: what Dagster has recorded (dagster_state.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import yaml

from loop_dagster.doctor.findings import Finding, fine, mistake, warning
from loop_dagster.doctor.installation import Installation, is_in
from loop_dagster.processes import home_config
from loop_dagster.settings import Settings

_WHAT = "dagster.yaml"


def variable(installation: Installation) -> Iterator[Finding]:
    """DAGSTER_HOME: `loop` sets it for what it starts; the command `dagster` believes what the shell says."""
    given = os.environ.get("DAGSTER_HOME")
    ours = installation.known.dagster_home
    if given is None or is_in(given, ours):
        yield fine("dagster_home", "DAGSTER_HOME", found="the installation's own" if given else "not set, as it may be")
        return
    yield mistake(
        "dagster_home",
        "DAGSTER_HOME",
        where="variable DAGSTER_HOME",
        found=f"{given or 'empty'}, which is not this installation's {ours}: `dagster` would look at another one",
        mend=f"`unset DAGSTER_HOME` (`loop` sets it for what it starts), or `export DAGSTER_HOME={ours}`.",
    )


def config(installation: Installation) -> Iterator[Finding]:
    """dagster.yaml as `loop` would write it now, against what lies there."""
    settings = installation.known
    path = settings.dagster_home / "dagster.yaml"
    anew = "`loop init` writes it anew; `loop run` and `loop dev` do so too when they start."
    if not path.is_file():
        yield warning("dagster_yaml_missing", _WHAT, where=str(path), found="it is not there", mend=anew)
        return
    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeError):
        found = None
    if not isinstance(found, dict):
        yield mistake("dagster_yaml_unreadable", _WHAT, where=str(path), found="it cannot be read as YAML", mend=anew)
        return
    needed = home_config(settings)
    if _elsewhere(found, settings):
        yield mistake(
            "dagster_yaml_of_another_home",
            _WHAT,
            where=f"{path}, storage",
            found="it keeps Dagster's records somewhere else than this installation does: in another home's",
            mend=anew,
        )
        return
    changed = differing(found, needed)
    telemetry = found.get("telemetry", {})
    if isinstance(telemetry, Mapping) and telemetry.get("enabled", True):
        yield warning(
            "telemetry",
            "telemetry",
            where=f"{path}, telemetry.enabled",
            found="on: a `dagster` command sends figures about its use to the maker of Dagster",
            mend=f"Set `telemetry: {{enabled: false}}` there; {anew}",
        )
        changed = [name for name in changed if not name.startswith("telemetry")]
    if changed:
        yield warning(
            "dagster_yaml_changed",
            _WHAT,
            where=str(path),
            found=f"it differs from this version's in {', '.join(changed[:6])}",
            mend=f"{anew} A change that is meant to stay belongs into dagster.yaml of the project's own folder.",
        )
    elif found == needed:
        yield fine("dagster_yaml", _WHAT, where=str(path), found="as this version writes it")


def storage(installation: Installation) -> Iterator[Finding]:
    """Dagster's own PostgreSQL, where one is set: reachable, and not the registry's database."""
    settings = installation.known
    if settings.dagster_postgres_url is None:
        return
    try:
        url = sa.make_url(settings.dagster_postgres_url.get_secret_value())
    except sa.exc.ArgumentError:
        yield _storage("its address cannot be read", "Write it as postgresql://user:password@host:5432/database.")
        return
    place = f"{url.host or 'localhost'}:{url.port or 5432}/{url.database}"
    if same_database(url, settings):
        yield mistake(
            "dagster_in_registry",
            "Dagster's storage",
            where=place,
            found="it is the registry's database too, and both keep their revision in the table alembic_version",
            mend="Give each a database: `createdb dagster` on that server, and name it in LOOP_DAGSTER_POSTGRES_URL.",
        )
        return
    if installation.offline:
        return
    problem = unreachable(url)
    if problem is not None:
        yield _storage(problem, "Start that server, or name the right one; without it no daemon starts.", place)
        return
    yield fine("dagster_storage", "Dagster's storage", where=place, found="it answers")


def unreachable(url: sa.URL) -> str | None:
    """Why a PostgreSQL server cannot be used, without any password; None when it answers."""
    engine = sa.create_engine(
        url.set(drivername="postgresql+psycopg2"), connect_args={"connect_timeout": 4}, hide_parameters=True
    )
    try:
        with engine.connect():
            return None
    except sa.exc.SQLAlchemyError as error:
        said = str(getattr(error, "orig", None) or type(error).__name__).strip().partition("\n")[0]
        return f"it does not answer: {said.replace(url.password, '***') if url.password else said}"
    finally:
        engine.dispose()


def same_database(url: sa.URL, settings: Settings) -> bool:
    """Whether Dagster's URL and the registry's lead to the same database."""
    if settings.registry_url is None:
        return False
    try:
        other = sa.make_url(settings.registry_url.replace("postgres://", "postgresql://", 1))
    except sa.exc.ArgumentError:
        return False
    if other.get_backend_name() != "postgresql":
        return False

    def place(one: sa.URL) -> tuple[object, ...]:
        return (one.host or one.query.get("host") or "localhost", one.port or 5432, one.database)

    return place(url) == place(other)


def differing(found: Mapping[str, Any], needed: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of what two nested mappings say differently."""
    names = []
    for name in [*needed, *(name for name in found if name not in needed)]:
        one, two = found.get(name), needed.get(name)
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            names += differing(one, two, f"{prefix}{name}.")
        elif one != two or (name in found) != (name in needed):
            names.append(prefix + str(name))
    return names


def _elsewhere(found: Mapping[str, Any], settings: Settings) -> bool:
    """Whether a dagster.yaml keeps records in another place than the home that it lies in."""
    for name in ("storage", "run_storage", "event_log_storage", "schedule_storage", "local_artifact_storage"):
        for text in _texts(found.get(name)):
            if text.startswith(("/", "~")) and not Path(text).expanduser().is_relative_to(settings.dagster_home):
                return True
    expected = "postgres" if settings.dagster_postgres_url is not None else None
    kept = found.get("storage")
    return isinstance(kept, Mapping) and expected is None and "postgres" in kept


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)


def _storage(found: str, mend: str, place: str = "LOOP_DAGSTER_POSTGRES_URL") -> Finding:
    return mistake("dagster_storage", "Dagster's storage", where=place, found=found, mend=mend)
