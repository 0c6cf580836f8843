"""The gateway's part of the registry: ids that all servers know, consent in one look, counters, samples in batches."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Collection
from datetime import UTC, datetime, timedelta

import pytest
from uuid_utils import uuid7

from loop_dagster.rules import canonical
from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.store.capturing import MOST_TAGS, WAY, Capturing
from loop_dagster.store.inbox import Inbox, NewSample
from loop_dagster.store.pages import sample_row
from loop_dagster.store.pipelines import Pipelines
from loop_dagster.store.registry import Registry
from loop_dagster.store.sources import Sources

NOW = datetime(2026, 12, 1, 8, 0, 0, 123_000, tzinfo=UTC)


def new(request_id: str, text: str = "Hello") -> NewSample:
    row, _ = sample_row(
        source="s",
        identity=canonical.identity("request", "s", request_id),
        messages=[{"role": "user", "content": text}],
        answer={"role": "assistant", "content": "Hi"},
        tools=None,
        flag=None,
        now=NOW,
        expires_at=NOW + timedelta(days=30),
    )
    return NewSample(row)


def nothing(_: Collection[str]) -> dict[str, str]:
    return {}


# ids


def test_an_id_is_known_by_every_server_for_a_minute(registry: Registry) -> None:
    one, other = Capturing(registry), Capturing(Registry(registry.url, registry.workspace))
    issued = one.new_id(NOW)
    assert uuid.UUID(issued).version == 7
    assert issued < one.new_id(NOW + timedelta(milliseconds=1))  # in the order of time, as all sample ids
    assert other.on_its_way(issued, NOW)
    assert other.on_its_way(issued, NOW + WAY)
    assert not other.on_its_way(issued, NOW + WAY + timedelta(seconds=1))
    assert not other.on_its_way(issued, NOW - timedelta(minutes=1))
    assert len({one.new_id(NOW) for _ in range(2_000)}) == 2_000


def test_ids_of_others_are_not_known(registry: Registry) -> None:
    mine = Capturing(registry)
    issued = mine.new_id(NOW)
    workspace = Capturing(Registry(registry.url, "elsewhere"))
    assert not workspace.on_its_way(issued, NOW)
    now = datetime.now(UTC)
    for made_up in (str(uuid7()), "", "no-id", issued[:-1] + ("0" if issued[-1] != "0" else "1"), "f" * 36):
        assert not mine.on_its_way(made_up, now)
        assert not mine.on_its_way(made_up, NOW)
    far = issued[:19].replace(issued[:8], "ffffffff") + issued[19:]
    assert not mine.on_its_way(far, NOW)


def test_a_call_that_takes_long_stays_on_its_way(registry: Registry) -> None:
    capturing = Capturing(registry)
    issued, later = capturing.new_id(NOW), NOW + timedelta(minutes=5)
    capturing.seen([issued], later - timedelta(seconds=20))
    assert capturing.on_its_way(issued, later)
    assert not capturing.on_its_way(issued, later + WAY)
    capturing.seen([], later + 4 * WAY)  # forgets it
    assert not capturing.on_its_way(issued, later)


def test_a_deleted_sample_is_not_on_its_way(registry: Registry) -> None:
    capturing, inbox = Capturing(registry), Inbox(registry)
    issued = capturing.new_id(NOW)
    inbox.add_tombstones([issued], now=NOW)
    assert not capturing.on_its_way(issued, NOW)


def test_an_id_can_stand_for_an_earlier_one(registry: Registry) -> None:
    capturing = Capturing(registry)
    issued, first = capturing.new_id(NOW), capturing.new_id(NOW)
    assert capturing.first_of(issued) is None
    capturing.mean_first({issued: first}, NOW)
    capturing.seen([], NOW + timedelta(days=29))
    assert capturing.first_of(issued) == first
    capturing.seen([], NOW + timedelta(days=31))
    assert capturing.first_of(issued) is None


# consent


def test_one_look_says_what_consent_depends_on(registry: Registry) -> None:
    capturing, pipelines, sources = Capturing(registry), Pipelines(registry), Sources(registry)
    assert capturing.look("gpt", ["support"], None, NOW).source.enabled is False
    made = pipelines.create(
        "Support", model_id="m", model_digest="d" * 64, now=NOW, settings=PipelineSettings(tags=("billing",))
    )
    sources.put("gpt", enabled=True, tags=["x"], days=3, now=NOW)
    found = capturing.look("gpt", ["support", "billing", "nobody"], "identity", NOW)
    assert (found.source.enabled, found.source.tags, found.source.retention_days) == (True, ("x",), 3)
    assert found.known == {"support", "billing"}
    assert found.first_id is None
    sample = new("one")
    Inbox(registry).put_samples([sample], in_lake=nothing, now=NOW)
    assert capturing.look("gpt", [], str(sample.row["identity"]), NOW).first_id == sample.row["sample_id"]
    over = sample.row["expires_at"]
    assert isinstance(over, datetime)
    assert capturing.look("gpt", [], str(sample.row["identity"]), over).first_id is None
    pipelines.delete(made.pipeline_id, now=NOW)
    assert capturing.look("gpt", ["support", "billing"], None, NOW).known == frozenset()


def test_what_nobody_can_have_sent_before_is_not_looked_up(registry: Registry) -> None:
    def asked_for(identities: Collection[str]) -> dict[str, str]:
        assert list(identities) == [old.row["identity"]]
        return {str(old.row["identity"]): "lake"}

    inbox, old, fresh = Inbox(registry), new("old"), new("fresh")
    unheard = {str(fresh.row["identity"])}
    puts = inbox.put_samples([old, fresh], in_lake=asked_for, unheard=unheard, now=NOW)
    assert [put.stored for put in puts] == [False, True]
    # Where the promise does not hold, the first one stays and is named all the same.
    assert inbox.put_samples([fresh], in_lake=asked_for, unheard=unheard, now=NOW)[0].stored
    twin = new("fresh")  # of another id
    assert inbox.put_samples([twin], in_lake=asked_for, unheard=unheard, now=NOW) == [(fresh.row["sample_id"], False)]


# counters


def test_misses_add_up_for_a_week(registry: Registry) -> None:
    capturing = Capturing(registry)
    capturing.count({("a", "no_pipeline"): 2, ("b", "incomplete"): 1}, NOW - timedelta(days=7))
    capturing.count({("a", "no_pipeline"): 1}, NOW - timedelta(days=6))
    capturing.count({("a", "no_pipeline"): 1, ("b", "too_large"): 5}, NOW)
    found = [(one.tag, one.reason, one.calls, one.last_at) for one in capturing.misses(NOW)]
    assert found == [("b", "too_large", 5, NOW), ("a", "no_pipeline", 2, NOW)]
    assert Capturing(Registry(registry.url, "elsewhere")).misses(NOW) == []


def test_made_up_tags_do_not_fill_the_table(registry: Registry) -> None:
    capturing = Capturing(registry)
    capturing.count({(f"t{number}", "no_pipeline"): 1 for number in range(MOST_TAGS + 50)}, NOW)
    capturing.count({("t1", "no_pipeline"): 1, ("one-more", "no_pipeline"): 1}, NOW)
    found = {one.tag: one.calls for one in capturing.misses(NOW)}
    assert len(found) == MOST_TAGS + 1
    assert (found[""], found["t1"]) == (51, 2)


# samples, several at once


def test_samples_are_stored_once_each(registry: Registry) -> None:
    inbox = Inbox(registry)
    one, two = new("1"), new("2")
    assert [put.stored for put in inbox.put_samples([one, two], in_lake=nothing, now=NOW)] == [True, True]
    again, three, twin = new("1"), new("3"), new("3")
    puts = inbox.put_samples([again, three, twin], in_lake=nothing, now=NOW)
    assert [(put.sample_id, put.stored) for put in puts] == [
        (one.row["sample_id"], False),
        (three.row["sample_id"], True),
        (three.row["sample_id"], False),
    ]
    assert inbox.put_samples([one], in_lake=nothing, now=NOW)[0].stored  # its own retry is no repeat
    assert inbox.pending().rows == 3


def test_what_the_lake_has_is_not_stored_again_unless_it_was_deleted(registry: Registry) -> None:
    inbox = Inbox(registry)
    there, gone = new("there"), new("gone")
    lake = {str(one.row["identity"]): f"{number:036}" for number, one in enumerate((there, gone))}
    inbox.add_tombstones([lake[str(gone.row["identity"])]], now=NOW)
    puts = inbox.put_samples([there, gone], in_lake=lambda _: lake, now=NOW)
    assert puts[0] == (f"{0:036}", False)
    assert puts[1] == (gone.row["sample_id"], True)


def test_a_drain_between_two_looks_doubles_nothing(registry: Registry) -> None:
    inbox = Inbox(registry)
    first, again = new("1"), new("1")
    lake: dict[str, str] = {}

    def in_lake(_: Collection[str]) -> dict[str, str]:
        found = dict(lake)
        if not lake:  # the first one comes, and is drained, after this look and before the write
            inbox.put_samples([first], in_lake=nothing, now=NOW)
            batch = inbox.open_batch(now=NOW)
            assert batch is not None
            inbox.finish(batch, now=NOW)
            lake[str(first.row["identity"])] = str(first.row["sample_id"])
        return found

    assert inbox.put_samples([again], in_lake=in_lake, now=NOW) == [(first.row["sample_id"], False)]
    assert inbox.pending().rows == 0


# whether writes are taken


def test_a_locked_database_takes_no_writes(sqlite_registry: Registry) -> None:
    assert sqlite_registry.takes_writes(within_s=0.005)
    assert sqlite_registry.path is not None
    other = sqlite3.connect(sqlite_registry.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    began = datetime.now(UTC)
    assert not sqlite_registry.takes_writes(within_s=0.005)
    assert datetime.now(UTC) - began < timedelta(seconds=1)
    other.execute("ROLLBACK")
    assert sqlite_registry.takes_writes(within_s=0.005)
    other.close()


@pytest.mark.postgres
def test_postgres_takes_writes(postgres_url: str) -> None:
    registry = Registry(postgres_url)
    assert registry.takes_writes(within_s=0.005)
    registry.dispose()
