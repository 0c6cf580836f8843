"""The mistakes that the doctor's tests plant, each for real, and under what it must be found.

Belongs here: one function a mistake, and the table of them. Does not belong here: what is asserted (test_doctor.py).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import sqlalchemy as sa
import yaml
from doctor_patient import SECRET, Patient
from doctor_plants_rows import (
    counts_are_no_json,
    frozen_is_no_json,
    frozen_is_no_object,
    lost_beside_a_batch,
    newer_registry,
    no_table_after_a_batch,
    no_version,
    no_version_nor_attempt,
    older_registry,
    other_workspace,
    row_of_tomorrow,
)

from loop_dagster.store.lake import Lake
from loop_dagster.store.open import open_store
from loop_dagster.store.schema import inbox, leases
from loop_dagster.tables import LABELS, SAMPLES


def newest_commit(patient: Patient, table: str = "samples") -> Path:
    return max((patient.home / "lake" / "default" / table / "_delta_log").glob("*.json"))


def data_file(patient: Patient, table: str = "samples") -> Path:
    return next((patient.home / "lake" / "default" / table).glob("*.parquet"))


def edit_json(path: Path, **changes: object) -> None:
    data = json.loads(path.read_text())
    for name, value in changes.items():
        data.pop(name, None) if value is None else data.update({name: value})
    path.write_text(json.dumps(data))


def pin_again(patient: Patient) -> None:
    """Save the pipeline with its model as it is now, and make it what is live was trained on."""
    from loop_dagster.models.base import read_digest

    store = patient.open()
    digest = read_digest(patient.model)
    with store.registry.write() as connection:
        for table, column in (("pipelines", "model_digest"), ("versions", "base_digest")):
            connection.execute(sa.text(f"UPDATE {table} SET {column} = :digest"), {"digest": digest})


# the places


def unknown_variable(patient: Patient) -> None:
    patient.env("LOOP_SERV_PORT", "9000")


def unknown_setting(patient: Patient) -> None:
    (patient.home / "settings.yaml").write_text("drain_row: 100\n")


def impossible_variable(patient: Patient) -> None:
    patient.env("LOOP_MAX_ANSWER_TOKENS", SECRET)


def impossible_value(patient: Patient) -> None:
    (patient.home / "settings.yaml").write_text("drain_rows: -5\n")


def no_yaml(patient: Patient) -> None:
    (patient.home / "settings.yaml").write_text(f"judge: openai\njudge_api_key: [{SECRET}\n")


def no_mapping(patient: Patient) -> None:
    (patient.home / "settings.yaml").write_text(f"- {SECRET}\n")


def other_ending(patient: Patient) -> None:
    (patient.home / "settings.yml").write_text("drain_rows: 100\n")


def judge_without_use(patient: Patient) -> None:
    patient.env("LOOP_JUDGE_API_KEY", SECRET)


def home_is_a_file(patient: Patient) -> None:
    shutil.rmtree(patient.home)
    patient.home.write_text("a file")


def home_is_elsewhere(patient: Patient) -> None:
    patient.env("LOOP_HOME", str(patient.home.parent / "hoem"))


def readable_registry(patient: Patient) -> None:
    (patient.home / "registry.db").chmod(0o644)


def readable_settings(patient: Patient) -> None:
    path = patient.home / "settings.yaml"
    path.write_text(f"drain_rows: 100\n# judge_api_key: {SECRET}\n")
    path.chmod(0o640)


# Dagster's home


def other_dagster_home(patient: Patient) -> None:
    patient.env("DAGSTER_HOME", str(patient.home.parent))


def no_dagster_yaml(patient: Patient) -> None:
    (patient.home / "dagster" / "dagster.yaml").unlink()


def changed_dagster_yaml(patient: Patient) -> None:
    path = patient.home / "dagster" / "dagster.yaml"
    config = yaml.safe_load(path.read_text())
    config["run_coordinator"]["config"]["max_concurrent_runs"] = 99
    path.write_text(yaml.safe_dump(config))


def telemetry_on(patient: Patient) -> None:
    path = patient.home / "dagster" / "dagster.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "telemetry": {"enabled": True}}))


def torn_dagster_yaml(patient: Patient) -> None:
    (patient.home / "dagster" / "dagster.yaml").write_text("telemetry: {enabled")


def dagster_yaml_of_another(patient: Patient) -> None:
    path = patient.home / "dagster" / "dagster.yaml"
    other = {"storage": {"sqlite": {"base_dir": str(patient.home.parent / "other" / "dagster")}}}
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **other}))


# the registry


def lost_registry(patient: Patient) -> None:
    for path in patient.home.glob("registry.db*"):
        path.unlink()


def emptied_registry(patient: Patient) -> None:
    lost_registry(patient)
    (patient.home / "registry.db").touch(mode=0o600)


def overwritten_registry(patient: Patient) -> None:
    (patient.home / "registry.db").write_bytes(b"not a database" * 4_000)


def torn_registry(patient: Patient) -> None:
    path = patient.home / "registry.db"
    data = path.read_bytes()
    # Whole pages in the middle, as a bad disk leaves them; the first page, which says what the file is, stays.
    path.write_bytes(data[: len(data) // 2] + bytes(4096 * 6) + data[len(data) // 2 + 4096 * 6 :])


def file_of_tomorrow(patient: Patient) -> None:
    moment = datetime.now(UTC).timestamp() + 7_200
    os.utime(patient.home / "dagster" / "dagster.yaml", (moment, moment))


# the lake


def empty_commit(patient: Patient) -> None:
    newest_commit(patient).write_bytes(b"")


def cut_commit(patient: Patient) -> None:
    path = newest_commit(patient)
    path.write_bytes(path.read_bytes()[:-30])


def gap_in_commits(patient: Patient) -> None:
    store = patient.open()
    store.lake.delete(SAMPLES, "sample_id = 'nobody'")
    store.lake.append(LABELS, store.lake.scan(LABELS).head(1).collect())
    store.lake.append(LABELS, store.lake.scan(LABELS).head(1).collect())
    log = sorted((patient.home / "lake" / "default" / "labels" / "_delta_log").glob("*.json"))
    log[-2].unlink()


def torn_checkpoint(patient: Patient) -> None:
    store = patient.open()
    label = store.lake.scan(LABELS).head(1).collect()
    for _ in range(21):
        store.lake.append(LABELS, label)
    path = next((patient.home / "lake" / "default" / "labels" / "_delta_log").glob("*.checkpoint.parquet"))
    path.write_bytes(path.read_bytes()[:500])


def lost_checkpoint(patient: Patient) -> None:
    torn_checkpoint(patient)
    next((patient.home / "lake" / "default" / "labels" / "_delta_log").glob("*.checkpoint.parquet")).unlink()


def lost_log(patient: Patient) -> None:
    shutil.rmtree(patient.home / "lake" / "default" / "labels" / "_delta_log")


def lost_data(patient: Patient) -> None:
    data_file(patient).unlink()


def cut_data(patient: Patient) -> None:
    path = data_file(patient)
    path.write_bytes(path.read_bytes()[:300])


def overwritten_data(patient: Patient) -> None:
    path = data_file(patient)
    path.write_bytes(os.urandom(path.stat().st_size))


def other_columns(patient: Patient) -> None:
    from deltalake import write_deltalake

    folder = patient.home / "lake" / "default" / "labels"
    frame = patient.open().lake.scan(LABELS).collect()
    write_deltalake(str(folder), frame.drop("parent"), mode="overwrite", schema_mode="overwrite")


def other_lake(patient: Patient) -> None:
    patient.env("LOOP_LAKE_URL", str(patient.home.parent / "lake2"))


def lake_of_another_home(patient: Patient) -> None:
    mine = os.environ["LOOP_HOME"]
    other = patient.home.parent / "other"
    patient.env("LOOP_HOME", str(other))
    shared = str(patient.home.parent / "shared")
    patient.env("LOOP_LAKE_URL", shared)
    store = open_store()
    store.lake.append(LABELS, LABELS.empty())
    store.lake.append(SAMPLES, SAMPLES.empty())
    rows = Lake(str(patient.home / "lake")).scan(SAMPLES).collect()
    store.lake.append(SAMPLES, rows)
    store.registry.dispose()
    patient.env("LOOP_HOME", mine)


def unreadable_owner(patient: Patient) -> None:
    (patient.home / "lake" / "default" / "_owner.json").write_text("{")


# models and weights


def no_model(patient: Patient) -> None:
    shutil.rmtree(patient.model)


def changed_model(patient: Patient) -> None:
    edit_json(patient.model / "config.json", rope_theta=123.0)


def no_weights(patient: Patient) -> None:
    for path in patient.model.glob("*.safetensors"):
        path.unlink()


def no_template(patient: Patient) -> None:
    (patient.model / "chat_template.jinja").unlink(missing_ok=True)
    edit_json(patient.model / "tokenizer_config.json", chat_template=None)


def write_template(patient: Patient, change: Callable[[str], str]) -> None:
    path = patient.model / "chat_template.jinja"
    assert path.is_file()
    path.write_text(change(path.read_text()))
    pin_again(patient)


def broken_template(patient: Patient) -> None:
    write_template(patient, lambda text: text + "{% if %}")


def silent_template(patient: Patient) -> None:
    write_template(patient, lambda text: text.replace("message['content']", "''"))


def unequal_template(patient: Patient) -> None:
    write_template(patient, lambda text: text.replace("{{ '<|im_start|>assistant\\n' }}", "{{ 'Assistant says: ' }}"))


def template_without_end(patient: Patient) -> None:
    write_template(patient, lambda text: text.replace("<|im_end|>", ""))


def no_end_anywhere(patient: Patient) -> None:
    edit_json(patient.model / "tokenizer_config.json", eos_token=None)
    edit_json(patient.model / "generation_config.json", eos_token_id=None)
    edit_json(patient.model / "config.json", eos_token_id=None)
    special = patient.model / "special_tokens_map.json"
    if special.is_file():
        edit_json(special, eos_token=None)
    template_without_end(patient)


def no_artifact(patient: Patient) -> None:
    shutil.rmtree(next(path for path in (patient.home / "artifacts").iterdir() if len(path.name) == 64))


def torn_artifact(patient: Patient) -> None:
    path = next((patient.home / "artifacts").glob("*/adapter_model.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"X")  # the size fits: only its bytes can tell


def torn_leftover(patient: Patient) -> None:
    store = patient.open()
    digest = patient.adapter(store, "second")
    (patient.home / "artifacts" / digest / "adapter_model.safetensors").write_bytes(b"cut")


# work


def stale_lease(patient: Patient) -> None:
    store = patient.open()
    lease = store.leases.take("lake/default", holder="loop import (elsewhere:4711)")
    with store.registry.write() as connection:
        past = datetime.now(UTC) - timedelta(hours=2)
        connection.execute(sa.update(leases).where(leases.c.name == lease.name).values(heartbeat_at=past))


def nobody_at_work(patient: Patient) -> None:
    patient.attempt(patient.open(), "training")


def nobody_drains(patient: Patient) -> None:
    store = patient.open()
    row = {"workspace": "default", "table_name": "labels", "row_key": "k", "sample_id": "s", "payload": {}}
    with store.registry.write() as connection:
        past = datetime.now(UTC) - timedelta(hours=2)
        connection.execute(sa.insert(inbox).values(**row, created_at=past))


def failed_attempt(patient: Patient) -> None:
    store = patient.open()
    attempt = patient.attempt(store, "training")
    store.attempts.fail(attempt.run_id, code="NOTHING_TO_TRAIN", sentence="None can be used.", now=datetime.now(UTC))


def attempt_in_review(patient: Patient) -> None:
    store = patient.open()
    attempt = patient.attempt(store, "reported")
    until = datetime.now(UTC) + timedelta(days=14)
    store.attempts.move(
        attempt.run_id, "awaiting_review", "A person decides.", now=datetime.now(UTC), review_until=until
    )


def paused_pipeline(patient: Patient) -> None:
    assert patient.loop("pipelines", "pause", "support")[0] == 0


def refused_file(patient: Patient) -> None:
    folder = patient.home / "intake" / "refused" / "support"
    folder.mkdir(parents=True)
    (folder / "20261129T120000-chats.jsonl").write_text("prose\n")
    (folder / "20261129T120000-chats.jsonl.result").write_text(json.dumps({"error": {"code": "NOT_FOUND"}}))


def stray_file(patient: Patient) -> None:
    (patient.home / "intake" / "chats.jsonl").write_text("{}\n")


def file_of_no_pipeline(patient: Patient) -> None:
    (patient.home / "intake" / "suport").mkdir()
    (patient.home / "intake" / "suport" / "chats.jsonl").write_text("{}\n")


def csv_file(patient: Patient) -> None:
    (patient.home / "intake" / "support").mkdir()
    (patient.home / "intake" / "support" / "chats.csv").write_text("a,b\n")


def same_port(patient: Patient) -> None:
    patient.env("LOOP_WEBSERVER_PORT", os.environ["LOOP_SERVE_PORT"])


def foreign_host(patient: Patient) -> None:
    patient.env("LOOP_SERVE_HOST", "203.0.113.7")


@dataclass(frozen=True)
class Plant:
    """A mistake, the code and level that it must be found under, and words that its finding must hold."""

    plant: Callable[[Patient], None]
    code: str
    level: str
    where: str
    mend: str
    #: Whether doing what the mend says, to the letter, leaves nothing to mend.
    cured: bool = False
    #: What else must be said, because it follows from the mistake.
    also: tuple[str, ...] = ()


SKIPPED = ("not_looked_at",)
PLANTS = [
    Plant(unknown_variable, "unknown_variable", "warning", "LOOP_SERV_PORT", "`export LOOP_SERVE_PORT="),
    Plant(unknown_setting, "unknown_setting", "mistake", "drain_row", "`drain_rows:`", also=SKIPPED),
    Plant(impossible_variable, "setting_value", "mistake", "LOOP_MAX_ANSWER_TOKENS", "`export LOOP_MAX_", also=SKIPPED),
    Plant(impossible_value, "setting_value", "mistake", "settings.yaml, drain_rows", "`drain_rows:`", also=SKIPPED),
    Plant(no_yaml, "settings_unreadable", "mistake", "settings.yaml", "move the file away", also=SKIPPED),
    Plant(no_mapping, "settings_unreadable", "mistake", "settings.yaml", "move the file away", also=SKIPPED),
    Plant(other_ending, "settings_elsewhere", "warning", "settings.yml", "settings.yaml"),
    Plant(judge_without_use, "judge_not_used", "warning", "LOOP_JUDGE_API_KEY", "`export LOOP_JUDGE=openai`"),
    Plant(home_is_a_file, "home_no_folder", "mistake", "home", "`export LOOP_HOME=", also=SKIPPED),
    Plant(home_is_elsewhere, "no_installation", "warning", "hoem", "`export LOOP_HOME=/its/folder`", also=SKIPPED),
    Plant(readable_registry, "readable_by_others", "warning", "registry.db", "`chmod 600 ", cured=True),
    Plant(readable_settings, "readable_by_others", "warning", "settings.yaml", "`chmod 600 ", cured=True),
    Plant(other_dagster_home, "dagster_home", "mistake", "DAGSTER_HOME", "`unset DAGSTER_HOME`", cured=True),
    Plant(no_dagster_yaml, "dagster_yaml_missing", "warning", "dagster.yaml", "`loop init`", cured=True),
    Plant(changed_dagster_yaml, "dagster_yaml_changed", "warning", "dagster.yaml", "`loop init`", cured=True),
    Plant(telemetry_on, "telemetry", "warning", "telemetry.enabled", "`telemetry: {enabled: false}`"),
    Plant(torn_dagster_yaml, "dagster_yaml_unreadable", "mistake", "dagster.yaml", "`loop init`", cured=True),
    Plant(dagster_yaml_of_another, "dagster_yaml_of_another_home", "mistake", "storage", "`loop init`", cured=True),
    Plant(lost_registry, "registry_missing", "mistake", "registry.db", "from a copy", also=SKIPPED),
    Plant(emptied_registry, "registry_lost", "mistake", "registry.db", "LOOP_REGISTRY_URL", also=SKIPPED),
    Plant(overwritten_registry, "registry_damaged", "mistake", "registry.db", ".recover`", also=SKIPPED),
    Plant(torn_registry, "registry_damaged", "mistake", "registry.db", ".recover`", also=SKIPPED),
    Plant(older_registry, "registry_old", "warning", "registry.db", "`loop init`", cured=True, also=SKIPPED),
    Plant(newer_registry, "registry_too_new", "mistake", "registry.db", "`git pull && make venv`", also=SKIPPED),
    Plant(row_of_tomorrow, "clock_behind", "mistake", "since of attempts", "timedatectl"),
    Plant(file_of_tomorrow, "clock_behind", "mistake", "dagster.yaml", "timedatectl"),
    Plant(empty_commit, "lake_torn", "mistake", "_delta_log/0", "`mv ", cured=True),
    Plant(cut_commit, "lake_torn", "mistake", "_delta_log/0", "`mv ", cured=True),
    Plant(gap_in_commits, "lake_torn", "mistake", "labels/_delta_log", "back from a copy"),
    Plant(torn_checkpoint, "lake_torn", "mistake", ".checkpoint.parquet", "`rm ", cured=True),
    Plant(lost_checkpoint, "lake_torn", "mistake", "_last_checkpoint", "`rm ", cured=True),
    Plant(lost_log, "lake_torn", "mistake", "labels/_delta_log", "`mv "),
    Plant(lost_data, "lake_torn", "mistake", ".parquet", ".repair()", cured=True),
    Plant(cut_data, "lake_torn", "mistake", ".parquet", ".repair()"),
    Plant(overwritten_data, "lake_torn", "mistake", ".parquet", ".repair()"),
    Plant(other_columns, "lake_columns", "mistake", "labels", "version of the project that wrote it"),
    Plant(other_lake, "lake_empty", "mistake", "lake2", "`export LOOP_LAKE_URL="),
    Plant(lake_of_another_home, "two_homes_on_one_lake", "mistake", "_owner.json", "`export LOOP_LAKE_URL="),
    Plant(lost_beside_a_batch, "lake_table_missing", "warning", "feedback", "from a copy"),
    Plant(no_table_after_a_batch, "lake_empty", "mistake", "lake", "`export LOOP_LAKE_URL="),
    Plant(unreadable_owner, "owner_unreadable", "warning", "_owner.json", "writes it anew"),
    Plant(no_model, "model_missing", "mistake", "tiny", "Check the path"),
    Plant(changed_model, "model_changed", "mistake", "tiny", "`loop pipelines edit support --model "),
    Plant(no_weights, "model_incomplete", "mistake", "tiny", "safetensors"),
    Plant(no_template, "template_missing", "mistake", "tiny", "instruct variant"),
    Plant(broken_template, "template_unusable", "mistake", "chat_template.jinja", "original model"),
    Plant(silent_template, "template_unusable", "mistake", "chat_template.jinja", "original chat template"),
    Plant(unequal_template, "template_unusable", "mistake", "chat_template.jinja", "original chat template"),
    Plant(template_without_end, "template_without_end_token", "mistake", "chat_template.jinja", "<|im_end|>"),
    Plant(no_end_anywhere, "no_end_token", "mistake", "tokenizer_config.json", '"eos_token"'),
    Plant(no_artifact, "artifact_missing", "mistake", "artifacts", "`loop train support`"),
    Plant(torn_artifact, "artifact_damaged", "mistake", "artifacts", "`loop train support`"),
    Plant(torn_leftover, "artifact_damaged_unneeded", "warning", "artifacts", "`rm -r ", cured=True),
    Plant(no_version, "live_version_missing", "mistake", "loop-support", "`sqlite3 ", cured=True),
    Plant(no_version_nor_attempt, "live_version_missing", "mistake", "loop-support", "DELETE FROM live", cured=True),
    Plant(frozen_is_no_json, "registry_row", "mistake", "/0001, column frozen", "`sqlite3 ", cured=True, also=SKIPPED),
    Plant(
        frozen_is_no_object, "registry_row", "mistake", "/0001, column frozen", "`sqlite3 ", cured=True, also=SKIPPED
    ),
    Plant(counts_are_no_json, "registry_row", "mistake", "column counts", "a copy of before", also=SKIPPED),
    Plant(other_workspace, "no_workspace", "warning", "other", "`export LOOP_WORKSPACE=default`", cured=True),
    Plant(stale_lease, "stale_lease", "warning", "lake/default", "`loop import` once more"),
    Plant(nobody_at_work, "no_daemon", "mistake", "no daemon", "`loop run`"),
    Plant(nobody_drains, "no_daemon", "mistake", "no daemon", "`loop run`"),
    Plant(failed_attempt, "attempt_failed", "note", "/0002", "`loop train support`"),
    Plant(attempt_in_review, "attempt_waits_for_review", "note", "/0002", "`loop attempts approve "),
    Plant(paused_pipeline, "pipeline_paused", "note", "support", "`loop pipelines resume support`", cured=True),
    Plant(refused_file, "intake_refused", "warning", "refused", ".result"),
    Plant(stray_file, "intake_stray", "warning", "intake", "`mv "),
    Plant(file_of_no_pipeline, "intake_unknown_tag", "warning", "suport", "support"),
    Plant(csv_file, "intake_other_files", "note", "intake", ".jsonl"),
    Plant(same_port, "port_twice", "mistake", "LOOP_SERVE_PORT", "`export LOOP_SERVE_PORT=", cured=True),
    Plant(foreign_host, "host_not_here", "mistake", "203.0.113.7", "`export LOOP_SERVE_HOST=127.0.0.1`", cured=True),
]
