"""The inbox: one sample per identity through races with a drain, frozen batches, deletions, kills, exact frames."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from loop_dagster.errors import BadRequest, NotFound
from loop_dagster.store.inbox import BATCHES_KEPT, TABLES, Inbox, Put
from loop_dagster.store.registry import Registry
from loop_dagster.store.schema import batches
from loop_dagster.tables import FEEDBACK, LABELS, SAMPLES, Column, Table

NOW = datetime(2026, 12, 1, 8, 0, 0, 123456, tzinfo=UTC)


@pytest.fixture
def inbox(registry: Registry) -> Inbox:
    return Inbox(registry)


def sample(sample_id: str, identity: str | None = None, **changes: Any) -> dict[str, object]:
    return {
        "sample_id": sample_id,
        "source": "support",
        "origin": "captured",
        "identity": identity or f"identity of {sample_id}",
        "import_id": None,
        "position": None,
        "conversation_id": None,
        "model": "m",
        "messages": '[{"role":"user","content":"Grüße \u0000 😀"}]',
        "answer": None,
        "tools": None,
        "text_key": -(2**63),
        "prompt_key": 2**63 - 1,
        "answer_key": None,
        "bytes": 40,
        "flag": None,
        "created_at": NOW,
        "expires_at": NOW + timedelta(days=30),
        **changes,
    }


def feedback(feedback_id: str, sample_id: str, **changes: Any) -> dict[str, object]:
    return {
        "feedback_id": feedback_id,
        "sample_id": sample_id,
        "verdict": "accepted",
        "origin": "here",
        "right_answer": None,
        "right_key": None,
        "right_bytes": None,
        "score": None,
        "reason": None,
        "created_at": NOW,
        **changes,
    }


def label(label_id: str, sample_id: str, **changes: Any) -> dict[str, object]:
    return {
        "label_id": label_id,
        "sample_id": sample_id,
        "label": "vip",
        "value": None,
        "parent": None,
        "removed": False,
        "created_at": NOW,
        **changes,
    }


def ids(frames: dict[str, pl.DataFrame]) -> dict[str, list[str]]:
    return {name: frame.get_column(TABLES[name].key[0]).to_list() for name, frame in frames.items()}


# storing


def test_a_sample_with_what_rides_along(inbox: Inbox) -> None:
    put = inbox.put_sample(sample("s1"), feedback=[feedback("f1", "s1")], labels=[label("l1", "s1"), label("l2", "s1")])
    assert put == Put("s1", True)
    frames = inbox.waiting_frames()
    assert ids(frames) == {"samples": ["s1"], "feedback": ["f1"], "labels": ["l1", "l2"]}
    for name, frame in frames.items():
        assert frame.schema == pl.Schema(TABLES[name].schema)
    assert frames["samples"].to_dicts() == [sample("s1")]
    assert frames["feedback"].to_dicts() == [feedback("f1", "s1")]
    assert inbox.pending().rows == 4


def test_a_repeat_gets_the_first_id_and_stores_nothing(inbox: Inbox) -> None:
    assert inbox.put_sample(sample("s1", "same")) == ("s1", True)
    again = inbox.put_sample(sample("s2", "same"), feedback=[feedback("f2", "s2")])
    assert again == ("s1", False)
    assert ids(inbox.waiting_frames()) == {"samples": ["s1"], "feedback": [], "labels": []}
    assert inbox.identities(["same", "other"]) == {"same": "s1"}


def test_a_repeat_of_one_that_is_in_the_lake(inbox: Inbox) -> None:
    lake = {"same": "s1"}
    assert inbox.put_sample(sample("s2", "same"), in_lake=lake.get) == ("s1", False)
    assert inbox.pending().rows == 0
    inbox.add_tombstones(["s1"])  # deleted, not purged: the lake still has the row
    assert inbox.put_sample(sample("s3", "same"), in_lake=lake.get) == ("s3", True)


def test_a_first_one_that_moves_to_the_lake_between_two_looks(inbox: Inbox) -> None:
    """The look into the lake comes too early, and the drain finishes before the write."""
    lake: dict[str, str] = {}
    looks = []
    inbox.put_sample(sample("s0", "other"))
    batch = inbox.open_batch()
    assert batch is not None

    def in_lake(identity: str) -> str | None:
        looks.append(identity)
        if len(looks) == 1:
            lake["same"] = "s1"
            inbox.finish(batch)
            return None
        return lake.get(identity)

    assert inbox.put_sample(sample("s2", "same"), in_lake=in_lake) == ("s1", False)
    assert len(looks) == 2


def test_feedback_and_labels_land_together_or_not_at_all(inbox: Inbox) -> None:
    inbox.put(feedback=[feedback("f1", "s1")], labels=[label("l1", "s1")])
    with pytest.raises(BadRequest):
        inbox.put(feedback=[feedback("f2", "s1")], labels=[label("l2", "s1", label=None)])
    inbox.put(feedback=[feedback("f1", "s1")], labels=[label("l3", "s1")])  # f1 once more: kept once
    assert ids(inbox.waiting_frames()) == {"samples": [], "feedback": ["f1"], "labels": ["l1", "l3"]}
    inbox.put(feedback=[feedback("f4", "s1")])
    inbox.put(labels=[])
    assert inbox.pending().rows == 4


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (sample("s" * 37), "samples.sample_id must be 1 to 36 visible"),
        (sample("s", identity="a\u0000"), "samples.identity must be 1 to 80 visible"),
        (sample("s", source=None), "samples.source must not be null"),
        (sample("s", origin="stolen"), "samples.origin must be one of captured, imported"),
        (sample("s", text_key=2**63), "samples.text_key must fit in 64 bits"),
        (sample("s", bytes=True), "samples.bytes must be of kind int, got bool"),
        (sample("s", messages=["x"]), "samples.messages must be of kind text, got list"),
        (sample("s", messages="secret \ud800"), "samples.messages holds half a surrogate pair"),
        (sample("s", created_at=NOW.replace(tzinfo=None)), "samples.created_at needs a time zone"),
        ({**sample("s"), "more": 1}, "unknown ['more']"),
        ({key: value for key, value in sample("s").items() if key != "flag"}, "lacks ['flag']"),
    ],
)
def test_rows_that_the_table_does_not_take(sqlite_registry: Registry, row: dict[str, object], named: str) -> None:
    inbox = Inbox(sqlite_registry)
    with pytest.raises(BadRequest) as caught:
        inbox.put_sample(row)
    assert named in caught.value.message
    assert "secret" not in caught.value.message
    assert inbox.pending().rows == 0


def test_more_rows_that_cannot_be(sqlite_registry: Registry) -> None:
    inbox = Inbox(sqlite_registry)
    with pytest.raises(BadRequest, match="score must be finite"):
        inbox.put(feedback=[feedback("f", "s", verdict="scored", score=float("nan"))])
    with pytest.raises(BadRequest, match="about that sample"):
        inbox.put_sample(sample("s1"), feedback=[feedback("f", "s2")])


def values(column: Column) -> st.SearchStrategy[object]:
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    times = st.integers(0, 2**32).map(lambda seconds: NOW + timedelta(seconds=seconds / 7))
    moments = st.builds(
        lambda moment, hours: moment.astimezone(timezone(timedelta(hours=hours))), times, st.integers(-9, 9)
    )
    by_kind: dict[str, st.SearchStrategy[object]] = {
        "id": st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=36),
        "text": text,
        "word": st.sampled_from(column.words) if column.words else text,
        "key": st.integers(-(2**63), 2**63 - 1),
        "int": st.integers(-(2**63), 2**63 - 1),
        "float": st.floats(allow_nan=False, allow_infinity=False) | st.integers(0, 1),
        "bool": st.booleans(),
        "time": moments,
    }
    plain = by_kind[column.kind]
    return st.none() | plain if column.nullable else plain


def rows(table: Table) -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries({column.name: values(column) for column in table.columns})


_counter = itertools.count()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(one=rows(SAMPLES), two=rows(FEEDBACK), three=rows(LABELS))
def test_every_row_comes_back_exactly(
    registry: Registry, one: dict[str, object], two: dict[str, object], three: dict[str, object]
) -> None:
    own = Inbox(Registry(registry.url, f"w{next(_counter)}"))
    own.put_sample(one)
    own.put(feedback=[two], labels=[three])
    frames = own.waiting_frames()
    for table, row in ((SAMPLES, one), (FEEDBACK, two), (LABELS, three)):
        assert_frame_equal(frames[table.name], utc_frame(table, row))
    own.registry.dispose()


def utc_frame(table: Table, row: dict[str, object]) -> pl.DataFrame:
    plain: dict[str, object] = {}
    for column in table.columns:
        value = row[column.name]
        if isinstance(value, datetime):
            value = value.astimezone(UTC)
        plain[column.name] = float(value) if column.kind == "float" and isinstance(value, int) else value
    return table.frame([plain])


# draining


def test_batches_are_frozen(inbox: Inbox) -> None:
    assert inbox.open_batch() is None
    assert inbox.pending() == (0, None)
    inbox.put_sample(sample("s1"), now=NOW)
    inbox.put_sample(sample("s2"), now=NOW + timedelta(seconds=5))
    first = inbox.open_batch()
    assert first is not None
    inbox.put_sample(sample("s3"), now=NOW + timedelta(seconds=9))
    assert inbox.unfinished() == first
    assert inbox.open_batch() == first  # the same one again, with the same rows
    assert ids(inbox.rows_of(first))["samples"] == ["s1", "s2"]
    assert inbox.pending() == (3, NOW)
    assert ids(inbox.waiting_frames())["samples"] == ["s1", "s2", "s3"]  # readable until it is finished
    inbox.finish(first)
    inbox.finish(first)
    assert inbox.unfinished() is None
    assert ids(inbox.rows_of(first))["samples"] == []
    second = inbox.open_batch()
    assert second is not None
    assert second > first
    assert ids(inbox.rows_of(second))["samples"] == ["s3"]
    with pytest.raises(NotFound):
        inbox.finish(99)


def test_batches_have_a_size_and_a_floor(inbox: Inbox) -> None:
    for number in range(5):
        inbox.put_sample(sample(f"s{number}"))
    seen = []
    while (batch := inbox.open_batch(limit=2, floor=41)) is not None:
        seen.append((batch, ids(inbox.rows_of(batch))["samples"]))
        inbox.finish(batch)
    assert seen == [(42, ["s0", "s1"]), (43, ["s2", "s3"]), (44, ["s4"])]


def test_old_batches_are_forgotten_and_numbers_go_on(sqlite_registry: Registry) -> None:
    inbox = Inbox(sqlite_registry)
    inbox.put_sample(sample("s1"))
    first = inbox.open_batch()
    assert first == 1
    inbox.finish(first)
    inbox.put_sample(sample("s2"))
    later = inbox.open_batch(floor=BATCHES_KEPT + 5)
    assert later == BATCHES_KEPT + 6
    inbox.finish(later)
    with sqlite_registry.read() as connection:
        assert connection.execute(sa.select(batches.c.batch)).scalars().all() == [later]
    inbox.put_sample(sample("s3"))
    assert inbox.open_batch() == later + 1


class Lake:
    """A lake as far as a drain needs one: a file per batch, written whole, and found by identity."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def write(self, batch: int, frames: dict[str, pl.DataFrame]) -> None:
        target = self.folder / f"{batch:06d}.json"
        if target.exists():  # the transaction is known
            return
        content = frames["samples"].select("identity", "sample_id").rows()
        temporary = target.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(content))
        temporary.rename(target)

    def rows(self) -> list[tuple[str, str]]:
        return [tuple(row) for path in sorted(self.folder.glob("*.json")) for row in json.loads(path.read_text())]

    def find(self, identity: str) -> str | None:
        return dict(self.rows()).get(identity)


def drain(inbox: Inbox, lake: Lake) -> None:
    while (batch := inbox.open_batch(limit=7)) is not None:
        lake.write(batch, inbox.rows_of(batch))
        inbox.finish(batch)


def test_repeats_against_a_running_drain_store_each_identity_once(inbox: Inbox, tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    answers: list[tuple[str, str]] = []
    done = threading.Event()
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def send(sender: int) -> None:
        order = [f"identity {number}" for number in range(12)] * 2
        random.Random(sender).shuffle(order)
        for turn, identity in enumerate(order):
            put = inbox.put_sample(sample(f"{sender}-{turn}", identity), in_lake=lake.find)
            answers.append((identity, put.sample_id))

    def drain_always() -> None:
        while not done.is_set():
            drain(inbox, lake)
            time.sleep(0.002)

    drainer = guarded(drain_always)
    senders = [guarded(lambda sender=sender: send(sender)) for sender in range(4)]
    for thread in senders:
        thread.join()
    done.set()
    drainer.join()
    drain(inbox, lake)
    assert errors == []
    stored = lake.rows()
    assert len(stored) == len(dict(stored)) == 12
    assert set(answers) == set(stored)


def put_until_killed(url: str, acknowledged: str, writer: int) -> None:
    inbox = Inbox(Registry(url))
    out = os.open(acknowledged, os.O_WRONLY | os.O_APPEND)
    for number in itertools.count():
        name = f"{writer}-{number}"
        put = inbox.put_sample(sample(name), feedback=[feedback(f"f{name}", name)])
        os.write(out, f"{put.sample_id}\n".encode())


def drain_until_killed(url: str, folder: str) -> None:
    inbox, lake = Inbox(Registry(url)), Lake(Path(folder))
    while True:
        drain(inbox, lake)
        time.sleep(0.005)


def test_killed_writers_and_drains_lose_and_double_nothing(
    inbox: Inbox, processes: ForkServerContext, tmp_path: Path
) -> None:
    acknowledged, folder = tmp_path / "acknowledged", tmp_path / "lake"
    acknowledged.touch()
    lake = Lake(folder)
    rng = random.Random(3)
    for number in range(4):
        enough = acknowledged.stat().st_size + rng.randrange(20, 120)  # 5 to 30 acknowledged samples
        pair = [
            processes.Process(target=put_until_killed, args=(inbox.registry.url, str(acknowledged), number)),
            processes.Process(target=drain_until_killed, args=(inbox.registry.url, str(folder))),
        ]
        for child in pair:
            child.start()
        give_up = time.monotonic() + 60
        while acknowledged.stat().st_size < enough:
            assert time.monotonic() < give_up
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        for child in rng.sample(pair, 2):
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()
    drain(inbox, lake)
    stored = [sample_id for _, sample_id in lake.rows()]
    promised = set(acknowledged.read_text().split())
    assert len(promised) > 20
    assert len(stored) == len(set(stored))
    assert promised <= set(stored)
    assert len(stored) <= len(promised) + 5
    assert inbox.pending().rows == 0


# deleting


def test_a_tombstone_takes_the_rows_along(inbox: Inbox) -> None:
    for name in ("s1", "s2"):
        inbox.put_sample(sample(name), feedback=[feedback(f"f{name}", name)], labels=[label(f"l{name}", name)])
    batch = inbox.open_batch()
    assert batch is not None
    assert inbox.add_tombstones(["s1", "s1", "unknown"], now=NOW) == 3
    assert ids(inbox.rows_of(batch)) == {"samples": ["s2"], "feedback": ["fs2"], "labels": ["ls2"]}
    assert inbox.tombstones() == ("s1", "unknown")
    assert inbox.add_tombstones(["s1"]) == 0
    with pytest.raises(NotFound, match="s1"):
        inbox.put(feedback=[feedback("late", "s1")], labels=[label("fine", "s2")])
    assert inbox.pending().rows == 3
    inbox.clear_tombstones(["s1"])
    assert inbox.tombstones() == ("unknown",)


def test_of_feedback_against_deletion_nothing_stays(inbox: Inbox) -> None:
    for number in range(8):
        name = f"s{number}"
        inbox.put_sample(sample(name))
        barrier = threading.Barrier(2)

        def give(name: str = name, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            try:
                inbox.put(feedback=[feedback(f"f{name}", name)])
            except NotFound:
                return

        thread = threading.Thread(target=give)
        thread.start()
        barrier.wait()
        inbox.add_tombstones([name])
        thread.join()
        assert inbox.pending().rows == 0


def test_deleted_text_leaves_the_files(sqlite_registry: Registry, home: Path) -> None:
    inbox = Inbox(sqlite_registry)
    secret = "Zanzibar-7719"
    rng = random.Random(1)
    for number in range(120):
        text = f"{secret} {'x' * int(rng.paretovariate(0.8) * 40 % 9_000)}" if number % 2 else f"kept {'y' * 3_000}"
        inbox.put_sample(sample(f"s{number}", messages=text))
    assert files_with(home, secret)
    half = [f"s{number}" for number in range(1, 120, 4)]
    inbox.add_tombstones(half)
    batch = inbox.open_batch()
    assert batch is not None
    with sqlite_registry.read() as connection:  # somebody still reads
        connection.execute(sa.text("SELECT count(*) FROM inbox"))
    inbox.add_tombstones([f"s{number}" for number in range(3, 120, 4)])
    assert sqlite_registry.scrub()
    assert files_with(home, secret) == []
    assert files_with(home, "kept")
    inbox.finish(batch)
    assert sqlite_registry.scrub()
    assert files_with(home, "kept") == []


@pytest.mark.postgres
def test_scrub_rewrites_the_inbox_on_postgres(postgres_url: str) -> None:
    registry = Registry(postgres_url)
    inbox = Inbox(registry)
    inbox.put_sample(sample("s1"))
    inbox.put_sample(sample("s2"))
    before = file_of_inbox(registry)
    inbox.add_tombstones(["s1"])
    assert registry.scrub()
    assert file_of_inbox(registry) != before
    assert ids(inbox.waiting_frames())["samples"] == ["s2"]
    registry.dispose()


def file_of_inbox(registry: Registry) -> str:
    with registry.read() as connection:
        return str(connection.execute(sa.text("SELECT pg_relation_filepath('inbox')")).scalar_one())


def files_with(folder: Path, text: str) -> list[str]:
    return [path.name for path in each_file(folder) if text.encode() in path.read_bytes()]


def each_file(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def test_workspaces_are_apart(inbox: Inbox) -> None:
    other = Inbox(Registry(inbox.registry.url, "other"))
    inbox.put_sample(sample("s1", "same"))
    assert other.put_sample(sample("s2", "same")) == ("s2", True)
    other.add_tombstones(["s1"])
    assert ids(inbox.waiting_frames())["samples"] == ["s1"]
    assert inbox.tombstones() == ()
    assert other.open_batch() == inbox.open_batch() == 1
