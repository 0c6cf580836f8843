"""The reading side beside the plainest reading: after every kind of write, what is kept in memory says the same."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal
from uuid_utils import uuid7

from loop_dagster.settings import Settings
from loop_dagster.store.inbox import Inbox
from loop_dagster.store.lake import Lake
from loop_dagster.store.open import open_store
from loop_dagster.store.registry import Registry
from loop_dagster.store.samples import Samples
from loop_dagster.store.waiting import Waiting
from loop_dagster.tables import FEEDBACK, LABELS, SAMPLES

NOW = datetime(2026, 6, 1, tzinfo=UTC)
TABLES = (SAMPLES, FEEDBACK, LABELS)


def sample(number: int, *, sample_id: str | None = None, at: datetime = NOW, **columns: Any) -> dict[str, Any]:
    return {
        "sample_id": sample_id or str(uuid7()),
        "source": "shop",
        "origin": "captured",
        "identity": f"{number:032x}",
        "import_id": None,
        "position": None,
        "conversation_id": None,
        "model": "a-model",
        "messages": f'[{{"content":"question {number}","role":"user"}}]',
        "answer": '{"content":"yes","role":"assistant"}',
        "tools": None,
        "text_key": number,
        "prompt_key": number,
        "answer_key": 1,
        "bytes": 80,
        "flag": None,
        "created_at": at,
        "expires_at": at + timedelta(days=30),
        **columns,
    }


def feedback(sample_id: str, verdict: str = "accepted", *, at: datetime = NOW, **columns: Any) -> dict[str, Any]:
    return {
        "feedback_id": str(uuid7()),
        "sample_id": sample_id,
        "verdict": verdict,
        "origin": "here",
        "right_answer": None,
        "right_key": None,
        "right_bytes": None,
        "score": None,
        "reason": None,
        "created_at": at,
        **columns,
    }


def label(sample_id: str, name: str = "vip", *, at: datetime = NOW, **columns: Any) -> dict[str, Any]:
    return {
        "label_id": str(uuid7()),
        "sample_id": sample_id,
        "label": name,
        "value": None,
        "parent": None,
        "removed": False,
        "created_at": at,
        **columns,
    }


class Home:
    """One registry and one lake, read by `kept`, which has looked before, and by whoever opens them anew."""

    def __init__(self, registry: Registry, root: Path) -> None:
        self.registry, self.root = registry, root
        self.lake, self.inbox = Lake(str(root)), Inbox(registry)
        self.kept = Samples(Lake(str(root)), Inbox(registry))
        self.ids: list[str] = []
        self.number = 0

    def fresh(self) -> Samples:
        return Samples(Lake(str(self.root)), Inbox(self.registry))

    # what may happen

    def capture(self) -> None:
        self.number += 1
        row = sample(self.number)
        riders = [feedback(row["sample_id"])] if self.number % 3 == 0 else []
        self.inbox.put_sample(row, feedback=riders)
        self.ids.append(row["sample_id"])

    def describe(self) -> None:
        if self.ids:
            chosen = self.ids[self.number % len(self.ids)]
            self.inbox.put(feedback=[feedback(chosen, "rejected")], labels=[label(chosen)])

    def bring(self) -> None:
        rows = []
        for _ in range(3):
            self.number += 1
            rows.append(sample(self.number, origin="imported", import_id="i", position=self.number))
        self.lake.append(SAMPLES, SAMPLES.frame(rows))
        self.ids += [row["sample_id"] for row in rows]

    def drain(self, *, finish: bool = True) -> None:
        number = self.inbox.open_batch()
        if number is None:
            return
        for name, frame in self.inbox.rows_of(number).items():
            table = next(one for one in TABLES if one.name == name)
            self.lake.append(table, frame, transaction=("inbox", number))
        if finish:
            self.inbox.finish(number)

    def half_drain(self) -> None:
        self.drain(finish=False)

    def delete(self) -> None:
        if self.ids:
            gone = self.ids.pop(self.number % len(self.ids))
            self.inbox.add_tombstones([gone])

    def delete_newest(self) -> None:
        """On SQLite the next row then gets an id that the inbox had before."""
        if self.ids:
            self.inbox.add_tombstones([self.ids.pop()])

    def purge(self) -> None:
        dead = self.inbox.tombstones()
        for sample_id in dead:
            for table in TABLES:
                self.lake.delete(table, f"sample_id = '{sample_id}'")
        self.inbox.clear_tombstones(dead)

    def maintain(self) -> None:
        for table in TABLES:
            self.lake.maintain(table)


def compare(home: Home) -> None:
    """What the long-lived reader says against the plainest reading of what is stored."""
    waiting = home.inbox._frames(home.inbox._mine())
    for name, frame in home.kept._inbox.waiting_frames().items():
        assert_frame_equal(frame, waiting[name])
    dead = set(home.inbox.tombstones())
    there = {}
    for table in TABLES:
        stored = pl.concat([Lake(str(home.root)).scan(table).collect(), waiting[table.name]])
        stored = stored.filter(~pl.col("sample_id").is_in(list(dead))).unique(table.key[0])
        there[table.name] = stored
    for reader in (home.kept, home.fresh()):
        whole, keys = reader.whole(), reader.keys()
        for table, frame, light in zip(
            TABLES,
            (whole.samples, whole.feedback, whole.labels),
            (keys.samples, keys.feedback, keys.labels),
            strict=True,
        ):
            key = table.key[0]
            assert_frame_equal(frame.collect().sort(key), there[table.name].sort(key))
            assert light.select(key).collect()[key].sort().to_list() == there[table.name][key].sort().to_list()
        assert sorted(there["samples"]["sample_id"]) == sorted(home.ids)
        assert reader.count() == len(home.ids)
    for sample_id in [*home.ids[:2], *home.ids[-2:], *dead, str(uuid7())]:
        found = home.kept.get(sample_id)
        assert (found is not None) == (sample_id in home.ids)
        if found is not None:
            for name, key in (("feedback", "feedback_id"), ("labels", "label_id")):
                mine = there[name].filter(pl.col("sample_id") == sample_id).sort("created_at", key).to_dicts()
                assert found[name] == mine
    in_lake = dict(Lake(str(home.root)).scan(SAMPLES).select("identity", "sample_id").collect().iter_rows())
    asked = [f"{number:032x}" for number in range(home.number + 2)]
    assert home.kept.find_identities(asked) == in_lake
    assert home.kept.find_identity(asked[-1]) is None


@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_says_what_is_stored_after_every_kind_of_write(
    sqlite_registry: Registry, tmp_path: Path, seed: int
) -> None:
    dice, home = random.Random(seed), Home(sqlite_registry, tmp_path / "lake")
    steps = [home.capture] * 4 + [home.describe] * 2 + [home.bring, home.drain, home.half_drain, home.delete]
    steps += [home.delete_newest, home.purge, home.maintain]
    for _ in range(30):
        dice.choice(steps)()
        compare(home)


@pytest.mark.postgres
def test_what_is_kept_on_postgresql(postgres_url: str, tmp_path: Path) -> None:
    home = Home(Registry(postgres_url), tmp_path / "lake")
    for step in (home.capture, home.capture, home.describe, home.half_drain, home.capture, home.delete, home.drain):
        step()
        compare(home)
    home.registry.dispose()


def test_an_id_that_sqlite_gives_again_is_another_row(sqlite_registry: Registry) -> None:
    inbox, waiting = Inbox(sqlite_registry), Waiting(sqlite_registry)
    first = sample(1)
    inbox.put_sample(first)
    assert waiting.frames()["samples"]["sample_id"].to_list() == [first["sample_id"]]
    inbox.add_tombstones([first["sample_id"]])
    inbox.clear_tombstones([first["sample_id"]])
    again = sample(1)  # the same request once more, after its sample was deleted
    inbox.put_sample(again)
    assert waiting.frames()["samples"]["sample_id"].to_list() == [again["sample_id"]]


def test_only_what_is_new_is_read(sqlite_registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox, waiting = Inbox(sqlite_registry), Waiting(sqlite_registry)
    for number in range(20):
        inbox.put_sample(sample(number))
    waiting.frames()
    read: list[int] = []
    real = pl.DataFrame
    monkeypatch.setattr(
        "loop_dagster.store.waiting.frame_of",
        lambda table, payloads: read.append(len(payloads)) or real(payloads, schema=table.schema),
    )
    waiting.frames()
    assert sum(read) == 0
    monkeypatch.undo()
    inbox.put_sample(sample(99))
    assert waiting.frames()["samples"].height == 21


def test_a_huge_inbox_is_not_kept_in_memory(sqlite_registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loop_dagster.store.waiting.KEPT_BYTES", 10_000)
    inbox, waiting = Inbox(sqlite_registry), Waiting(sqlite_registry)
    for number in range(3):
        inbox.put_sample(sample(number, messages="x" * 5_000))
    assert waiting.frames()["samples"].height == 3
    assert waiting._known.rows == 0


def test_a_table_in_place_of_another_is_read_anew(tmp_path: Path) -> None:
    reader, root = Lake(str(tmp_path / "lake")), tmp_path / "lake"
    for number in (1, 2):
        Lake(str(root)).append(SAMPLES, SAMPLES.frame([sample(number)]))
        snapshot = reader.snapshot(SAMPLES)
        assert snapshot is not None and snapshot.rows == 1
        assert reader.scan(SAMPLES).select("text_key").collect().item() == number
        assert reader.snapshot(SAMPLES) is snapshot
        shutil.rmtree(root)
    assert reader.snapshot(SAMPLES) is None


def test_a_commit_of_another_process_is_seen_at_once(tmp_path: Path) -> None:
    reader, writer = Lake(str(tmp_path)), Lake(str(tmp_path))
    for number in range(1, 30):
        writer.append(SAMPLES, SAMPLES.frame([sample(number)]))
        assert reader.scan(SAMPLES).select(pl.len()).collect().item() == number
        snapshot = reader.snapshot(SAMPLES)
        assert snapshot is not None and snapshot.rows == number
    writer.maintain(SAMPLES)
    snapshot = reader.snapshot(SAMPLES)
    assert snapshot is not None and len(snapshot.files) == 1
    assert reader.scan(SAMPLES).select(pl.len()).collect().item() == 29


def test_rows_of_a_group_are_fewer_where_they_are_long(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    long = [sample(number, messages=f"{number} " + "x" * 100_000) for number in range(1_500)]
    for part in (long[:750], long[750:]):
        lake.append(SAMPLES, SAMPLES.frame(part))
    groups = [pq.ParquetFile(path).metadata for path in lake.files(SAMPLES)]
    assert [group.row_group(0).num_rows for group in groups] == [pytest.approx(670, rel=0.05)] * 2
    lake.maintain(SAMPLES)
    (whole,) = [pq.ParquetFile(path).metadata for path in lake.files(SAMPLES)]
    assert whole.num_rows == 1_500
    lake.append(FEEDBACK, FEEDBACK.frame([feedback(str(uuid7())) for _ in range(20_000)]))
    (short,) = [pq.ParquetFile(path).metadata for path in lake.files(FEEDBACK)]
    assert short.row_group(0).num_rows == 16_384


SEARCH = """
import resource, sys
from datetime import UTC, datetime
from pathlib import Path
from loop_dagster.api.finding import Filters, find
from loop_dagster.settings import Settings
from loop_dagster.store.open import open_store

def peak():
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)

store, now = open_store(Settings(home=Path(sys.argv[1]))), datetime(2026, 6, 1, tzinfo=UTC)
find(store, Filters(source="nowhere"), now, limit=1, offset=0)
before = peak()
totals = [find(store, Filters(text=text), now, limit=5, offset=0).total for text in ("NUMBER 77 ", "filling", '"no')]
print(*totals, peak() - before)
"""


def test_a_search_has_a_part_of_the_text_in_memory(tmp_path: Path) -> None:
    """400 MB of text in 40 parts, looked through by two threads."""
    lake = open_store(Settings(home=tmp_path)).lake
    for page in range(4):
        rows = [
            sample(number, messages=f'[{{"content":"number {number} {FILLING}","role":"user"}}]')
            for number in range(2_000 * page, 2_000 * (page + 1))
        ]
        lake.append(SAMPLES, SAMPLES.frame(rows))
    done = subprocess.run(
        [sys.executable, "-c", SEARCH, str(tmp_path)],
        env={**os.environ, "POLARS_MAX_THREADS": "2"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    one, all_of_them, none, mib = (int(word) for word in done.stdout.split())
    assert (one, all_of_them, none) == (1, 8_000, 0)
    assert mib < 300, f"{mib} MiB more than before"


FILLING = "filling " * 6_250
