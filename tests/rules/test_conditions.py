"""What conditions may say, how an edit changes them, and that frames read them as a person would."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import START, TAG, World, ids

from loop_dagster.errors import BadRequest
from loop_dagster.rules.conditions import FEEDBACK_WORDS, DatasetConditions, Narrowing
from loop_dagster.rules.matching import chosen, counts
from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.rules.selection import Scope

TAGS = ("a", "b", "c")
WORD = {"accepted": "good", "rejected": "bad", "edited": "corrected", "gold": "corrected"}

_moment = st.integers(0, 700).map(lambda minutes: (START + timedelta(minutes=minutes)).isoformat())
_narrowing = st.fixed_dictionaries(
    {},
    optional={
        "feedback": st.lists(st.sampled_from(FEEDBACK_WORDS), unique=True),
        "origin": st.sampled_from([None, "captured", "imported"]),
        "model": st.sampled_from([None, "m", "n"]),
        "from": st.none() | _moment,
        "to": st.none() | _moment,
    },
).filter(lambda given: not (given.get("from") and given.get("to") and given["from"] > given["to"]))
_conditions = st.builds(
    lambda narrowing, tags, match: DatasetConditions.from_json({**narrowing, "tags": tags, "match": match}),
    _narrowing,
    st.lists(st.sampled_from(TAGS), max_size=3),
    st.sampled_from(["any", "all"]),
)
_labelling = st.tuples(
    st.sampled_from(TAGS),
    st.sampled_from([None, "a", "group"]),
    st.sampled_from([None, None, None, "a value"]),
    st.booleans(),
)
_said = st.tuples(
    st.sampled_from(["accepted", "rejected", "edited", "gold", "scored"]), st.sampled_from(["here", "import"])
)
_sample = st.tuples(
    st.sampled_from(["captured", "imported"]),
    st.sampled_from(["m", "n", None]),
    st.sampled_from([1, 365]),
    st.lists(_labelling, max_size=4),
    st.lists(_said, max_size=3),
)


def _world(samples: list[Any]) -> World:
    world = World()
    for number, (origin, model, days, labelled, said) in enumerate(samples):
        sample = world.add(f"p{number}", verdict=None, tags=(), days=days, origin=origin, model=model)
        for label, parent, value, removed in labelled:
            world.tag(sample, label, parent=parent, value=value, removed=removed)
        for verdict, origin_ in said:
            world.say(sample, verdict, origin="judge" if verdict == "scored" else origin_)
    world.now += timedelta(days=2)
    return world


def _tags_of(world: World, sample_id: str) -> list[set[str]]:
    """Each tag of a sample now, with its parent."""
    mine = [row for row in world.labels if row["sample_id"] == sample_id and row["value"] is None]
    newest = {row["label"]: row for row in mine}
    return [{row["label"], row["parent"]} for row in newest.values() if not row["removed"]]


def _word_of(world: World, sample_id: str) -> str:
    said = [row for row in world.feedback if row["sample_id"] == sample_id]
    for origin in ("here", "import"):
        theirs = [row["verdict"] for row in said if row["origin"] == origin]
        if theirs:
            return WORD[theirs[-1]]
    return "unreviewed"


def _meets(world: World, sample: dict[str, Any], one: Narrowing) -> bool:
    return (
        (one.origin is None or sample["origin"] == one.origin)
        and (one.model is None or sample["model"] == one.model)
        and (one.from_ is None or sample["created_at"] >= one.from_)
        and (one.to is None or sample["created_at"] <= one.to)
        and (not one.feedback or _word_of(world, sample["sample_id"]) in one.feedback)
    )


def _in(world: World, sample: dict[str, Any], group: DatasetConditions) -> bool:
    carried = _tags_of(world, sample["sample_id"])
    has = [any(tag in names for names in carried) for tag in group.tags]
    by_tag = not has or (all(has) if group.match == "all" else any(has))
    return by_tag and _meets(world, sample, group)


@settings(max_examples=150, deadline=None)
@given(st.lists(_sample, max_size=6), st.lists(_conditions, max_size=3), _narrowing.map(Narrowing.model_validate))
def test_frames_choose_what_a_plain_reading_of_the_conditions_chooses(
    samples: list[Any], groups: list[DatasetConditions], narrow: Narrowing
) -> None:
    world = _world(samples)
    frames = [frame.lazy() for frame in world.frames()]
    rows = chosen(*frames, groups=groups, narrow=narrow, now=world.now)
    there = [row for row in world.samples if row["expires_at"] > world.now]
    expected = {
        row["sample_id"]
        for row in there
        if any(_in(world, row, group) for group in groups) and _meets(world, row, narrow)
    }
    assert sorted(rows["sample_id"]) == sorted(expected)
    assert counts(*frames, groups=groups, now=world.now) == [
        {
            word: sum(_in(world, row, group) and _word_of(world, row["sample_id"]) == word for row in there)
            for word in FEEDBACK_WORDS
        }
        for group in groups
    ]


def test_a_pipeline_takes_what_its_tags_or_its_datasets_select_narrowed_by_its_conditions() -> None:
    world = World()
    own = world.add("own")
    by_dataset = world.add("by dataset", tags=["other"])
    wrong_model = world.add("other model", tags=["other"], model="n")
    good_only = world.add("reviewed", tags=["third"])
    world.add("unreviewed", tags=["third"], verdict=None)
    world.add("of nobody", tags=[])
    scope = Scope(
        own_tag=TAG,
        seed=1,
        settings=PipelineSettings.from_json({"conditions": {"model": "m"}}),
        datasets=(
            DatasetConditions(tags=("other",)),
            DatasetConditions(tags=("third",), feedback=("good",)),
        ),
    )
    taken = world.select(scope=scope)
    assert set(taken.rows["sample_id"]) == {own, by_dataset, good_only}
    assert wrong_model not in ids(taken, "train", "check", "holdout", "left_out")


def test_a_dataset_without_tags_brings_every_sample() -> None:
    world = World()
    samples = {world.add(f"p{number}", tags=[]) for number in range(3)}
    assert world.select().selected == 0
    scope = Scope(own_tag=TAG, seed=1, settings=PipelineSettings(), datasets=(DatasetConditions(),))
    assert set(world.select(scope=scope).rows["sample_id"]) == samples


def test_an_edit_keeps_what_is_absent_and_null_clears() -> None:
    first = DatasetConditions.from_json(
        {"tags": ["A ", "b", "a"], "match": "all", "model": "m", "from": "2026-01-01T01:00:00+01:00"}
    )
    assert first.to_json() == {
        "feedback": [], "origin": None, "model": "m", "from": "2026-01-01T00:00:00Z", "to": None,
        "tags": ["a", "b"], "match": "all",
    }  # fmt: skip
    assert DatasetConditions.from_json(first.to_json()) == first
    second = first.merged({"model": None, "feedback": ["unreviewed", "good"]})
    assert (second.model, second.feedback, second.tags, second.match) == (
        None,
        ("good", "unreviewed"),
        ("a", "b"),
        "all",
    )
    assert second.merged({"tags": []}).match == "any"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"surprise": 1}, "surprise"),
        ({"tags": "a"}, "tags"),
        ({"match": "most"}, "match"),
        ({"feedback": ["fine"]}, "feedback"),
        ({"from": "2026-01-01T00:00:00"}, "zone"),
        ({"from": "9999-12-31T23:59:59.999999-01:00"}, "from"),
    ],
)
def test_what_cannot_be_a_condition_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        DatasetConditions.from_json(given)


def test_at_most_32_datasets_each_once() -> None:
    given = [f"ds_{number}" for number in range(32)]
    assert PipelineSettings.from_json({"datasets": [*given[:3], *given[:3]]}).datasets == tuple(given[:3])
    assert len(PipelineSettings.from_json({"datasets": given}).datasets) == 32
    with pytest.raises(BadRequest, match="datasets"):
        PipelineSettings.from_json({"datasets": [*given, "ds_33"]})


def test_counts_of_no_group_read_nothing() -> None:
    nothing = pl.LazyFrame()
    assert counts(nothing, nothing, nothing, groups=[], now=START) == []
