from __future__ import annotations

import random
from datetime import timedelta
from typing import Any, get_args

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import TAG, World, ids, key, reason

from loop_dagster.rules import selection as rule
from loop_dagster.rules.holdback import questions
from loop_dagster.rules.minimums import held_size
from loop_dagster.rules.selection import Reason, Selection, select
from loop_dagster.tables import SELECTIONS


def world_of(count: int, **settings: Any) -> World:
    world = World(settings=settings)
    for number in range(count):
        world.add(f"question {number}")
    return world


# what is selected


def test_tags_select_and_so_do_their_parents() -> None:
    world = World(settings={"tags": ["refunds"]})
    own, extra, other = world.add("a"), world.add("b", tags=["refunds"]), world.add("c", tags=["else"])
    child = world.add("d", tags=[])
    world.tag(child, "late-refunds", parent="refunds")
    attribute = world.add("e", tags=[])
    world.tag(attribute, TAG, value="yes")
    assert set(world.select().rows["sample_id"]) == {own, extra, child}
    assert other not in set(world.select().rows["sample_id"])


def test_the_newest_row_of_a_label_counts() -> None:
    world = World()
    off, on, moved, kept = (world.add(str(n), tags=[]) for n in range(4))
    world.tag(off, TAG)
    world.tag(off, TAG, removed=True)
    world.tag(on, TAG, removed=True)
    world.tag(on, TAG)
    world.tag(moved, "x", parent=TAG)
    world.tag(moved, "x", parent="elsewhere")
    world.tag(kept, "x", parent=TAG)
    assert set(world.select().rows["sample_id"]) == {on, kept}


def test_conditions_narrow_and_both_times_count() -> None:
    world = World()
    first, second, third = world.add("a"), world.add("b", origin="imported"), world.add("c", model="other")
    times = {row["sample_id"]: row["created_at"].isoformat() for row in world.samples}

    def left(**conditions: Any) -> set[str]:
        world.settings = {"conditions": conditions}
        return set(world.select().rows["sample_id"])

    assert left(origin="imported") == {second}
    assert left(model="other") == {third}
    assert left(**{"from": times[second]}) == {second, third}
    assert left(to=times[second]) == {first, second}


def test_feedback_conditions_read_the_deciding_verdict_of_a_person() -> None:
    world = World()
    good, edited, gold = world.add("a"), world.add("b", verdict="edited"), world.add("c", verdict="gold")
    wrong, picked, none = (
        world.add("d", verdict="rejected"),
        world.add("e", verdict="scored"),
        world.add("f", verdict=None),
    )

    def left(*words: str) -> set[str]:
        world.settings = {"conditions": {"feedback": list(words)}}
        return set(world.select().rows["sample_id"])

    assert left("good") == {good}
    assert left("corrected") == {edited, gold}
    assert left("good", "unreviewed") == {good, picked, none}
    assert left("good", "bad") == {good, wrong}
    assert left() == {good, edited, gold, wrong, picked, none}


def test_an_expired_sample_leaves_at_its_moment() -> None:
    world = World()
    sample = world.add("a", days=30)
    end = world.samples[0]["expires_at"]
    assert sample in set(world.select(now=end - timedelta(microseconds=1)).rows["sample_id"])
    assert world.select(now=end).selected == 0


# what each sample teaches


def test_what_each_verdict_teaches() -> None:
    world = World()
    good = world.add("a", answer="A")
    edited, gold = world.add("b", verdict=None), world.add("c", verdict=None, answer=None)
    world.say(edited, "edited", right="B")
    world.say(gold, "gold", right="C")
    picked = world.add("d", answer="D", verdict="scored")
    rows = {row["sample_id"]: row for row in world.select().rows.to_dicts()}
    assert [(rows[one]["teaches"], rows[one]["right_key"]) for one in (good, edited, gold, picked)] == [
        ("accepted", key("A")),
        ("edited", key("B")),
        ("gold", key("C")),
        ("scored", key("D")),
    ]


def test_why_samples_are_left_out() -> None:
    world = World()
    wrong, unanswered, silent = (
        world.add("a", verdict="rejected"),
        world.add("b", answer=None),
        world.add("c", verdict=None),
    )
    waiting = world.add("d", answer=None, verdict=None)
    below, pinned, long, odd = world.add("e", verdict=None), world.add("f"), world.add("g"), world.add("h")
    world.say(below, "scored", score=0.79)
    old, new = world.add("i", answer="X"), world.add("i", answer="X")
    unfit = pl.DataFrame(
        {
            "sample_id": [long, odd, wrong],
            "right_key": [key("an answer"), key("an answer"), key("an answer")],
            "why": ["too_long", "template_refuses", "too_long"],
        }
    )
    found = world.select(unfit=unfit, pinned=[pinned])
    assert [reason(found, one) for one in (wrong, unanswered, silent, waiting, below, pinned, long, odd, old, new)] == [
        "wrong",
        "no_answer",
        "no_feedback",
        "no_answer",
        "below_bar",
        "pinned",
        "too_long",
        "template_refuses",
        "held_new",
        "duplicate",
    ]
    assert found.usable == 1
    assert found.left_out["no_answer"] == 2


def test_too_long_is_about_one_right_answer() -> None:
    world = World()
    sample = world.add("a", answer="long")
    unfit = pl.DataFrame({"sample_id": [sample], "right_key": [key("long")]})
    assert reason(world.select(unfit=unfit), sample) == "too_long"
    world.say(sample, "edited", right="short")
    assert reason(world.select(unfit=unfit), sample) == "held_new"


def test_a_duplicate_has_the_same_prompt_to_the_letter_and_the_same_right_answer() -> None:
    world = World()
    first = world.add("q", exact="Q?", answer="A")
    twin = world.add("q", exact="q", answer="A")
    other_answer = world.add("q", exact="Q?", answer="B")
    duplicate = world.add("q", exact="Q?", answer="else", verdict=None)
    world.say(duplicate, "edited", right="A")
    found = world.select()
    assert reason(found, duplicate) == "duplicate"
    assert {reason(found, one) for one in (first, twin, other_answer)} == {"held_new"}


def test_the_oldest_duplicate_stays_unless_one_is_in_use() -> None:
    world = world_of(150)
    old = world.add("twice", verdict=None)
    new = world.add("twice")
    first = world.run()
    used = reason(first, new)
    assert used in ("held_new", "new")
    world.say(old, "accepted")
    second = world.select()
    assert reason(second, old) == "duplicate"
    assert reason(second, new) == {"held_new": "held_before", "new": "again"}[used]


def test_the_longest_that_a_row_can_be_counts_answer_and_correction() -> None:
    world = World()
    good, corrected = world.add("a"), world.add("b", verdict=None)
    world.say(corrected, "edited", right="12345")
    samples, feedback, labels = (frame.lazy() for frame in world.frames())
    rows = rule.selected(samples, feedback, labels, scope=world.scope, now=world.now)
    assert dict(rows.select("sample_id", "longest").iter_rows()) == {good: 10, corrected: 15}
    light = rule.selected(samples.drop("bytes"), feedback.drop("right_bytes"), labels, scope=world.scope, now=world.now)
    assert light.equals(rows.drop("longest"))


# both sides


def test_first_minimum_to_the_sample() -> None:
    world = world_of(1_099)
    short = world.select()
    assert (short.ready, short.minimum.needed, short.minimum.have, short.minimum.short) == (False, 1_100, 1_099, 1)
    world.add("one more")
    ready = world.select()
    assert (ready.ready, ready.usable, ready.held, ready.train, ready.new) == (True, 1_100, 100, 1_000, 1_000)
    assert world.run().rows.filter(pl.col("role") == "check").height == 50


def test_next_minimum_counts_new_pairs_that_the_hold_back_leaves() -> None:
    world = world_of(2_000)
    world.run()
    for number in range(1_009):
        world.add(f"later {number}")
    short = world.select()
    # 3,009 usable hold back 151, so 51 of the 1,009 go there.
    assert (short.held, short.held_new, short.new, short.ready) == (151, 51, 958, False)
    assert (short.minimum.basis, short.minimum.needed, short.minimum.short) == ("new_rows", 1_000, 44)
    for number in range(43):
        world.add(f"last {number}")
    assert world.select().minimum.short == 1
    world.add("the last")
    ready = world.select()
    assert (ready.ready, ready.new, ready.held) == (True, 1_000, 153)
    assert ready.train == ready.new + 1_900


def test_a_correction_of_a_trained_sample_is_new_and_a_wrong_one_is_gone() -> None:
    world = world_of(300)
    first = world.run()
    corrected, wrong = sorted(ids(first, "train"))[:2]
    world.say(corrected, "edited", right="much better")
    world.say(wrong, "rejected")
    second = world.select()
    assert (second.new, reason(second, corrected), reason(second, wrong)) == (1, "new", "wrong")


def test_an_attempt_without_an_adapter_counts_for_nothing_but_the_hold_back() -> None:
    world = world_of(1_100)
    first = world.run(kept_adapter=False)
    second = world.select()
    assert second.minimum.basis == "first_version"
    assert ids(second, "holdout") == ids(first, "holdout")
    assert second.new == 1_000


def test_more_is_needed_when_earlier_attempts_hold_back_more() -> None:
    world = world_of(1_250, holdout={"percent": 20})
    assert world.run(kept_adapter=False).held == 250
    world.settings = {}
    lowered = world.select()
    assert (lowered.held, lowered.held_new, lowered.minimum.needed, lowered.ready) == (250, 0, 1_250, True)


def test_a_raised_share_takes_only_what_no_attempt_trained_on() -> None:
    world = world_of(1_200)
    trained = ids(world.run(), "train", "check")
    world.settings = {"holdout": {"percent": 20}}
    assert world.select().held_new == 0
    for number in range(100):
        world.add(f"later {number}")
    raised = world.select()
    assert raised.held_new == 100, "new ones fill the held-back set first"
    assert not ids(raised, "holdout") & trained
    # 60 are still missing of 260; of x arrivals it takes those and a fifth of x.
    assert raised.minimum.short == 1_325


def test_reviewed_samples_are_held_back_before_picked_ones() -> None:
    world = World()
    picked = {world.add(f"picked {number}", verdict="scored") for number in range(500)}
    reviewed = {world.add(f"reviewed {number}") for number in range(60)}
    held = ids(world.select(), "holdout")
    assert reviewed <= held
    assert len(held & picked) == 40
    more = {world.add(f"reviewed more {number}") for number in range(80)}
    assert ids(world.select(), "holdout") <= reviewed | more


def test_twins_of_held_back_samples_are_left_out_and_never_count() -> None:
    world = world_of(1_100)
    first = world.run()
    held = sorted(ids(first, "holdout"))[0]
    prompt = f"question {int(held[1:])}"
    twin = world.add(prompt, exact="the same in other letters", answer="another answer")
    second = world.select()
    # Not even once the held-back sample itself is out of use.
    world.say(held, "rejected")
    third = world.select()
    assert reason(second, twin) == "twin_of_held"
    assert (second.new, second.usable) == (0, 1_101)
    assert reason(third, held) == "wrong"
    assert twin not in ids(third, "train", "check")


def test_a_twin_of_a_trained_sample_is_trained_and_never_held_back() -> None:
    world = world_of(1_100)
    trained = sorted(ids(world.run(), "train"))[0]
    prompt = f"question {int(trained[1:])}"
    twin = world.add(prompt, exact="the same in other letters", answer="another answer")
    world.settings = {"holdout": {"percent": 20}}
    assert reason(world.select(), twin) == "new"


def test_the_held_back_set_is_filled_again_when_some_of_it_is_out_of_use() -> None:
    world = world_of(1_100)
    first = world.run()
    out = sorted(ids(first, "holdout"))[:10]
    for sample in out:
        world.say(sample, "rejected")
    for number in range(20):
        world.add(f"later {number}")
    second = world.run()
    assert (second.held, second.held_new) == (100, 10)
    for sample in out:
        world.say(sample, "accepted")
    third = world.select()
    assert (third.held, third.held_new) == (110, 0), "back in use, and still held back"


def test_a_fresh_line_trains_on_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "MOST_TRAIN_ROWS", 300)
    world = world_of(500)
    found = world.select()
    oldest = found.rows.filter(pl.col("role") != "holdout")["sample_id"].sort()[:100]
    assert found.train == 300
    assert set(oldest) == set(found.rows.filter(pl.col("reason") == "beyond_newest")["sample_id"])
    assert found.left_out == {"beyond_newest": 100}
    assert found.rows["is_new"].to_list().count(True) == 300
    assert found.rows.null_count().select("role", "reason", "is_new", "reviewed").sum_horizontal().item() == 0


def asked_of(selection: Selection, attempt_no: int) -> pl.DataFrame:
    held = selection.rows.filter(pl.col("role") == "holdout")
    return questions(held.with_columns(pl.col("held_by").fill_null(attempt_no)))


def test_the_seeded_order_decides_and_not_the_order_of_arrival() -> None:
    world = world_of(1_100)
    rows = world.select().rows
    held = rows.filter(pl.col("role") == "holdout")
    assert held["rank"].max() < rows.filter(pl.col("role") != "holdout")["rank"].min()  # type: ignore[operator]
    world.seed = 8
    assert ids(world.select(), "holdout") != set(held["sample_id"])


def test_questions_are_those_held_back_longest_at_most_1500() -> None:
    world = world_of(8_000, holdout={"percent": 15})
    first = world.run()
    for number in range(8_000):
        world.add(f"later {number}")
    second = world.run()
    asked = asked_of(second, 2)
    assert (second.held, asked.height) == (2_400, 1_500)
    assert asked["ordinal"].to_list() == list(range(1_500))
    assert set(asked.filter(pl.col("held_by") == 1)["sample_id"]) == ids(first, "holdout")
    later = asked.filter(pl.col("held_by") == 2)
    left = second.rows.filter(
        (pl.col("reason") == "held_new") & ~pl.col("sample_id").is_in(later["sample_id"].implode())
    )
    assert later["rank"].max() < left["rank"].min()  # type: ignore[operator]
    assert asked_of(first, 1).height == 1_200


def test_the_rows_are_what_the_table_declares() -> None:
    world = world_of(130)
    world.add("wrong", verdict="rejected")
    rows = world.select().rows
    declared = SELECTIONS["role"].words
    assert declared is not None
    assert set(rows["role"]) <= set(declared)
    assert set(rows["reason"]) <= set(get_args(Reason))
    names = [name for name in SELECTIONS.schema if name not in ("attempt", "pipeline_id", "attempt_no")]
    assert {name: rows.schema[name] for name in names} == {name: SELECTIONS.schema[name] for name in names}


def test_nothing_at_all() -> None:
    found = World().select()
    assert (found.selected, found.ready, found.minimum.short) == (0, False, 1_100)


# properties


VERDICTS = ["accepted", "rejected", "edited", "gold", "scored", None]


def grow(world: World, rng: random.Random, count: int) -> None:
    for _ in range(count):
        prompt = f"p{rng.randrange(400)}"
        world.add(
            prompt,
            exact=f"{prompt}{rng.choice(['', '!', '?'])}",
            answer=rng.choice(["a", "b", "c", None]),
            verdict=rng.choice(VERDICTS),
            days=rng.choice([1, 2, 365]),
        )


def change(world: World, rng: random.Random, count: int) -> None:
    for row in rng.sample(world.samples, min(count, len(world.samples))):
        if rng.random() < 0.7:
            world.say(row["sample_id"], rng.choice(VERDICTS[:5]), right=rng.choice("xyz"), score=rng.random())
        else:
            world.tag(row["sample_id"], TAG, removed=rng.random() < 0.5)
    world.now += timedelta(hours=rng.randrange(20))


def check_counts(found: Selection, percent: int) -> None:
    roles = dict(found.rows.group_by("role").len().iter_rows())
    assert found.selected == found.rows.height == found.rows["sample_id"].n_unique()
    assert found.held == roles.get("holdout", 0)
    assert found.train == roles.get("train", 0) + roles.get("check", 0)
    assert sum(found.left_out.values()) == roles.get("left_out", 0)
    assert found.selected == found.held + found.train + sum(found.left_out.values())
    twins = found.left_out.get("twin_of_held", 0) + found.left_out.get("beyond_newest", 0)
    assert found.usable == found.held + found.train + twins
    assert found.held_new <= max(0, held_size(percent, found.usable) - (found.held - found.held_new))
    assert found.new == found.rows["is_new"].sum()
    assert roles.get("check", 0) == (-(-found.train // 20) if found.train >= 20 else 0)


@settings(max_examples=25)
@given(st.integers(0, 10**9))
def test_a_pipeline_over_many_attempts(seed: int) -> None:
    rng = random.Random(seed)
    world = World(seed=rng.getrandbits(63))
    ever_held: set[str] = set()
    held_prompts: set[int] = set()
    trained: set[str] = set()
    for _ in range(5):
        grow(world, rng, rng.randrange(50, 400))
        change(world, rng, rng.randrange(60))
        percent = rng.randrange(5, 21)
        world.settings = {"holdout": {"percent": percent}}
        found = world.run(kept_adapter=rng.random() < 0.7)
        check_counts(found, percent)
        held, trains = (
            found.rows.filter(pl.col("role") == "holdout"),
            found.rows.filter(pl.col("right_key").is_not_null()),
        )
        trains = trains.filter(pl.col("role").is_in(["train", "check"]))
        assert not set(held["prompt_key"]) & set(trains["prompt_key"]), "no prompt on both sides"
        new = set(held.filter(pl.col("reason") == "held_new")["sample_id"])
        assert not new & trained, "nothing held back was ever trained on"
        assert set(held["sample_id"]) - new <= ever_held
        assert not ever_held & set(trains["sample_id"]), "held back once, never trained on"
        assert not held_prompts & set(trains["prompt_key"])
        usable_before = set(found.rows.filter(pl.col("role") != "left_out")["sample_id"])
        assert ever_held & usable_before <= set(held["sample_id"]), "sticky"
        ever_held |= new
        held_prompts |= set(held["prompt_key"])
        if world.trained and world.trained[-1]["attempt_no"].first() == world.attempts:
            trained |= set(trains["sample_id"])


@settings(max_examples=15)
@given(st.integers(0, 10**9))
def test_the_order_of_rows_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    world = World()
    grow(world, rng, 250)
    world.run()
    grow(world, rng, 150)
    change(world, rng, 40)
    expected = world.select()
    shuffled = [frame.sample(fraction=1.0, shuffle=True, seed=rng.randrange(1_000)) for frame in world.frames()]
    history = world.history
    mixed = select(
        shuffled[0].lazy(),
        shuffled[1].lazy(),
        shuffled[2].lazy(),
        scope=world.scope,
        history=rule.History(
            held=history.held.sample(fraction=1.0, shuffle=True, seed=3),
            trained_prompts=history.trained_prompts.shuffle(seed=4),
            last_trained=history.last_trained,
            last_pairs=history.last_pairs.sample(fraction=1.0, shuffle=True, seed=5),
        ),
        now=world.now,
    )
    assert mixed.rows.sort("sample_id").equals(expected.rows.sort("sample_id"))
    assert mixed.minimum == expected.minimum
