"""Mistakes of the doctor's tests in the registry's rows, and tables of the lake that the rows alone remember.

Belongs here: one function a mistake. Does not belong here: the table of them (doctor_plants.py).
"""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import sqlalchemy as sa
from doctor_patient import Patient
from uuid_utils import uuid7

from loop_dagster.store.intake import drain
from loop_dagster.store.migrations.versions import r0001_first
from loop_dagster.store.schema import attempt_events, attempts, live, metadata, versions
from loop_dagster.tables import FEEDBACK, SAMPLES


def older_registry(patient: Patient) -> None:
    first = re.findall(r'create_table\(\s*"(\w+)"', Path(r0001_first.__file__).read_text())
    with patient.open().registry.write() as connection:
        later = Path(r0001_first.__file__).parent.glob("r*.py")
        for table, column in re.findall(
            r'add_column\("(\w+)", sa.Column\("(\w+)"', "".join(map(Path.read_text, later))
        ):
            connection.exec_driver_sql(f"ALTER TABLE {table} DROP COLUMN {column}")
        for table in set(metadata.tables) - set(first):
            connection.exec_driver_sql(f"DROP TABLE {table}")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0001'")


def newer_registry(patient: Patient) -> None:
    with patient.open().registry.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")


def without_history(patient: Patient) -> None:
    """As if no attempt had ever been: only the inbox's batches tell what was written."""
    with patient.open().registry.write() as connection:
        connection.execute(sa.delete(attempts))
        connection.execute(sa.delete(attempt_events))
        connection.execute(sa.delete(versions))
        connection.execute(sa.delete(live))


def drained_verdict(patient: Patient) -> None:
    """A verdict that was given here and has reached the lake alone in its batch."""
    without_history(patient)
    store = patient.open()
    sample = store.lake.scan(SAMPLES).head(1).collect()["sample_id"].item()
    row = store.lake.scan(FEEDBACK).head(1).collect().to_dicts()[0]
    store.inbox.put(feedback=[{**row, "feedback_id": str(uuid7()), "sample_id": sample}])
    assert drain(store, holder="test").rows["feedback"] == 1


def lost_beside_a_batch(patient: Patient) -> None:
    drained_verdict(patient)
    shutil.rmtree(patient.home / "lake" / "default" / "feedback")


def no_table_after_a_batch(patient: Patient) -> None:
    drained_verdict(patient)
    shutil.rmtree(patient.home / "lake" / "default")


def no_version(patient: Patient) -> None:
    with patient.open().registry.write() as connection:
        connection.execute(sa.delete(versions))


def no_version_nor_attempt(patient: Patient) -> None:
    with patient.open().registry.write() as connection:
        connection.execute(sa.delete(versions))
        connection.execute(sa.update(attempts).values(adapter_digest=None))


def frozen_is_no_json(patient: Patient) -> None:
    with patient.open().registry.write() as connection:
        connection.exec_driver_sql("UPDATE attempts SET frozen = '{\"settings\": ' || 'broken'")


def frozen_is_no_object(patient: Patient) -> None:
    with patient.open().registry.write() as connection:
        connection.exec_driver_sql("UPDATE attempts SET frozen = '[]'")


def counts_are_no_json(patient: Patient) -> None:
    with patient.open().registry.write() as connection:
        connection.exec_driver_sql("UPDATE attempts SET counts = 'x'")


def other_workspace(patient: Patient) -> None:
    patient.env("LOOP_WORKSPACE", "other")


def row_of_tomorrow(patient: Patient) -> None:
    with patient.open().registry.write() as connection:
        connection.execute(sa.update(attempts).values(since=datetime.now(UTC) + timedelta(days=3)))
