"""The doctor against servers, processes, mounts and Dagster's own records: all of them real."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from dagster import DagsterInstance, DagsterRun, DagsterRunStatus
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import (
    ManagedGrpcPythonEnvCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import InstigatorState, InstigatorStatus, SensorInstigatorData
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from doctor_patient import SECRET, Patient, free_port, healthy, mounted

from loop_dagster.doctor import judge as judge_look
from loop_dagster.processes import running, start_daemon, start_serving
from loop_dagster.settings import Settings

Reply = Callable[[str, dict[str, Any]], tuple[int, dict[str, Any]]]


# a judge's server


@contextmanager
def server(reply: Reply) -> Iterator[str]:
    """A real HTTP server on loopback that answers (path, headers) with (status, JSON); stands for the network alone."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self) -> None:
            status, data = reply(self.path, dict(self.headers))
            body = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:  # a client that gave up waiting
            pass

    found = Quiet(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{found.server_port}/v1"
    finally:
        found.shutdown()
        found.server_close()


def says(text: str) -> tuple[int, dict[str, Any]]:
    return 200, {"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": {}}


def asks(patient: Patient, url: str, model: str = "judge-large", key: str | None = SECRET) -> None:
    patient.env("LOOP_JUDGE", "openai")
    patient.env("LOOP_JUDGE_URL", url)
    patient.env("LOOP_JUDGE_MODEL", model)
    patient.env("LOOP_JUDGE_API_KEY", key)


def well(path: str, headers: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """A judge's server as it should be: it knows one key and one model and answers in the form asked for."""
    if headers.get("Authorization") != f"Bearer {SECRET}":
        return 401, {"error": {"message": f"Incorrect key {SECRET}"}}
    if path.endswith("/models"):
        return 200, {"data": [{"id": "judge-large"}, {"id": "other"}]}
    return says('{"better": "first"}')


def test_a_judge_that_answers_is_fine_and_asked_once(patient: Patient) -> None:
    asked: list[str] = []

    def count(path: str, headers: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked.append(path)
        return well(path, headers)

    with server(count) as url:
        asks(patient, url)
        found = patient.doctor()
        assert (found.status, found.but_fine()) == (0, {})
        assert asked == ["/v1/chat/completions"]
        assert patient.doctor("--offline").but_fine().keys() == {"judge_not_asked"}
        assert len(asked) == 1


def unknown_model(path: str, headers: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return well(path, headers) if path.endswith("/models") else (404, {"error": {"message": "no such model"}})


def unreadable(path: str, headers: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return says("I like both.")


def no_credit(path: str, headers: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return 402, {}


def broken(path: str, headers: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return 500, {}


def slow(path: str, headers: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    time.sleep(1.5)
    return well(path, headers)


@pytest.mark.parametrize(
    ("reply", "key", "code", "level", "found", "mend"),
    [
        (well, "sk-another", "judge_key_refused", "mistake", "refused the key", "`export LOOP_JUDGE_API_KEY="),
        (well, None, "judge_key_refused", "mistake", "none is set", "`export LOOP_JUDGE_API_KEY="),
        (unknown_model, SECRET, "judge_model_unknown", "mistake", "judge-large, other", "`export LOOP_JUDGE_MODEL="),
        (no_credit, SECRET, "judge_no_credit", "mistake", "402", "credit"),
        (broken, SECRET, "judge_unreachable", "mistake", "status 500", "`curl "),
        (unreadable, SECRET, "judge_unreadable", "warning", "neither first, second nor tie", "JSON"),
        (slow, SECRET, "judge_slow", "warning", "no answer", "120 s"),
    ],
    ids=["key", "no key", "model", "credit", "broken", "unreadable", "slow"],
)
def test_what_is_wrong_with_a_judge_is_named(
    patient: Patient,
    monkeypatch: pytest.MonkeyPatch,
    reply: Reply,
    key: str | None,
    code: str,
    level: str,
    found: str,
    mend: str,
) -> None:
    if reply is slow:
        monkeypatch.setattr(judge_look, "PATIENCE_S", 0.5)
    with server(reply) as url:
        asks(patient, url, "judge-lage" if reply is unknown_model else "judge-large", key)
        said = patient.doctor()
    assert set(said.but_fine()) == {code}
    one = said.but_fine()[code]
    assert (one["level"], said.status) == (level, 1 if level == "mistake" else 0)
    assert found in one["found"]
    assert mend in one["mend"]
    assert "sk-another" not in said.text
    if code == "judge_model_unknown":
        assert one["mend"] == "`export LOOP_JUDGE_MODEL=judge-large`"


def test_a_judge_that_nobody_serves_is_named(patient: Patient) -> None:
    asks(patient, f"http://127.0.0.1:{free_port()}/v1")
    one = patient.doctor().but_fine()["judge_unreachable"]
    assert "ConnectError" in one["found"]
    assert "/v1/models`" in one["mend"]


@pytest.mark.parametrize(
    ("changes", "code", "mend"),
    [
        ({"LOOP_JUDGE_URL": None}, "judge_setting", "LOOP_JUDGE_URL"),
        ({"LOOP_JUDGE_URL": "judge.example"}, "judge_setting", "https://"),
        ({"LOOP_JUDGE": "no_such_module:judge"}, "judge_setting", "importable"),
        ({"LOOP_JUDGE_API_KEY": f"{SECRET}\n"}, "judge_key_form", "`export LOOP_JUDGE_API_KEY="),
        ({"LOOP_JUDGE_API_KEY": f'"{SECRET}"'}, "judge_key_form", "`export LOOP_JUDGE_API_KEY="),
        ({"LOOP_JUDGE_API_KEY": ""}, "judge_key_form", "`unset LOOP_JUDGE_API_KEY`"),
    ],
    ids=["no url", "no address", "no module", "line break", "quotation marks", "empty"],
)
def test_settings_of_a_judge_that_cannot_be(
    patient: Patient, changes: dict[str, str | None], code: str, mend: str
) -> None:
    asks(patient, "http://127.0.0.1:9/v1")
    for name, value in changes.items():
        patient.env(name, value)
    named = patient.doctor().but_fine()
    assert set(named) == {code}
    assert mend in named[code]["found"] + named[code]["mend"]


# ports and processes


@contextmanager
def listening(port: int, home: Path | None = None) -> Iterator[int]:
    """A process that listens on a port, of the installation `home` or of none; its id."""
    code = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); print(1, flush=True); time.sleep(60)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOOP_")}
    if home is not None:
        environment["LOOP_HOME"] = str(home)
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("setting", ["LOOP_WEBSERVER_PORT", "LOOP_SERVE_PORT", "LOOP_API_PORT"])
def test_a_port_that_another_program_has_is_named_with_the_program(patient: Patient, setting: str) -> None:
    with listening(int(os.environ[setting])) as pid:
        named = patient.doctor().but_fine()
        assert set(named) == {"port_taken"}
        assert f"process {pid}" in named["port_taken"]["found"]
        assert f"kill {pid}" in named["port_taken"]["mend"]
        patient.follow(named["port_taken"]["mend"])  # another port, and a free one
        assert patient.doctor().but_fine() == {}


def test_a_port_of_another_installation_names_its_home(patient: Patient) -> None:
    other = patient.home.parent / "other"
    with listening(int(os.environ["LOOP_SERVE_PORT"]), other):
        assert str(other) in patient.doctor().but_fine()["port_taken"]["found"]


def test_a_shell_with_our_variables_is_not_our_server(patient: Patient) -> None:
    with listening(int(os.environ["LOOP_SERVE_PORT"]), patient.home):
        assert set(patient.doctor().but_fine()) == {"port_taken"}


def test_our_own_serving_is_fine_and_a_second_home_on_its_port_is_told(patient: Patient) -> None:
    serving = start_serving(patient.settings)
    with running(serving):
        give_up = time.monotonic() + 60
        while not _listens(patient.settings.serve_port):  # its note is there a moment before
            serving.check()
            assert time.monotonic() < give_up, serving.log.read_text()
            time.sleep(0.1)
        found = patient.doctor()
        assert found.but_fine() == {}
        assert f"own serving listens there (process {serving.pid})" in found.of("port of serving")["found"]
        patient.env("LOOP_HOME", str(patient.home.parent / "second"))
        healthy(patient)
        assert str(patient.home) in patient.doctor().but_fine()["port_taken"]["found"]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_two_daemons_on_one_home_are_named(patient: Patient) -> None:
    with ExitStack() as stack:
        daemons = []
        for _ in range(2):
            daemons.append(start_daemon(patient.settings))
            stack.callback(daemons[-1].stop, 0.1)
        named = patient.doctor().but_fine()
        assert named["two_daemons"]["level"] == "mistake"
        assert f"kill -INT {daemons[1].pid}`" in named["two_daemons"]["mend"]
        daemons[1].stop(0.1)
        assert "two_daemons" not in patient.doctor().but_fine()


def test_with_a_daemon_what_waits_is_no_mistake(patient: Patient) -> None:
    patient.attempt(patient.open(), "training")
    assert set(patient.doctor().but_fine()) == {"no_daemon"}
    daemon = start_daemon(patient.settings)
    try:
        found = patient.doctor()
        assert found.but_fine() == {}
        assert str(daemon.pid) in found.of("daemon")["found"]
    finally:
        daemon.stop(0.1)


# Dagster's own records

LOCATION = RemoteRepositoryOrigin(
    code_location_origin=ManagedGrpcPythonEnvCodeLocationOrigin(
        loadable_target_origin=LoadableTargetOrigin(module_name="loop_dagster.definitions"), location_name="loop"
    ),
    repository_name="__repository__",
)


@contextmanager
def dagster(patient: Patient) -> Iterator[DagsterInstance]:
    with DagsterInstance.from_config(str(patient.settings.dagster_home)) as instance:
        instance.get_runs(limit=1)
        instance.all_instigator_state()
        yield instance


def add_run(patient: Patient, instance: DagsterInstance, status: DagsterRunStatus, age: timedelta) -> str:
    origin = RemoteJobOrigin(LOCATION, "training") if status is DagsterRunStatus.QUEUED else None
    run = instance.add_run(DagsterRun(job_name="training", status=status, remote_job_origin=origin))
    began = datetime.now(UTC) - age
    connection = sqlite3.connect(patient.settings.dagster_home / "history" / "runs.db")
    with connection:
        connection.execute(
            "UPDATE runs SET create_timestamp = ?, start_time = ? WHERE run_id = ?",
            (began.strftime("%Y-%m-%d %H:%M:%S"), began.timestamp(), run.run_id),
        )
    connection.close()
    return run.run_id


def test_a_sensor_that_was_switched_off_is_named(patient: Patient) -> None:
    with dagster(patient) as instance:
        for name, status in (("attempts", InstigatorStatus.STOPPED), ("intake", InstigatorStatus.DECLARED_IN_CODE)):
            origin = RemoteInstigatorOrigin(repository_origin=LOCATION, instigator_name=name)
            instance.add_instigator_state(
                InstigatorState(origin, InstigatorType.SENSOR, status, SensorInstigatorData(min_interval=5))
            )
    before = patient.tree()
    named = patient.doctor().but_fine()
    assert patient.tree() == before
    assert set(named) == {"sensor_off"}
    assert named["sensor_off"]["where"] == "sensor attempts"
    assert "dagster sensor start attempts" in named["sensor_off"]["mend"]


def test_a_run_of_a_dead_process_is_named_and_a_young_one_is_not(patient: Patient) -> None:
    with dagster(patient) as instance:
        young = add_run(patient, instance, DagsterRunStatus.STARTED, timedelta(seconds=30))
        assert patient.doctor().but_fine() == {}
        old = add_run(patient, instance, DagsterRunStatus.STARTED, timedelta(hours=5))
    named = patient.doctor().but_fine()
    assert set(named) == {"run_stuck"}
    assert old in named["run_stuck"]["where"]
    assert young not in json.dumps(named)
    assert "5 hours" in named["run_stuck"]["found"]
    assert "`loop run`" in named["run_stuck"]["mend"]


def test_a_queue_that_does_not_move_is_named(patient: Patient) -> None:
    with dagster(patient) as instance:
        add_run(patient, instance, DagsterRunStatus.QUEUED, timedelta(hours=1))
    named = patient.doctor().but_fine()
    assert set(named) == {"queue_stuck"}
    assert "`loop run`" in named["queue_stuck"]["mend"]


@pytest.mark.parametrize("name", ["history/runs.db", "schedules/schedules.db"])
def test_damaged_records_of_dagster_are_named_and_can_be_put_aside(patient: Patient, name: str) -> None:
    with dagster(patient):
        pass
    path = patient.settings.dagster_home / name
    path.write_bytes(b"not a database" * 1_000)
    named = patient.doctor().but_fine()
    assert set(named) == {"dagster_records"}
    assert named["dagster_records"]["where"] == str(path)
    patient.follow(named["dagster_records"]["mend"])
    assert patient.doctor().but_fine() == {}
    with dagster(patient):
        pass
    assert patient.doctor().but_fine() == {}


def test_records_of_dagster_that_are_not_there_are_not_made(patient: Patient) -> None:
    patient.doctor()
    assert [path.name for path in patient.settings.dagster_home.iterdir()] == ["dagster.yaml"]


# disks


def test_a_disk_that_is_nearly_full_is_named(patient: Patient, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    with mounted(small, "-t", "tmpfs", "-o", "size=40m", "tmpfs"):
        shutil.copytree(patient.home, small / "home")
        patient.env("LOOP_HOME", str(small / "home"))
        patient.follow("`loop init`")
        named = patient.doctor().but_fine()
        assert set(named) == {"disk_low"}
        assert (named["disk_low"]["level"], named["disk_low"]["where"]) == ("mistake", str(small / "home"))
        assert "`du -xh" in named["disk_low"]["mend"]


@pytest.mark.parametrize("part", ["", "lake", "artifacts"])
def test_a_place_that_is_read_only_is_named(patient: Patient, part: str) -> None:
    place = patient.home / part
    with mounted(place, "--bind", str(place)):
        done = subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], capture_output=True, check=False)
        if done.returncode != 0:
            pytest.skip("nothing can be mounted read-only here")
        named = patient.doctor().but_fine()
        assert set(named) == {"not_writable"}
        assert "read-only" in named["not_writable"]["found"]
        assert named["not_writable"]["where"] == str(place / "default" if part == "lake" else place)
        assert f"`mount -o remount,rw {place}`" in named["not_writable"]["mend"]
        subprocess.run(["mount", "-o", "remount,bind,rw", str(place)], check=True)


# PostgreSQL


def on_postgres(patient: Patient, url: str) -> None:
    """A second healthy installation, whose registry is a database."""
    patient.env("LOOP_HOME", str(patient.home.parent / "second"))
    patient.env("LOOP_REGISTRY_URL", url)
    healthy(patient)


@pytest.mark.postgres
def test_an_installation_on_postgresql_is_fine(patient: Patient, postgres_url: str) -> None:
    on_postgres(patient, postgres_url)
    found = patient.doctor()
    assert (found.status, found.but_fine()) == (0, {})
    assert "PostgreSQL" in found.of("registry")["found"]


@pytest.mark.postgres
def test_a_database_of_a_newer_version_is_named(patient: Patient, postgres_url: str) -> None:
    on_postgres(patient, postgres_url)
    with patient.open().registry.write() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    named = patient.doctor().but_fine()
    assert set(named) == {"registry_too_new", "not_looked_at"}
    assert "9999" in named["registry_too_new"]["found"]


@pytest.mark.postgres
def test_a_database_server_whose_clock_is_off_is_named(patient: Patient, postgres_url: str) -> None:
    on_postgres(patient, postgres_url)
    name = sa.make_url(postgres_url).database
    with patient.open().registry.write() as connection:  # what an unset server clock looks like from here
        connection.execute(
            sa.text(
                "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS "
                "$$ SELECT pg_catalog.clock_timestamp() - interval '10 minutes' $$"
            )
        )
        connection.execute(sa.text(f"ALTER DATABASE {name} SET search_path = public, pg_catalog"))
    named = patient.doctor().but_fine()
    assert set(named) == {"clock_apart"}
    assert "10 minutes ahead of the database server's" in named["clock_apart"]["found"]


@pytest.mark.postgres
def test_dagsters_tables_in_the_registrys_database_are_a_mistake(patient: Patient, postgres_url: str) -> None:
    on_postgres(patient, postgres_url)
    patient.env("LOOP_DAGSTER_POSTGRES_URL", postgres_url)
    patient.follow("`loop init`")
    named = patient.doctor().but_fine()
    assert set(named) == {"dagster_in_registry"}
    assert "`createdb dagster`" in named["dagster_in_registry"]["mend"]


@pytest.mark.postgres
def test_an_empty_database_of_dagster_is_fine_and_stays_empty(patient: Patient, empty_postgres_url: str) -> None:
    patient.env("LOOP_DAGSTER_POSTGRES_URL", empty_postgres_url)
    patient.follow("`loop init`")
    assert patient.doctor().but_fine() == {}
    engine = sa.create_engine(sa.make_url(empty_postgres_url).set(drivername="postgresql+psycopg2"))
    assert sa.inspect(engine).get_table_names() == []
    engine.dispose()


def test_servers_that_do_not_answer_are_named_without_their_passwords(patient: Patient) -> None:
    port = free_port()
    patient.env("LOOP_DAGSTER_POSTGRES_URL", f"postgresql://loop:{SECRET}@127.0.0.1:{port}/dagster")
    patient.follow("`loop init`")
    named = patient.doctor().but_fine()
    assert set(named) == {"dagster_storage"}
    assert named["dagster_storage"]["where"] == f"127.0.0.1:{port}/dagster"
    patient.env("LOOP_REGISTRY_URL", f"postgresql://loop:{SECRET}@127.0.0.1:{port}/loop")
    named = patient.doctor().but_fine()
    assert set(named) == {"dagster_storage", "registry_unreachable", "not_looked_at"}
    assert "LOOP_REGISTRY_URL" in named["registry_unreachable"]["mend"]


def test_a_url_from_the_settings_file_reaches_dagster(patient: Patient) -> None:
    from loop_dagster.processes import environment

    url = f"postgresql://loop:{SECRET}@127.0.0.1:9/dagster"
    (patient.home / "settings.yaml").write_text(f"dagster_postgres_url: {url}\n")
    assert environment(Settings())["LOOP_DAGSTER_POSTGRES_URL"] == url
