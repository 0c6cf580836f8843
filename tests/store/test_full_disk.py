"""Full disks and read-only folders: a named error, nothing acknowledged lost or doubled, and the next run goes on.

Real file systems of a few megabytes, mounted for the length of a test; skipped where nothing may be mounted.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from doctor_patient import Patient, mounted
from uuid_utils import uuid7

from loop_dagster.errors import LakeNotWritable, RegistryNotWritable, RegistryUnavailable
from loop_dagster.settings import Settings
from loop_dagster.store import torn
from loop_dagster.store.artifacts import Artifacts
from loop_dagster.store.import_result import ImportResult
from loop_dagster.store.importing import import_file
from loop_dagster.store.intake import drain
from loop_dagster.store.lake import Lake
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.registry import Registry
from loop_dagster.tables import FEEDBACK, LABELS, SAMPLES

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
ROWS = 1_000


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    with mounted(folder, "-t", "tmpfs", "-o", "size=6m", "tmpfs"):
        yield folder


def fill(folder: Path, *, leave: int = 0) -> Path:
    """Take all space but `leave` bytes; deleting the file gives it back."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            file.truncate(max(0, file.tell() - leave))
    return path


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    with mounted(folder, "--bind", str(folder)):
        done = subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], capture_output=True, check=False)
        if done.returncode != 0:
            pytest.skip("nothing can be mounted read-only here")
        yield


def chats(path: Path, count: int) -> Path:
    """Conversations that compress badly."""
    rng = random.Random(7)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            words = " ".join(f"{rng.getrandbits(60):x}" for _ in range(15))
            file.write(json.dumps({"prompt": f"{number} {words}", "completion": words[::-1], "label": True}) + "\n")
    return path


def add(store: Store, number: int) -> str:
    """Acknowledge one sample of about 3 kB; its id."""
    row = {
        "sample_id": str(uuid7()),
        "source": "support",
        "origin": "captured",
        "identity": f"{number:032x}",
        **dict.fromkeys(("import_id", "position", "conversation_id", "model", "tools", "flag")),
        "messages": json.dumps([{"role": "user", "content": random.Random(number).randbytes(1_500).hex()}]),
        "answer": '{"content":"Hi","role":"assistant"}',
        "text_key": number,
        "prompt_key": number,
        "answer_key": 1,
        "bytes": 3_000,
        "created_at": NOW,
        "expires_at": NOW + timedelta(days=3_000),
    }
    return store.inbox.put_sample(row).sample_id


def readable(store: Store) -> list[str]:
    """Ids of every captured sample that readers see."""
    seen = store.samples.keys().samples
    return seen.filter(pl.col("origin") == "captured").select("sample_id").collect()["sample_id"].to_list()


def stored(lake: Lake) -> dict[str, int]:
    """Rows of each table; an id that is there twice fails."""
    counts = {}
    for table in (SAMPLES, LABELS, FEEDBACK):
        frame = lake.scan(table).select(table.key[0]).collect()
        assert frame[table.key[0]].is_unique().all()
        counts[table.name] = frame.height
    return counts


def test_an_import_onto_a_full_disk_is_named_and_finished_later(patient: Patient, small: Path, tmp_path: Path) -> None:
    patient.env("LOOP_LAKE_URL", str(small / "lake"))
    file = str(chats(tmp_path / "chats.jsonl", ROWS))
    filler = fill(small, leave=60_000)
    for _ in range(2):
        status, text, _ = patient.loop("import", file, "--pipeline", "support", "--json")
        said = json.loads(text)
        assert (status, said["error"]["code"]) == (5, "IMPORT_INCOMPLETE")
        assert "on the lake's table 'samples'" in said["error"]["message"]
        assert "No space left" in said["error"]["message"]
        assert (said["imported"], said["not_saved"]) == (0, ROWS)
    status, _, errors = patient.loop("import", file, "--pipeline", "support")
    assert status == 5
    assert "No space left" in errors.replace("\n", " ")
    filler.unlink()
    status, text, _ = patient.loop("import", file, "--pipeline", "support", "--json")
    assert (status, json.loads(text)["imported"]) == (0, ROWS)
    assert stored(Lake(str(small / "lake"))) == {"samples": ROWS, "labels": ROWS, "feedback": ROWS}
    # Of 6 MB; and what the attempt before wrote stayed in the lake that was left. Nothing else is wrong.
    assert set(patient.doctor().but_fine()) == {"disk_low", "lake_table_missing"}


@pytest.mark.parametrize("leave", [120_000, 250_000, 400_000])
def test_a_disk_that_fills_up_in_the_middle_of_an_import_keeps_whole_pages(
    small: Path, tmp_path: Path, leave: int
) -> None:
    file = chats(tmp_path / "chats.jsonl", ROWS)
    lake = Lake(str(small / "lake"))
    filler = fill(small, leave=leave)

    def bring() -> ImportResult:
        return import_file(file, lake, source="support", labels=["support"], now=NOW, page_rows=100)

    first = bring()
    assert not first.complete
    assert 0 < first.imported < ROWS
    assert first.imported + first.not_saved == ROWS
    kept = stored(lake)
    assert first.imported <= kept["samples"] <= first.imported + 100  # a commit may be whole and its checkpoint not
    assert not bring().complete
    filler.unlink()
    last = bring()
    assert last.complete
    assert last.imported + last.already_present == ROWS
    assert last.already_present >= kept["samples"]
    assert stored(lake) == {"samples": ROWS, "labels": ROWS, "feedback": ROWS}
    assert [torn.look(lake, table, thorough=True) for table in (SAMPLES, LABELS, FEEDBACK)] == [[], [], []]


def test_a_drain_onto_a_full_disk_keeps_every_acknowledged_row(patient: Patient, small: Path) -> None:
    patient.env("LOOP_LAKE_URL", str(small / "lake"))
    store = open_store(Settings())
    ids = [add(store, number) for number in range(300)]
    filler = fill(small)
    for _ in range(2):
        with pytest.raises(LakeNotWritable, match="No space left") as caught:
            drain(store, holder="test")
        assert "See to the space" in caught.value.message
    waiting = {row for row in ids if row}
    assert set(readable(store)) == waiting
    filler.unlink()
    drain(store, holder="test")
    assert set(readable(store)) == waiting
    assert stored(store.lake)["samples"] == len(waiting)
    assert store.inbox.pending()[0] == 0
    store.registry.dispose()


@pytest.mark.parametrize("leave", [0, 8_192, 60_000])
def test_a_registry_on_a_full_disk_keeps_what_it_acknowledged(patient: Patient, small: Path, leave: int) -> None:
    patient.env("LOOP_REGISTRY_URL", f"sqlite:///{small / 'registry.db'}")
    patient.env("LOOP_LAKE_URL", str(small / "lake"))
    store = open_store(Settings())
    acknowledged = {add(store, number) for number in range(20)}
    filler = fill(small, leave=leave)
    refused: list[RegistryUnavailable] = []
    for number in range(20, 400):
        try:
            acknowledged.add(add(store, number))
        except RegistryUnavailable as error:
            refused.append(error)
            if len(refused) == 5:
                break
    assert refused, "the disk was not full"
    assert {error.exit_code for error in refused} == {5}
    assert any(isinstance(error, RegistryNotWritable) and "df -h" in error.message for error in refused)
    status, text, _ = patient.loop("pipelines", "create", "--name", "More", "--model", str(patient.model), "--json")
    assert (status, json.loads(text)["error"]["code"]) == (5, "REGISTRY_NOT_WRITABLE")
    store.registry.dispose()
    filler.unlink()
    store = open_store(Settings())
    assert set(readable(store)) == acknowledged
    acknowledged.add(add(store, 1_000))
    drain(store, holder="test")
    assert set(readable(store)) == acknowledged
    with store.registry.read() as connection:
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalar_one() == "ok"
    store.registry.dispose()


def test_a_registry_that_finds_no_room_at_all_is_made_later(small: Path) -> None:
    filler = fill(small)
    registry = Registry(f"sqlite:///{small / 'registry.db'}")
    with pytest.raises(RegistryUnavailable):
        registry.migrate()
    registry.dispose()
    filler.unlink()
    registry = Registry(f"sqlite:///{small / 'registry.db'}")
    registry.migrate()
    assert registry.check().ok
    registry.dispose()


def test_weights_that_find_no_room_are_not_kept_in_part(small: Path, tmp_path: Path) -> None:
    artifacts = Artifacts(small / "artifacts")
    artifacts.root.mkdir()
    source = tmp_path / "adapter"
    source.mkdir()
    (source / "adapter_model.safetensors").write_bytes(random.Random(1).randbytes(3_000_000))
    filler = fill(small, leave=500_000)
    with pytest.raises(OSError, match="No space left"):
        artifacts.keep(source, still_mine=lambda: None)
    assert artifacts.list() == ()
    filler.unlink()
    digest = artifacts.keep(source, still_mine=lambda: None)
    assert artifacts.open(digest, verify=True).is_dir()
    artifacts.sweep({digest}, grace_s=0)
    assert [path.name for path in (artifacts.root / ".work").iterdir()] == []


def test_a_read_only_lake_is_named_and_used_again_later(patient: Patient, tmp_path: Path) -> None:
    lake = patient.home / "lake"
    file = str(chats(tmp_path / "chats.jsonl", 10))
    store = open_store(Settings())
    before = stored(store.lake)
    acknowledged = add(store, 1)
    with read_only(lake):
        status, text, _ = patient.loop("import", file, "--pipeline", "support", "--json")
        said = json.loads(text)
        assert (status, said["not_saved"]) == (5, 10)
        assert "Read-only file system" in said["error"]["message"]
        assert str(lake) not in said["error"]["message"]
        with pytest.raises(LakeNotWritable, match="Read-only file system"):
            drain(store, holder="test")
        assert acknowledged in readable(store)
        assert set(patient.doctor().but_fine()) == {"not_writable"}
    assert patient.loop("import", file, "--pipeline", "support")[0] == 0
    drain(store, holder="test")
    assert stored(store.lake)["samples"] == before["samples"] + 11
    store.registry.dispose()


def test_a_read_only_home_is_named_by_every_command(patient: Patient, tmp_path: Path) -> None:
    file = str(chats(tmp_path / "chats.jsonl", 10))
    with read_only(patient.home):
        for command in (
            ("import", file, "--pipeline", "support"),
            ("pipelines", "pause", "support"),
            ("train", "support"),
            ("feedback", "00000000-0000-7000-8000-000000000000", "good"),
        ):
            status, text, errors = patient.loop(*command, "--json")
            assert status in (1, 3, 4, 5), (command, text, errors)
            assert json.loads(text)["error"]["message"]
            assert "Traceback" not in errors
    assert patient.loop("import", file, "--pipeline", "support")[0] == 0
