"""Two registries on one lake: the second is refused before it writes; moves and copies are told apart."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from datetime import UTC, datetime
from pathlib import Path

import boto3
import polars as pl
import pytest
from moto.server import ThreadedMotoServer

from loop_dagster.errors import LakeOfAnother
from loop_dagster.settings import Settings
from loop_dagster.store.lake import Lake
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.owner import FILE, Owner, OwnerMark, registry_id
from loop_dagster.store.registry import Registry
from loop_dagster.tables import LABELS

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def row(name: str) -> pl.DataFrame:
    fields = {"label": "shop", "value": None, "parent": None, "removed": False, "created_at": NOW}
    return LABELS.frame([{"label_id": f"label-{name}", "sample_id": name, **fields}])


def installation(home: Path, lake: Path | None = None) -> Store:
    return open_store(Settings(home=home, lake_url=None if lake is None else str(lake)))


def close(store: Store) -> None:
    store.registry.dispose()


def mark(lake: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((lake / "default" / FILE).read_text())
    return found


def test_the_first_writer_marks_the_lake_and_reading_marks_nothing(tmp_path: Path) -> None:
    store = installation(tmp_path / "one")
    assert store.lake.row_count(LABELS) == 0
    assert not (tmp_path / "one" / "lake").exists()
    store.lake.append(LABELS, row("a"))
    found = mark(tmp_path / "one" / "lake")
    assert found["registry_id"] == registry_id(store.registry)
    assert found["registry"] == f"{socket.gethostname()}:{tmp_path / 'one' / 'registry.db'}"
    again = installation(tmp_path / "one")
    again.lake.append(LABELS, row("b"))
    assert mark(tmp_path / "one" / "lake") == found


def test_a_second_registry_is_refused_by_name_and_may_still_read(tmp_path: Path) -> None:
    one, two = installation(tmp_path / "one"), installation(tmp_path / "two", tmp_path / "one" / "lake")
    one.lake.append(LABELS, row("a"))
    for write in (
        lambda: two.lake.append(LABELS, row("b")),
        lambda: two.lake.delete(LABELS, "true"),
        lambda: two.lake.maintain(LABELS),
    ):
        with pytest.raises(LakeOfAnother) as refused:
            write()
        assert str(tmp_path / "one" / "registry.db") in refused.value.message
        assert str(tmp_path / "two" / "registry.db") in refused.value.message
    assert two.lake.row_count(LABELS) == one.lake.row_count(LABELS) == 1
    # What the message says to do when the other is gone for good.
    (tmp_path / "one" / "lake" / "default" / FILE).unlink()
    two.lake.append(LABELS, row("b"))
    with pytest.raises(LakeOfAnother):  # also in a process that has written here before
        one.lake.append(LABELS, row("c"))


def test_a_moved_home_goes_on(tmp_path: Path) -> None:
    store = installation(tmp_path / "one")
    store.lake.append(LABELS, row("a"))
    close(store)
    (tmp_path / "one").rename(tmp_path / "two")
    store = installation(tmp_path / "two")
    store.lake.append(LABELS, row("b"))
    assert mark(tmp_path / "two" / "lake")["home"].endswith("/two")


def test_a_whole_copy_has_a_lake_of_its_own(tmp_path: Path) -> None:
    store = installation(tmp_path / "one")
    store.lake.append(LABELS, row("a"))
    close(store)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    installation(tmp_path / "two").lake.append(LABELS, row("b"))
    installation(tmp_path / "one").lake.append(LABELS, row("c"))
    assert mark(tmp_path / "one" / "lake")["home"].endswith("/one")
    assert mark(tmp_path / "two" / "lake")["home"].endswith("/two")


def test_a_copied_lake_stays_its_copied_registrys(tmp_path: Path) -> None:
    store = installation(tmp_path / "one")
    store.lake.append(LABELS, row("a"))
    close(store)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    foreign = installation(tmp_path / "new", tmp_path / "two" / "lake")
    with pytest.raises(LakeOfAnother, match="/one"):
        foreign.lake.append(LABELS, row("b"))
    installation(tmp_path / "two").lake.append(LABELS, row("c"))
    with pytest.raises(LakeOfAnother, match="/two"):
        foreign.lake.append(LABELS, row("d"))


def test_a_copied_registry_on_the_same_lake_is_refused(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    store = installation(tmp_path / "one", lake)
    store.lake.append(LABELS, row("a"))
    close(store)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with pytest.raises(LakeOfAnother, match="/one"):
        installation(tmp_path / "two", lake).lake.append(LABELS, row("b"))
    shutil.rmtree(tmp_path / "one")  # so it was a move after all
    installation(tmp_path / "two", lake).lake.append(LABELS, row("b"))


def test_a_registry_made_anew_in_its_place_owns_the_lake(tmp_path: Path) -> None:
    store = installation(tmp_path / "one")
    store.lake.append(LABELS, row("a"))
    close(store)
    for file in (tmp_path / "one").glob("registry.db*"):
        file.unlink()
    installation(tmp_path / "one").lake.append(LABELS, row("b"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"registry_id": "x"}'])
def test_a_mark_that_is_none_is_written_anew(tmp_path: Path, text: str) -> None:
    store = installation(tmp_path / "one")
    store.lake.append(LABELS, row("a"))
    (tmp_path / "one" / "lake" / "default" / FILE).write_text(text)
    store.lake.append(LABELS, row("b"))
    assert mark(tmp_path / "one" / "lake")["registry_id"] == registry_id(store.registry)


def test_of_many_first_writers_with_registries_of_their_own_one_stays(tmp_path: Path) -> None:
    stores = [installation(tmp_path / f"home{number}", tmp_path / "lake") for number in range(6)]
    refused: list[LakeOfAnother] = []
    start = threading.Barrier(len(stores))

    def write(store: Store) -> None:
        start.wait()
        try:
            store.lake.append(LABELS, row(str(store.settings.root)))
        except LakeOfAnother as error:
            refused.append(error)

    threads = [threading.Thread(target=write, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == len(stores) - 1
    assert stores[0].lake.row_count(LABELS) == 1
    assert [path.name for path in (tmp_path / "lake" / "default").iterdir() if path.name.startswith(".")] == []


def test_the_mark_of_a_registry_is_made_once(registry: Registry) -> None:
    assert registry_id(registry, make=False) is None
    found = registry_id(registry)
    assert found == registry_id(registry) == registry_id(Registry(registry.url))
    assert registry_id(Registry(registry.url, "other")) != found


def test_an_object_store_carries_the_mark_too() -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s"}
    try:
        boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys).create_bucket(Bucket="owned")
        options = {
            "aws_endpoint_url": endpoint,
            "aws_region": "us-east-1",
            "aws_allow_http": "true",
            "aws_conditional_put": "etag",
            **keys,
        }

        def lake(number: int) -> Lake:
            owner = Owner(f"id{number}", f"host:/home{number}/registry.db", f"host:/home{number}")
            return Lake("s3://owned/lake", storage_options=options, owner=lambda: owner)

        lake(1).append(LABELS, row("a"))
        lake(1).append(LABELS, row("b"))
        found = OwnerMark("s3://owned/lake/default", options).read()
        assert found == Owner("id1", "host:/home1/registry.db", "host:/home1", "s3://owned/lake/default")
        with pytest.raises(LakeOfAnother, match=r"/home1.*/home2"):
            lake(2).append(LABELS, row("c"))
    finally:
        server.stop()
