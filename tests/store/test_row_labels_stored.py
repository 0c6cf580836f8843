"""Labels of single rows on their way into the lake: beside those of the call, redacted, once, at most 32 together."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from loop_dagster.store.import_result import ImportResult
from loop_dagster.store.importing import import_rows
from loop_dagster.store.lake import Lake
from loop_dagster.tables import LABELS, SAMPLES

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


def row(number: int, *labels: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": f"Question {number}", "completion": "Answer", "labels": list(labels)}


def bring(lake: Lake, rows: list[dict[str, Any]], **options: Any) -> ImportResult:
    return import_rows(lake, rows, source="app", now=NOW, import_id="i", **options)


def stored(lake: Lake) -> dict[int, set[tuple[str, str | None, str | None]]]:
    """(label, value, parent) by position of the sample."""
    samples = dict(lake.scan(SAMPLES).select("sample_id", "position").collect().iter_rows())
    found: dict[int, set[tuple[str, str | None, str | None]]] = {position: set() for position in samples.values()}
    for one in lake.scan(LABELS).collect().iter_rows(named=True):
        assert (one["removed"], one["created_at"]) == (False, NOW)
        found[samples[one["sample_id"]]].add((one["label"], one["value"], one["parent"]))
    return found


def test_each_row_has_its_own_beside_those_of_the_call(lake: Lake) -> None:
    rows = [
        row(0, {"label": "billing", "parent": "money"}, {"key": "who", "label": "mail me@example.com"}),
        row(1),
        row(2, {"label": "all"}, {"key": "team", "label": "south"}),
    ]
    result = bring(lake, rows, labels=["all"], attributes={"team": "north"})
    assert result.complete
    call = {("all", None, None), ("team", "north", None)}
    assert stored(lake) == {
        0: call | {("billing", None, "money"), ("who", "mail [redacted:email]", None)},
        1: call,
        2: call,  # where both name a word the call's counts
    }
    assert lake.scan(LABELS).collect().height == 8
    again = bring(lake, rows, labels=["all"], attributes={"team": "north"})
    assert again.as_dict()["already_present"] == 3
    assert lake.scan(LABELS).collect().height == 8


def test_a_tag_and_an_attribute_of_one_name_are_both_stored_and_repaired_apart(lake: Lake) -> None:
    rows = [row(0, {"label": "vip"}, {"key": "vip", "label": "gold"}), row(1, {"key": "all", "label": "x"})]
    assert bring(lake, rows, labels=["all"], attributes={"all": "y"}).complete
    want = {0: {("vip", None, None), ("vip", "gold", None)}, 1: set()}
    want = {position: mine | {("all", None, None), ("all", "y", None)} for position, mine in want.items()}
    assert stored(lake) == want
    lake.delete(LABELS, "label = 'vip' and value is null")
    lake.delete(LABELS, "label = 'all' and value is not null")
    bring(lake, rows, labels=["all"], attributes={"all": "y"})
    assert stored(lake) == want


def test_they_count_among_the_32_with_those_of_the_call(lake: Lake) -> None:
    many = [{"label": f"t{number}"} for number in range(31)]
    result = bring(lake, [row(0, *many), row(1, *many, {"label": "one-more"})], labels=["of-the-call"]).as_dict()
    assert (result["imported"], result["refused"]) == (1, 1)
    assert [note["code"] for note in result["refused_rows"]] == ["too_many_labels"]
    assert len(stored(lake)[0]) == 32


def test_what_a_retry_finds_missing_is_written(lake: Lake) -> None:
    rows = [row(0, {"label": "billing"})]
    bring(lake, rows)
    before = stored(lake)
    lake.delete(LABELS, "label = 'billing'")
    assert stored(lake) == {0: set()}
    bring(lake, rows)
    assert stored(lake) == before
