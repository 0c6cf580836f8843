"""Which unreviewed samples the judge is asked about: never more than could count, and never one that a person saw."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import START, World, ids

from loop_dagster.rules import minimums, scoring
from loop_dagster.rules.minimums import Minimum
from loop_dagster.rules.money import NANOCENTS, comparison_limit, sample_limit
from loop_dagster.rules.scoring import Asked, Facts, Hold, standing
from loop_dagster.rules.selection import Selection, select

SHORT = Minimum(basis="first_version", needed=1_100, have=750, short=350, picked=0)
READY = Minimum(basis="first_version", needed=1_100, have=1_100, short=0, picked=0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minimums of 10 and 4, so that a world of 40 samples can be short and can be enough."""
    monkeypatch.setattr(minimums, "TRAIN_MINIMUM", 10)
    monkeypatch.setattr(minimums, "HOLDOUT_MINIMUM", 4)


def worth(world: World, asked: Asked = Asked(), **options: Any) -> list[str]:  # noqa: B008 - frozen
    """The samples worth asking about in a world, as the store finds them."""
    now = world.select(**options)
    may = scoring.askable(now.rows, asked)
    samples, feedback, labels = world.frames()
    feedback = pl.concat([feedback.select(scoring.supposed(may, world.now).columns), scoring.supposed(may, world.now)])
    then = select(samples, feedback, labels, scope=world.scope, history=world.history, now=world.now, **options)
    known = scoring.known_to(now.rows, asked)
    return scoring.worth_asking(then.rows, may, samples, known=known)["sample_id"].to_list()


def test_the_newest_first_and_only_what_nobody_reviewed() -> None:
    world = World()
    first, second = world.add("a", verdict=None), world.add("b", verdict=None)
    for verdict in ("accepted", "rejected", "edited", "gold"):
        world.add(verdict, verdict=verdict)
    assert worth(world) == [second, first]
    world.say(second, "rejected", origin="import")
    assert worth(world) == [first]


def test_what_could_not_count_is_not_asked_about() -> None:
    world = World()
    fine = world.add("fine", verdict=None)
    world.add("waits for an answer", verdict=None, answer=None)
    world.add("of another pipeline", verdict=None, tags=["else"])
    gone = world.add("expired", verdict=None, days=1)
    pinned, long = world.add("pinned", verdict=None), world.add("long", verdict=None)
    good = world.add("the same", answer="yes")
    world.add("the same", answer="yes", verdict=None)  # a duplicate of a reviewed one
    world.now += timedelta(days=2)
    answer = pl.DataFrame([row for row in world.samples if row["sample_id"] == long])["answer_key"]
    unfit = pl.DataFrame({"sample_id": [long], "right_key": answer})
    assert worth(world, pinned=[pinned], unfit=unfit) == [fine]
    assert good not in worth(world)
    assert gone not in worth(world)


def test_a_twin_of_a_held_back_sample_is_not_asked_about() -> None:
    world = World()
    for number in range(1_100):
        world.add(f"question {number}")
    held = world.run()
    prompt = next(row for row in world.samples if row["sample_id"] in ids(held, "holdout"))
    twin = world.add("a twin", verdict=None, prompt_key=prompt["prompt_key"])
    fresh = world.add("fresh", verdict=None)
    assert worth(world) == [fresh]
    assert twin not in worth(world)


def test_one_judge_scores_a_sample_once_and_another_one_may_again() -> None:
    world = World()
    low, high = world.add("low", verdict=None), world.add("high", verdict=None)
    world.say(low, "scored", score=0.79)
    world.say(high, "scored", score=0.8)
    assert worth(world) == []
    assert worth(world, Asked(by_others=[low, high])) == [low]  # a pick stands
    assert worth(world, Asked(by_others=[low], resting=[low])) == []


def test_the_same_answer_under_another_id_is_not_asked_about_again() -> None:
    world = World()
    old = world.add("how", answer="so", verdict=None)
    world.say(old, "scored", score=0.2)
    world.add("how", answer="so", verdict=None)
    other = world.add("how", answer="another way", verdict=None)
    assert worth(world) == [other]


def test_an_older_copy_of_what_was_picked_is_not_asked_about_either() -> None:
    world = World()
    world.add("how", answer="so", verdict=None)
    newer = world.add("how", answer="so", verdict=None)
    world.say(newer, "scored", score=0.9)
    assert worth(world) == []


def test_a_sample_that_failed_rests() -> None:
    world = World()
    one, two = world.add("a", verdict=None), world.add("b", verdict=None)
    assert worth(world, Asked(resting=[two])) == [one]


def test_tries_end_and_holds_grow() -> None:
    assert scoring.next_try(1, START) == START + timedelta(hours=1)
    assert scoring.next_try(2, START) == START + timedelta(days=1)
    assert scoring.next_try(3, START) is None
    waits = [scoring.hold_until(failures, START) - START for failures in range(1, 8)]
    assert waits[0] == timedelta(minutes=5)
    assert waits == sorted(waits)
    assert waits[-1] == timedelta(hours=4)


@pytest.mark.parametrize(("score", "picked"), [(0.8, True), (0.7999999999, True), (0.799, False), (1.0, True)])
def test_a_pick_is_at_the_bar_after_rounding(score: float, picked: bool) -> None:
    assert scoring.picked(score) is picked


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        (Facts(enabled=False, paused=True), "off"),
        (Facts(enabled=True, paused=True), "waiting"),
        (Facts(enabled=True, complete=True), "waiting"),
        (Facts(enabled=True, active=3), "waiting"),
        (Facts(enabled=True, leaves_out=True), "idle"),
        (Facts(enabled=True, minimum=READY, cannot="It cannot."), "waiting"),
        (Facts(enabled=True, minimum=SHORT, cannot="It cannot."), "held"),
        (Facts(enabled=True, minimum=SHORT, left=0), "idle"),
        (Facts(enabled=True, minimum=SHORT, left=9), "scoring"),
        (Facts(enabled=True, minimum=SHORT, left=9, hold=Hold("SCORING_LIMIT", "Spent.")), "held"),
        (Facts(enabled=True, minimum=SHORT, left=9, hold=Hold("X", "Away.", START + timedelta(hours=1))), "held"),
        (Facts(enabled=True, minimum=SHORT, left=9, hold=Hold("X", "Away.", START)), "scoring"),
    ],
)
def test_the_first_thing_that_applies_is_said(facts: Facts, status: str) -> None:
    said = standing(facts, START)
    assert said.status == status
    assert said.message.endswith(".")
    assert (said.held_until is not None) == (facts.hold is not None and facts.hold.until == START + timedelta(hours=1))


def test_it_says_how_many_are_short() -> None:
    assert "the 350 that it still needs" in standing(Facts(enabled=True, minimum=SHORT, left=2), START).message


def test_the_limit_of_an_attempt_is_shared() -> None:
    assert sample_limit(2_500) == 1_000 * NANOCENTS
    assert sample_limit(1) == NANOCENTS * 40 // 100
    spent = 999 * NANOCENTS + 5
    assert comparison_limit(2_500, on_samples=spent) + spent == 2_500 * NANOCENTS
    assert comparison_limit(2_500, benchmarks=1, on_samples=spent) + spent == 1_500 * NANOCENTS
    assert comparison_limit(0, on_samples=spent) == 0


# whole runs


def filled(world: World, scores: dict[str, float], *, at_once: int = 1) -> tuple[Selection, list[list[str]]]:
    """Scores until there is enough or nothing is left; what was asked, in chunks none of which passes the need."""
    asked: list[list[str]] = []
    while not (now := world.select()).ready:
        chunk = worth(world)[: scoring.chunk_size(now.minimum.short, at_once=at_once)]
        if not chunk:
            break
        assert len(chunk) <= now.minimum.short
        asked.append(chunk)
        for sample_id in chunk:
            world.say(sample_id, "scored", score=scores[sample_id])
    return now, asked


SAMPLE = st.tuples(
    st.integers(0, 30),  # which conversation
    st.integers(0, 2),  # which answer
    st.sampled_from([None, None, None, "accepted", "edited", "rejected"]),
    st.sampled_from([0.0, 0.7, 0.8, 1.0]),
)


@settings(max_examples=20)
@given(rows=st.lists(SAMPLE, min_size=1, max_size=45), tried=st.booleans())
def test_whatever_there_is_it_asks_for_no_more_than_is_short_and_ends(
    rows: list[tuple[int, int, str | None, float]], tried: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minimums, "TRAIN_MINIMUM", 6)
        patch.setattr(minimums, "HOLDOUT_MINIMUM", 2)
        world = World()
        scores = {
            world.add(f"p{prompt}", answer=f"a{answer}", verdict=verdict): score
            for prompt, answer, verdict, score in rows
        }
        if tried and world.select().ready:
            world.run()
        reviewed = {row["sample_id"] for row in world.feedback}
        before = world.select()
        end, asked = filled(world, scores)
        flat = [one for chunk in asked for one in chunk]
        assert len(flat) == len(set(flat))
        assert not reviewed & set(flat)
        if before.ready:
            assert not asked
        if not end.ready:
            assert worth(world) == []


def test_it_stops_with_the_very_sample_that_was_missing(small: None) -> None:
    world = World()
    for number in range(9):
        world.add(f"reviewed {number}")
    unreviewed = [world.add(f"unreviewed {number}", verdict=None) for number in range(20)]
    end, asked = filled(world, dict.fromkeys(unreviewed, 0.8))
    assert end.ready
    assert [one for chunk in asked for one in chunk] == unreviewed[:-6:-1]  # 5 more, the newest
    assert end.minimum.picked == 5


def test_of_which_half_are_picked_twice_as_many_are_asked(small: None) -> None:
    world = World()
    unreviewed = [world.add(f"unreviewed {number}", verdict=None) for number in range(60)]
    scores = {one: 0.9 if place % 2 else 0.1 for place, one in enumerate(unreviewed)}
    end, asked = filled(world, scores)
    assert end.ready
    assert sum(map(len, asked)) in (27, 28)
    assert len(asked[0]) == 14
