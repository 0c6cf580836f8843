"""An export in windows and parts: the same lines whatever their size, in order, without what goes meanwhile."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from loop_dagster.errors import LakeUnreadable
from loop_dagster.rules.conditions import DatasetConditions
from loop_dagster.settings import Settings
from loop_dagster.store.exporting import exported, line
from loop_dagster.store.importing import import_rows
from loop_dagster.store.open import Store, open_store
from loop_dagster.tables import SAMPLES

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
ROWS = 60


@pytest.fixture
def store(home: Path) -> Store:
    """Sixty samples; those of later calls are older, and every third is tagged and corrected."""
    store = open_store(Settings(home=home))
    for call in range(3):
        rows: list[dict[str, Any]] = [
            {"prompt": f"Question {call} {number}", "completion": "Answer"} for number in range(ROWS // 3)
        ]
        for row in rows[::3]:
            row |= {"correction": f"Better than {row['prompt']}", "labels": [{"label": "third"}]}
        at = NOW - timedelta(hours=call)
        import_rows(store.lake, rows, source="app", now=at, model=f"m{call}", import_id=f"i{call}")
    return store


def lines(store: Store, conditions: DatasetConditions, **options: Any) -> list[dict[str, Any]]:
    blocks = list(exported(store, conditions, now=NOW + timedelta(hours=1), **options))
    assert all(block.endswith(b"\n") for block in blocks if block)
    return [json.loads(one) for one in b"".join(blocks).splitlines()]


EVERYTHING = DatasetConditions()
BETTER = '{"content":"B","role":"assistant"}'
CALLING = '{"content":null,"role":"assistant","tool_calls":[1.50]}'


@pytest.mark.parametrize(("window", "part"), [(1, 1), (7, 3), (7, 100), (60, 7), (10_000, 2_000)])
@pytest.mark.parametrize(
    ("conditions", "count"),
    [
        (EVERYTHING, 60),
        (DatasetConditions(tags=("third",)), 21),
        (DatasetConditions(feedback=("unreviewed",), model="m1"), 13),
        (DatasetConditions(model="nobody"), 0),
    ],
)
def test_whatever_the_parts_the_same_lines(
    store: Store, window: int, part: int, conditions: DatasetConditions, count: int
) -> None:
    whole = lines(store, conditions)
    assert len(whole) == count
    found = lines(store, conditions, window=window, part=part)
    assert found == whole
    for limit in (1, 8, 60, 100):
        assert lines(store, conditions, window=window, part=part, limit=limit) == whole[:limit]


def test_the_oldest_come_first_whenever_they_were_brought(store: Store) -> None:
    calls = [int(one["messages"][0]["content"].split()[1]) for one in lines(store, EVERYTHING)]
    assert calls == [2] * 20 + [1] * 20 + [0] * 20


def test_one_that_is_deleted_meanwhile_is_left_out(store: Store) -> None:
    blocks = exported(store, EVERYTHING, now=NOW, window=10, part=5)
    first = next(blocks)
    gone = store.lake.scan(SAMPLES).filter(created_at=NOW).select("sample_id").collect()["sample_id"].to_list()
    store.inbox.add_tombstones(gone[:3])
    assert first.count(b"\n") + sum(block.count(b"\n") for block in blocks) == 57


def test_an_expired_one_is_in_none(store: Store) -> None:
    assert list(exported(store, EVERYTHING, now=NOW + timedelta(days=366))) == [b""]


def test_what_cannot_be_read_is_said_before_the_file_begins(store: Store) -> None:
    log = next(Path(store.lake.path(SAMPLES)).joinpath("_delta_log").glob("*0.json"))
    log.write_text("{")
    with pytest.raises(LakeUnreadable):
        exported(open_store(store.settings), EVERYTHING, now=NOW)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"teaches": "scored", "reviewed": False}, {}),
        ({"teaches": "accepted", "reviewed": True}, {"label": True}),
        ({"teaches": "rejected", "reviewed": True}, {"label": False}),
        ({"teaches": "edited", "reviewed": True, "right_answer": BETTER}, {"correction": "B"}),
        (
            {"teaches": "gold", "reviewed": True, "right_answer": CALLING},
            {"ground_truth": {"content": None, "role": "assistant", "tool_calls": [1.5]}},
        ),
        ({"tools": '[{"maximum":1.10}]'}, {"tools": [{"maximum": 1.1}]}),
    ],
)  # fmt: skip
def test_a_line_says_the_verdict_in_the_words_of_an_import(row: dict[str, Any], expected: dict[str, Any]) -> None:
    stored = {
        "messages": '[{"content":"Q","role":"user"}]',
        "answer": '{"content":"A","role":"assistant"}',
        "labels": {},
        **dict.fromkeys(("tools", "teaches", "reviewed", "right_answer")),
    }
    made = line({**stored, **row})
    turns = [{"content": "Q", "role": "user"}, {"content": "A", "role": "assistant"}]
    assert json.loads(made) == {"messages": turns, **expected}
    assert line({**stored, "answer": None, "teaches": "accepted", "reviewed": True}) == (
        b'{"prompt":[{"content":"Q","role":"user"}]}\n'
    )
    if row.get("tools"):
        assert b"1.10" in made
