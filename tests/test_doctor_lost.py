"""The doctor where something is gone that reads as if it had never been: tables, versions, a judge of its own."""

from __future__ import annotations

import shutil
import sqlite3
from datetime import UTC, datetime, timedelta

import pytest
from dagster import DagsterInstance, DagsterRun, DagsterRunStatus
from doctor_patient import CHATS, Patient
from doctor_plants import lost_log
from doctor_plants_rows import frozen_is_no_json, no_version, without_history

from loop_dagster.store.importing import import_rows
from loop_dagster.store.intake import lake_lease
from loop_dagster.store.purging import erase_pipelines
from loop_dagster.tables import SAMPLES, TABLES


def import_again(patient: Patient) -> None:
    store = patient.open()
    with lake_lease(store, "import"):
        for rows in (CHATS[:5], CHATS[5:]):
            import_rows(store.lake, rows, source="support", labels=["support"], now=datetime.now(UTC))


@pytest.mark.parametrize("table", [table.name for table in TABLES])
def test_a_table_that_is_gone_is_named_alone(patient: Patient, table: str) -> None:
    folder = patient.home / "lake" / "default" / table
    shutil.move(folder, patient.home.parent / table)
    before = patient.tree()
    found = patient.doctor()
    assert patient.tree() == before
    assert found.status == 1
    assert found.but_fine().keys() == {"lake_table_missing"}
    one = found.but_fine()["lake_table_missing"]
    assert one["level"] == "mistake"
    assert one["where"] == str(folder)
    assert "/0001 of this registry" in one["found"]
    assert f"put {folder} back from a copy. If there is none, " in one["mend"]
    shutil.move(patient.home.parent / table, folder)
    assert patient.doctor().but_fine() == {}


def test_samples_that_are_gone_are_told_by_what_is_about_them(patient: Patient) -> None:
    without_history(patient)
    assert patient.doctor().status == 0
    shutil.rmtree(patient.home / "lake" / "default" / "samples")
    found = patient.doctor()
    assert found.status == 1
    assert set(found.but_fine()) == {"lake_table_missing"}


def test_deleted_rows_and_pipelines_leave_nothing_to_mend(patient: Patient) -> None:
    store = patient.open()
    for table in TABLES:
        store.lake.delete(table, "true")
        store.lake.maintain(table)
    assert patient.doctor().but_fine() == {}
    store.pipelines.delete("support")
    erase_pipelines(store, holder="test")
    assert patient.doctor().but_fine() == {}


def test_a_new_installation_has_lost_nothing(patient: Patient) -> None:
    without_history(patient)
    shutil.rmtree(patient.home / "lake")
    assert patient.doctor().but_fine() == {}


def test_a_log_that_is_given_up_is_a_lost_table_until_the_files_are_imported_again(patient: Patient) -> None:
    lost_log(patient)
    patient.follow(patient.doctor().but_fine()["lake_torn"]["mend"])
    [one] = patient.doctor().but_fine().values()
    assert (one["code"], one["what"]) == ("lake_table_missing", "table labels")
    assert "import the files again" in one["mend"]
    import_again(patient)
    assert patient.doctor().but_fine() == {}


def test_a_version_made_again_is_the_one_that_was_lost(patient: Patient) -> None:
    before = patient.open().versions.live("support")
    assert before is not None
    no_version(patient)
    patient.follow(patient.doctor().but_fine()["live_version_missing"]["mend"])
    after = patient.open().versions.live("support")
    assert after is not None
    assert (after.run_id, after.adapters, after.base_digest) == (before.run_id, before.adapters, before.base_digest)


def test_an_attempt_written_down_again_can_be_read(patient: Patient) -> None:
    before = patient.open().pipelines.get("support").settings.to_json()
    frozen_is_no_json(patient)
    patient.follow(patient.doctor().but_fine()["registry_row"]["mend"])
    [attempt] = patient.open().attempts.list()
    assert attempt.frozen["settings"] == before
    assert attempt.frozen["model_id"] == str(patient.model)
    assert patient.loop("attempts", "show", attempt.key)[0] == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2", "[::1]", "LOCALHOST"])
@pytest.mark.parametrize("setting", ["serve_port", "api_port"])
def test_a_live_version_as_judge_is_named(patient: Patient, host: str, setting: str) -> None:
    patient.env("LOOP_JUDGE", "openai")
    patient.env("LOOP_JUDGE_URL", f"http://{host}:{getattr(patient.settings, setting)}/v1")
    patient.env("LOOP_JUDGE_MODEL", "loop-support")
    found = patient.doctor("--offline").but_fine()
    assert found.keys() == {"judge_is_live_version", "judge_not_asked"}
    one = found["judge_is_live_version"]
    assert (one["level"], "loop-support" in one["found"]) == ("warning", True)
    patient.env("LOOP_JUDGE_MODEL", "another")
    assert patient.doctor("--offline").but_fine().keys() == {"judge_not_asked"}
    patient.env("LOOP_JUDGE_MODEL", "loop-support")
    patient.env("LOOP_JUDGE_URL", "http://judge.example:8000/v1")
    assert patient.doctor("--offline").but_fine().keys() == {"judge_not_asked"}


def test_a_workspace_with_samples_of_its_own_is_no_mistake(patient: Patient) -> None:
    rows = patient.open().lake.scan(SAMPLES).collect()
    patient.env("LOOP_WORKSPACE", "other")
    assert "default" in patient.doctor().but_fine()["no_workspace"]["found"]
    patient.open().lake.append(SAMPLES, rows)
    assert patient.doctor().but_fine() == {}


def test_a_run_that_its_attempt_has_left_is_named_within_minutes(patient: Patient) -> None:
    [attempt] = patient.open().attempts.list()
    tags = {"loop/attempt": attempt.key, "loop/step": "training", "loop/try": "1"}
    began = datetime.now(UTC) - timedelta(minutes=7)
    with DagsterInstance.from_config(str(patient.settings.dagster_home)) as instance:
        instance.get_runs(limit=1)
        instance.all_instigator_state()
        run = instance.add_run(DagsterRun(job_name="training", status=DagsterRunStatus.STARTED, tags=tags))
    written = began.strftime("%Y-%m-%d %H:%M:%S")
    connection = sqlite3.connect(patient.settings.dagster_home / "history" / "runs.db")
    with connection:
        connection.execute(
            "UPDATE runs SET create_timestamp = ?, update_timestamp = ?, start_time = ?",
            (written, written, began.timestamp()),
        )
    connection.close()
    assert patient.doctor().but_fine() == {}  # the attempt went on a minute ago: the run may be about to end
    registry = sqlite3.connect(patient.home / "registry.db")
    with registry:
        registry.execute("UPDATE attempts SET since = ?", (began.strftime("%Y-%m-%d %H:%M:%S.000000"),))
    registry.close()
    named = patient.doctor().but_fine()
    assert named.keys() == {"run_stuck"}
    assert run.run_id in named["run_stuck"]["where"]
    store = patient.open()
    store.leases.take(f"attempt/{attempt.run_id}", holder=f"run {run.run_id}")
    assert patient.doctor().but_fine() == {}
