"""The same lake on an object store: a real S3 server on loopback, conditional puts and no lock table."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
import s3_server

from loop_dagster.store.identities import Identities
from loop_dagster.store.lake import Lake
from loop_dagster.tables import HOLDOUTS, LABELS, SAMPLES

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def row(name: str) -> dict[str, object]:
    return {
        "label_id": f"label-{name}",
        "sample_id": name,
        "label": "shop",
        "value": None,
        "parent": None,
        "removed": False,
        "created_at": NOW,
    }


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, str]]:
    with s3_server.running("lake") as options:
        yield options


def test_a_table_on_s3_does_what_a_folder_does(options: dict[str, str]) -> None:
    lake = Lake("s3://lake/first", "default", storage_options=options)
    assert lake.version(LABELS) is None
    assert lake.scan(LABELS).collect().is_empty()
    assert lake.append(LABELS, LABELS.frame([row("a")]), transaction=("drain", 1)) is not None
    assert lake.append(LABELS, LABELS.frame([row("a")]), transaction=("drain", 1)) is None
    lake.append(LABELS, LABELS.frame([row("b"), row("c")]), sync=True)
    assert sorted(lake.scan(LABELS).collect()["sample_id"]) == ["a", "b", "c"]
    assert lake.delete(LABELS, "sample_id = 'b'") == 1
    done = lake.maintain(LABELS)
    assert done is not None
    assert done.removed > 0
    assert lake.row_count(LABELS) == 2
    assert all(path.startswith("s3://lake/first/default/labels/") for path in lake.files(LABELS))
    attempt = "shop-00ff/0001"
    lake.replace_attempt(HOLDOUTS, attempt, HOLDOUTS.empty())
    assert lake.scan(HOLDOUTS).collect().is_empty()


def test_racing_writers_on_s3_lose_nothing(options: dict[str, str]) -> None:
    root = "s3://lake/second"
    faults: list[Exception] = []

    def write(who: str) -> None:
        lake = Lake(root, storage_options=options)
        try:
            for number in range(5):
                lake.append(LABELS, LABELS.frame([row(f"{who}{number}")]))
        except Exception as error:  # shown by the assertion below
            faults.append(error)

    threads = [threading.Thread(target=write, args=(who,)) for who in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    stored = sorted(Lake(root, storage_options=options).scan(LABELS).collect()["sample_id"])
    assert stored == sorted(f"{who}{number}" for who in "abcd" for number in range(5))


def test_readers_on_s3_see_each_commit_and_know_its_identities(options: dict[str, str]) -> None:
    lake, reader = (Lake("s3://lake/read", "default", storage_options=options) for _ in range(2))
    identities = Identities(reader)
    assert (reader.snapshot(SAMPLES), identities.find(["i1"])) == (None, {})
    plain: dict[str, object] = dict.fromkeys(SAMPLES.schema) | {
        "source": "shop",
        "origin": "captured",
        "messages": "[]",
        "text_key": 1,
        "prompt_key": 1,
        "bytes": 2,
        "created_at": NOW,
        "expires_at": NOW,
    }
    for number in (1, 2):
        lake.append(SAMPLES, SAMPLES.frame([plain | {"sample_id": f"s{number}", "identity": f"i{number}"}]))
        snapshot = reader.snapshot(SAMPLES)
        assert snapshot is not None and snapshot.rows == number
        assert identities.find(["i1", "i2"]) == {f"i{one}": f"s{one}" for one in range(1, number + 1)}
    lake.delete(SAMPLES, "sample_id = 's1'")
    lake.maintain(SAMPLES)
    assert identities.find(["i1", "i2", "i3"]) == {"i2": "s2"}
