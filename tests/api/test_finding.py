"""Lists of samples against a plain reading of the same rows, one after the other: every filter, every page."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uuid_utils import uuid7

from loop_dagster.api.finding import Filters, find
from loop_dagster.settings import Settings
from loop_dagster.store.open import Store, open_store
from loop_dagster.tables import FEEDBACK, LABELS, SAMPLES

NOW = datetime(2026, 6, 1, tzinfo=UTC)
#: Few moments for many rows, so that most of them share one with others.
MOMENTS = [NOW - timedelta(hours=hours) for hours in (1, 2, 3, 50)]
SOURCES, MODELS, TAGS, PARENTS = ["shop", "billing"], ["small", "large", None], ["vip", "refund", "de"], ["team", None]
WORDS = ["order", "Refund", "café", "role", "99"]
GIVEN = ["accepted", "rejected", "edited", "gold"]


@dataclass
class World:
    """An installation with samples in several files, in the inbox and in both, and the same rows as lists."""

    store: Store
    samples: list[dict[str, Any]]
    feedback: list[dict[str, Any]]
    labels: list[dict[str, Any]]


def sample(dice: random.Random, number: int) -> dict[str, Any]:
    said = " ".join(dice.choices(WORDS, k=2))
    moment = dice.choice(MOMENTS)
    return {
        "sample_id": str(uuid7()),
        "source": dice.choice(SOURCES),
        "origin": dice.choice(["captured", "imported"]),
        "identity": f"{number:032x}",
        "import_id": None,
        "position": None,
        "conversation_id": dice.choice(["c1", "c2", None]),
        "model": dice.choice(MODELS),
        "messages": f'[{{"content":"{said}","role":"user"}}]',
        "answer": dice.choice(['{"content":"Order it.","role":"assistant"}', None]),
        "tools": None,
        "text_key": number,
        "prompt_key": number,
        "answer_key": 1,
        "bytes": 80,
        "flag": None,
        "created_at": moment,
        "expires_at": dice.choice([*[moment + timedelta(days=30)] * 5, NOW, NOW - timedelta(hours=1)]),
    }


def feedback(dice: random.Random, sample_id: str) -> dict[str, Any]:
    judged = dice.random() < 0.4
    verdict = "scored" if judged else dice.choice(GIVEN)
    corrected = verdict in ("edited", "gold")
    return {
        "feedback_id": str(uuid7()),
        "sample_id": sample_id,
        "verdict": verdict,
        "origin": "judge" if judged else dice.choice(["here", "import"]),
        "right_answer": '{"content":"so","role":"assistant"}' if corrected else None,
        "right_key": 5 if corrected else None,
        "right_bytes": 35 if corrected else None,
        "score": dice.choice([0.2, 0.8, 0.7999999999, 1.0]) if judged else None,
        "reason": None,
        "created_at": dice.choice(MOMENTS),
    }


def label(dice: random.Random, sample_id: str) -> dict[str, Any]:
    attribute = dice.random() < 0.4
    return {
        "label_id": str(uuid7()),
        "sample_id": sample_id,
        "label": dice.choice(TAGS),
        "value": dice.choice(["a", "b"]) if attribute else None,
        "parent": None if attribute else dice.choice(PARENTS),
        "removed": dice.random() < 0.3,
        "created_at": dice.choice(MOMENTS),
    }


def build(folder: Path, seed: int) -> World:
    dice, store = random.Random(seed), open_store(Settings(home=folder))
    world = World(store, [], [], [])
    for part in range(4):
        rows = [sample(dice, 100 * part + number) for number in range(20)]
        world.samples += rows
        known = [row["sample_id"] for row in world.samples]
        said = [feedback(dice, dice.choice(known)) for _ in range(20)]
        carried = [label(dice, dice.choice(known[::3])) for _ in range(60)]
        dice.shuffle(said)
        dice.shuffle(carried)
        world.feedback += said
        world.labels += carried
        if part < 2:
            for table, new in ((SAMPLES, rows), (FEEDBACK, said), (LABELS, carried)):
                store.lake.append(table, table.frame(new))
            continue
        for row in rows:
            store.inbox.put_sample(row)
        store.inbox.put(feedback=said, labels=carried)
        if part == 2:  # written to the lake, and not yet taken out of the inbox
            number = store.inbox.open_batch()
            assert number is not None
            frames = store.inbox.rows_of(number)
            for table in (SAMPLES, FEEDBACK, LABELS):
                store.lake.append(table, frames[table.name], transaction=("inbox", number))
    gone = {row["sample_id"] for row in dice.sample(world.samples, 6)}
    store.inbox.add_tombstones(gone)
    for name in ("samples", "feedback", "labels"):
        setattr(world, name, [row for row in getattr(world, name) if row["sample_id"] not in gone])
    return world


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[World]]:
    made = [build(tmp_path_factory.mktemp("world"), seed) for seed in range(2)]
    yield made
    for world in made:
        world.store.registry.dispose()


def decided(world: World, sample_id: str) -> tuple[str | None, float | None]:
    """The word of the person's verdict that decides, and the judge's score where none does."""
    mine = [row for row in world.feedback if row["sample_id"] == sample_id]
    for origin in ("here", "import", "judge"):
        rows = [row for row in mine if row["origin"] == origin]
        if rows:
            newest = max(rows, key=lambda row: (row["created_at"], row["feedback_id"]))
            words = {"accepted": "good", "rejected": "bad", "edited": "corrected", "gold": "corrected"}
            return words.get(newest["verdict"]), newest["score"]
    return None, None


def carries(world: World, sample_id: str) -> dict[tuple[str, bool], dict[str, Any]]:
    mine = [row for row in world.labels if row["sample_id"] == sample_id]
    mine.sort(key=lambda row: (row["created_at"], row["label_id"]))
    newest = {(row["label"], row["value"] is not None): row for row in mine}
    return {name: row for name, row in newest.items() if not row["removed"]}


def meets(world: World, row: dict[str, Any], filters: Filters) -> bool:
    word, score = decided(world, row["sample_id"])
    carried = carries(world, row["sample_id"])
    picked = score is not None and round(score, 9) >= 0.8
    judged = {"picked": picked, "below_bar": score is not None and not picked, "unscored": score is None}
    tags = {name for name, is_attribute in carried if not is_attribute}
    tags |= {one["parent"] for (_name, is_attribute), one in carried.items() if not is_attribute and one["parent"]}
    text = (row["messages"] + (row["answer"] or "")).lower().replace('"role"', "")
    return all(
        (
            filters.source in (None, row["source"]),
            filters.conversation_id in (None, row["conversation_id"]),
            filters.model in (None, row["model"]),
            filters.origin in (None, row["origin"]),
            filters.since is None or row["created_at"] >= filters.since,
            filters.until is None or row["created_at"] <= filters.until,
            not filters.signalled or word is not None,
            not filters.unsignalled or word is None,
            filters.signal in (None, word),
            filters.judge is None or (word is None and judged[filters.judge]),
            filters.label is None or filters.label.strip().lower() in tags,
            all((key, True) in carried and carried[key, True]["value"] == value for key, value in filters.attributes),
            not filters.unlabelled or not carried,
            filters.text is None or filters.text.lower() in text,
        )
    )


def expected(world: World, filters: Filters) -> list[str]:
    rows = [row for row in world.samples if row["expires_at"] > NOW and meets(world, row, filters)]
    return [row["sample_id"] for row in sorted(rows, key=lambda row: (row["created_at"], row["sample_id"]))][::-1]


def sometimes(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), st.none(), st.none(), values)


#: What a plain route lets through: one of signalled and unsignalled or none, and so on; all of it adds up.
some_filters = st.builds(
    Filters,
    source=sometimes(st.sampled_from(SOURCES)),
    conversation_id=sometimes(st.sampled_from(["c1", "c2", "c3"])),
    since=sometimes(st.sampled_from(MOMENTS)),
    until=sometimes(st.sampled_from(MOMENTS)),
    signalled=st.sampled_from([False, False, True]),
    unsignalled=st.sampled_from([False, False, True]),
    signal=sometimes(st.sampled_from(["good", "bad", "corrected"])),
    model=sometimes(st.sampled_from(["small", "large"])),
    origin=sometimes(st.sampled_from(["captured", "imported"])),
    label=sometimes(st.sampled_from([*TAGS, "team", " VIP "])),
    attributes=st.sampled_from([(), (), (("vip", "a"),), (("vip", "a"), ("de", "b"))]),
    unlabelled=st.sampled_from([False, False, False, True]),
    judge=sometimes(st.sampled_from(["picked", "below_bar", "unscored"])),
    text=sometimes(st.sampled_from(["ORDER", "refund", "fé", "role", "99 ", "er it"])),
)


@settings(max_examples=60, deadline=None)
@given(filters=some_filters, seed=st.integers(0, 1), limit=st.integers(1, 30), offset=st.sampled_from([0, 0, 3, 1000]))
def test_a_page_is_what_a_plain_reading_gives(
    worlds: list[World], filters: Filters, seed: int, limit: int, offset: int
) -> None:
    world = worlds[seed]
    found, want = find(world.store, filters, NOW, limit=limit, offset=offset), expected(world, filters)
    assert found.total == len(want)
    assert [row["sample_id"] for row in found.rows] == want[offset : offset + limit]


@pytest.mark.parametrize(
    "filters",
    [
        Filters(),
        Filters(signalled=True),
        Filters(unsignalled=True),
        *(Filters(signal=word) for word in ("good", "bad", "corrected")),
        *(Filters(judge=word) for word in ("picked", "below_bar", "unscored")),
        *(Filters(label=tag) for tag in (*TAGS, "team")),
        Filters(attributes=(("vip", "a"),)),
        Filters(unlabelled=True),
        Filters(text="order"),
        Filters(text="role"),
    ],
)
def test_pages_put_together_are_the_whole_list_also_where_moments_are_the_same(
    worlds: list[World], filters: Filters
) -> None:
    world = worlds[0]
    want = expected(world, filters)
    assert want, "a filter that finds nothing here tests nothing"
    got: list[str] = []
    for offset in range(0, len(want) + 7, 7):
        got += [row["sample_id"] for row in find(world.store, filters, NOW, limit=7, offset=offset).rows]
    assert got == want


def test_rows_bring_their_feedback_and_labels_oldest_first(worlds: list[World]) -> None:
    world = worlds[1]
    for row in find(world.store, Filters(), NOW, limit=200, offset=0).rows:
        for name, rows, key in (("feedback", world.feedback, "feedback_id"), ("labels", world.labels, "label_id")):
            mine = [one for one in rows if one["sample_id"] == row["sample_id"]]
            assert row[name] == sorted(mine, key=lambda one: (one["created_at"], one[key]))
