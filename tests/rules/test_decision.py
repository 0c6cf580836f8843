from __future__ import annotations

import json
import random
import re
from typing import Any, get_args

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loop_dagster import report_words
from loop_dagster.report_words import warning_sentence
from loop_dagster.rules.decision import (
    Bar,
    Decision,
    decide,
    decimals_below,
    needed_change,
    swapped,
    too_few_left,
    winner,
)
from loop_dagster.rules.decision import Warning as WarningCode
from loop_dagster.rules.feedback import Agreement
from loop_dagster.tables import JUDGEMENTS, REPORTS


def judged(
    number: int,
    candidate: float | None = 0.9,
    incumbent: float | None = 0.5,
    *,
    orders: tuple[str, str] | None = None,
    failed: bool = False,
    unanswered: bool = False,
    rated: bool = True,
) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(JUDGEMENTS.schema)
    row |= {"attempt": "p/0001", "pipeline_id": "p", "attempt_no": 1, "sample_id": f"s{number:05d}"}
    if failed:
        return row | {"status": "failed", "error_code": "JUDGE_UNREADABLE", "unanswered": False}
    row |= {"status": "scored", "unanswered": unanswered, "incumbent_score": incumbent}
    ratings = json.dumps({"correctness": 5}) if rated else None
    if unanswered:
        return row | {"candidate_score": 0.0, "incumbent_ratings": ratings, "winner": "incumbent"}
    first, second = orders or ("candidate", "candidate")
    return row | {
        "candidate_score": candidate,
        "candidate_ratings": ratings,
        "incumbent_ratings": ratings,
        "candidate_first": first,
        "incumbent_first": second,
        "winner": winner(first, second),
    }


def frame(*rows: dict[str, Any]) -> pl.DataFrame:
    return JUDGEMENTS.frame(list(rows))


def pairs(wins: int, losses: int, ties: int = 0, **scores: Any) -> list[dict[str, Any]]:
    orders = [("candidate", "candidate")] * wins + [("incumbent", "incumbent")] * losses
    orders += [("candidate", "incumbent")] * ties
    return [judged(n, orders=both, **scores) for n, both in enumerate(orders)]


def bar(decision: Decision, key: str) -> Any:
    return next(one for one in decision.bars if one.key == key)


# bars


def test_bars_stand_in_their_order_and_all_of_them_make_it_better() -> None:
    found = decide(frame(*pairs(70, 20, 10)), gone=0)
    keys = [one.key for one in found.bars]
    assert keys == ["rows_scored", "failures", "rubric", "mean_change", "win_rate", "beyond_chance"]
    assert (found.verdict, found.missed_bar, found.tested) == ("better", None, True)
    assert (found.wins, found.losses, found.ties, found.win_rate) == (70, 20, 10, rounded_share(70, 90))


def rounded_share(part: int, whole: int) -> float:
    return round(part / whole, 9)


@pytest.mark.parametrize(
    ("scored", "failed", "gone", "met"),
    [
        (100, 0, 0, True),
        (99, 0, 0, False),
        (97, 3, 0, True),
        (96, 3, 0, False),
        (95, 2, 3, True),
        (94, 2, 3, False),
        (90, 10, 0, True),
        (90, 0, 40, True),
        (89, 0, 40, False),
        (89, 40, 0, False),
    ],
)
def test_rows_scored(scored: int, failed: int, gone: int, met: bool) -> None:
    rows = pairs(scored, 0) + [judged(1_000 + n, failed=True) for n in range(failed)]
    found = decide(frame(*rows), gone=gone)
    assert bar(found, "rows_scored").met is met
    assert bar(found, "rows_scored").needed == max(90, 100 - failed - gone)
    assert (found.verdict == "inconclusive") is not met


def test_never_under_90() -> None:
    assert too_few_left(89)
    assert not too_few_left(90)


def test_failures_may_be_half_of_what_was_scored() -> None:
    half = pairs(100, 0) + [judged(1_000 + n, failed=True) for n in range(50)]
    assert decide(frame(*half), gone=0).verdict == "better"
    more = decide(frame(*half, judged(2_000, failed=True)), gone=0)
    assert (more.verdict, more.missed_bar) == ("inconclusive", "failures")
    assert (bar(more, "failures").needed, bar(more, "failures").got) == (50.0, 51.0)


def test_something_must_be_rated_on_the_rubric() -> None:
    unrated = pairs(100, 0, rated=False)
    assert decide(frame(*unrated), gone=0).missed_bar == "rubric"
    assert decide(frame(*unrated, judged(500)), gone=0).verdict == "better"


def test_a_model_that_never_answers_is_not_better_rather_than_undecided() -> None:
    silent = [judged(n, incumbent=0.0, unanswered=True, rated=False) for n in range(100)]
    found = decide(frame(*silent), gone=0)
    assert (found.verdict, found.missed_bar) == ("not_better", "mean_change")
    assert (found.losses, found.win_rate, found.candidate_mean) == (100, 0.0, 0.0)


def test_an_unanswered_sample_is_a_loss_with_score_zero() -> None:
    found = decide(frame(*pairs(70, 0, 29), judged(900, incumbent=0.8, unanswered=True)), gone=0)
    assert (found.wins, found.losses, found.ties) == (70, 1, 29)
    assert found.candidate_mean == round(0.9 * 99 / 100, 9)


@pytest.mark.parametrize(
    ("incumbent", "error", "needed"),
    [
        (0.933, 0.005, 0.01675),
        (0.97, 0.001, 0.01),
        (0.80, 0.02, 0.05),
        (0.5, 0.001, 0.05),
        (0.99, 0.5, 0.05),
        (0.933, 0.02, 0.0329),
    ],
)
def test_needed_change(incumbent: float, error: float, needed: float) -> None:
    assert needed_change(incumbent, error) == pytest.approx(needed, abs=1e-12)


def test_the_mean_change_is_compared_after_rounding() -> None:
    # 0.3 - 0.25 is 0.04999999999999999 in floats.
    rows = pairs(100, 0, candidate=0.3, incumbent=0.25)
    assert 0.3 - 0.25 < 0.05
    assert bar(decide(frame(*rows), gone=0), "mean_change").met


@pytest.mark.parametrize(("wins", "losses", "met"), [(32, 18, True), (31, 19, False), (59, 41, True), (58, 42, False)])
def test_wins_beyond_chance(wins: int, losses: int, met: bool) -> None:
    found = decide(frame(*pairs(wins, losses, 100)), gone=0)
    assert bar(found, "beyond_chance").met is met
    assert bar(found, "win_rate").met
    assert found.missed_bar == (None if met else "beyond_chance")


def test_win_rate_of_55_percent() -> None:
    found = decide(frame(*pairs(550, 450)), gone=0)
    assert bar(found, "win_rate").met
    assert not bar(decide(frame(*pairs(549, 451)), gone=0), "win_rate").met


def test_nothing_decided_has_no_win_rate() -> None:
    found = decide(frame(*pairs(0, 0, 100)), gone=0)
    assert (found.win_rate, found.verdict, found.missed_bar) == (None, "not_better", "win_rate")


def test_a_judge_that_prefers_what_it_reads_first_decides_nothing() -> None:
    rows = [judged(n, orders=("candidate", "incumbent")) for n in range(100)]
    found = decide(frame(*rows), gone=0)
    assert (found.wins, found.losses, found.ties) == (0, 0, 100)


@pytest.mark.parametrize(
    ("orders", "who"),
    [
        (("candidate", "candidate"), "candidate"),
        (("incumbent", "incumbent"), "incumbent"),
        (("candidate", "incumbent"), "tie"),
        (("incumbent", "candidate"), "tie"),
        (("candidate", "tie"), "tie"),
        (("tie", "incumbent"), "tie"),
        (("tie", "tie"), "tie"),
    ],
)
def test_both_orders_must_agree(orders: tuple[str, str], who: str) -> None:
    assert winner(*orders) == who


def test_the_winner_is_derived_again_from_both_orders() -> None:
    forged = frame(*pairs(0, 100)).with_columns(pl.lit("candidate").alias("winner"))
    assert decide(forged, gone=0).losses == 100


def test_a_pass_is_0_70_after_rounding() -> None:
    rows = pairs(99, 0, candidate=(0.7 + 0.7 + 0.7) / 3, incumbent=0.699)
    found = decide(frame(*rows, judged(500, candidate=0.1, incumbent=0.7)), gone=0)
    assert (found.candidate_pass_rate, found.incumbent_pass_rate) == (0.99, 0.01)


def test_the_verdict_is_inconclusive_when_the_judge_could_not_go_on() -> None:
    found = decide(frame(*pairs(100, 0)), gone=0, ended_early="The judge refused the key.")
    assert found.verdict == "inconclusive"
    assert "The judge refused the key." in found.sentence


def test_nothing_scored_is_cannot_tell() -> None:
    found = decide(JUDGEMENTS.empty(), gone=100)
    assert (found.verdict, found.missed_bar, found.tested) == ("inconclusive", "rows_scored", False)
    assert (found.candidate_mean, found.mean_change, found.win_rate, found.candidate_pass_rate) == (None,) * 4


def test_a_scored_row_without_scores_is_refused() -> None:
    with pytest.raises(ValueError, match="s00007"):
        decide(frame(judged(7, candidate=None)), gone=0)


def test_sentences_and_rows() -> None:
    found = decide(frame(*pairs(31, 19, 50)), gone=0)
    assert found.sentence.startswith("Not better: Chance alone must win that often")
    row = found.as_row()
    assert set(row) <= set(REPORTS.schema)
    assert set(REPORTS.schema) - set(row) == {
        *("attempt", "pipeline_id", "attempt_no", "judge", "compared_with", "compared_with_version", "created_at")
    }
    summary = found.summary()
    assert summary["missed_bar"] == {key: value for key, value in found.bars[5].as_dict().items() if key != "met"}
    assert json.loads(json.dumps(summary)) == summary
    assert decide(frame(*pairs(90, 10)), gone=0).summary()["missed_bar"] is None


# warnings


def test_warnings_about_few_and_failed_samples() -> None:
    assert decide(frame(*pairs(100, 0)), gone=0).warnings == ()
    assert decide(frame(*pairs(99, 0)), gone=1).warnings == ("holdout_too_small",)
    tenth = pairs(108, 0) + [judged(1_000 + n, failed=True) for n in range(12)]
    assert decide(frame(*tenth), gone=0).warnings == ()
    assert decide(frame(*tenth, judged(2_000, failed=True)), gone=0).warnings == ("many_failures",)


def test_a_judge_that_disagrees_with_people_is_unreliable() -> None:
    rows = frame(*pairs(100, 0))
    assert decide(rows, gone=0, agreement=Agreement(13, 20)).warnings == ("judge_unreliable",)
    assert decide(rows, gone=0, agreement=Agreement(14, 20)).warnings == ()
    assert decide(rows, gone=0, agreement=Agreement(0, 19)).warnings == ()


@pytest.mark.parametrize(
    ("longer", "shorter", "warned"), [(31, 9, True), (30, 10, False), (39, 0, False), (60, 19, True)]
)
def test_a_judge_that_prefers_longer_answers_is_unreliable(longer: int, shorter: int, warned: bool) -> None:
    rows = pairs(longer, shorter, 100 - longer - shorter)
    answers = pl.DataFrame(
        [
            {"sample_id": row["sample_id"], "side": side, "answer": "x" * length}
            for row in rows
            for side, length in (("candidate", 9), ("incumbent", 5))
        ]
    )
    found = decide(frame(*rows), gone=0, answers=answers)
    assert ("judge_unreliable" in found.warnings) is warned
    swapped_sides = decide(
        swapped(frame(*rows)),
        gone=0,
        answers=answers.with_columns(pl.col("side").replace({"candidate": "incumbent", "incumbent": "candidate"})),
    )
    assert ("judge_unreliable" in swapped_sides.warnings) is warned


def test_warnings_of_the_caller_ride_along() -> None:
    found = decide(frame(*pairs(50, 0)), gone=50, also=["no_judge", "judge_labelled_training_rows"])
    assert found.warnings == ("holdout_too_small", "no_judge", "judge_labelled_training_rows")


@pytest.mark.parametrize(
    ("rows", "ended", "warned"),
    [
        ([], "The judge refused the key.", True),
        ([judged(n, failed=True) for n in range(3)], "The judge is gone.", True),
        ([judged(n, incumbent=0.0, unanswered=True, rated=False) for n in range(3)], "The judge is gone.", True),
        ([judged(1)], "The judge refused the key.", False),
        ([judged(n, failed=True) for n in range(3)], None, False),  # a judge that babbles is there
    ],
)
def test_no_judge_is_said_when_it_was_gone_before_it_rated_anything(
    rows: list[dict[str, Any]], ended: str | None, warned: bool
) -> None:
    judgements = frame(*rows) if rows else JUDGEMENTS.empty()
    assert ("no_judge" in decide(judgements, gone=0, ended_early=ended).warnings) is warned


def test_every_warning_has_a_sentence_for_people() -> None:
    for code in get_args(WarningCode):
        assert warning_sentence(code).endswith(".") and len(warning_sentence(code).split()) > 3


# not reached


def test_samples_not_reached_for_money_leave_the_verdict_to_the_bars_and_are_named() -> None:
    why = "Scoring an attempt may cost $25.00; $24.99 are spent."
    found = decide(frame(*pairs(110, 0)), gone=0, stopped=why, not_reached=390)
    assert (found.verdict, found.rows_failed, found.rows_gone, found.rows_not_reached) == ("better", 0, 0, 390)
    assert found.sentence.endswith(f"390 samples were not reached, neither failed nor gone. {why}")
    few = decide(frame(*pairs(99, 0)), gone=0, stopped=why, not_reached=401)
    assert (few.verdict, few.missed_bar) == ("inconclusive", "rows_scored")
    assert bar(few, "rows_scored").needed == 100  # only what failed or is gone lowers it
    assert few.sentence.startswith("Inconclusive: At least 100") and why in few.sentence
    assert few.summary()["rows_not_reached"] == 401 and few.summary()["stopped"] == why


# properties


def noisy(rng: random.Random, count: int, edge: float = 0.0) -> list[dict[str, Any]]:
    """Two models judged with noise; the candidate is `edge` better. A judge mostly prefers what it rates higher."""
    rows = []
    for number in range(count):
        level = rng.uniform(0.3, 0.95)
        mine, theirs = (min(1.0, max(0.0, level + rng.gauss(edge * sign, 0.1))) for sign in (1, 0))
        orders = tuple(
            rng.choice(["candidate", "incumbent", "tie"])
            if rng.random() < 0.2
            else "candidate"
            if mine > theirs
            else "incumbent"
            for _ in range(2)
        )
        if rng.random() < 0.02:
            rows.append(
                judged(number, incumbent=theirs, unanswered=True) if rng.random() < 0.5 else judged(number, failed=True)
            )
        else:
            rows.append(judged(number, mine, theirs, orders=(orders[0], orders[1])))
    return rows


def test_a_model_compared_with_itself_is_better_in_at_most_one_time_of_twenty() -> None:
    rng = random.Random(11)
    better = sum(decide(frame(*noisy(rng, rng.randrange(100, 200))), gone=0).verdict == "better" for _ in range(400))
    assert better <= 20


def test_a_model_that_is_clearly_better_is_found_so() -> None:
    rng = random.Random(12)
    better = sum(decide(frame(*noisy(rng, 150, edge=0.15)), gone=0).verdict == "better" for _ in range(40))
    assert better >= 38


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.floats(-0.3, 0.3), st.integers(80, 160))
def test_sides_swapped_are_never_both_better(seed: int, edge: float, count: int) -> None:
    rows = frame(*noisy(random.Random(seed), count, edge))
    one, other = decide(rows, gone=0), decide(swapped(rows), gone=0)
    assert not (one.verdict == "better" and other.verdict == "better")
    assert (one.wins, one.losses, one.ties) == (other.losses, other.wins, other.ties)
    assert one.candidate_mean == other.incumbent_mean
    assert one.rows_scored + one.rows_failed == count == one.wins + one.losses + one.ties + one.rows_failed


@settings(max_examples=30)
@given(st.integers(0, 10**9))
def test_the_order_of_judgements_changes_nothing(seed: int) -> None:
    rows = frame(*noisy(random.Random(seed), 120, 0.05))
    assert decide(rows, gone=0) == decide(rows.sample(fraction=1.0, shuffle=True, seed=seed % 97), gone=0)


# a missed bar never reads as met


@pytest.mark.parametrize(
    ("got", "needed", "least", "places"),
    [
        (0.0499999, 0.05, 4, 7),
        (0.049999999, 0.05, 4, 9),
        (0.0499, 0.05, 4, 4),
        (0.05, 0.05, 4, 4),
        (0.0500001, 0.05, 4, 4),  # met, and reads so
        (0.016741, 0.016749, 4, 5),
        (-0.00001, 0.01, 4, 4),
    ],
)
def test_decimals(got: float, needed: float, least: int, places: int) -> None:
    assert decimals_below(got, needed, least) == places


def test_a_change_just_below_its_bar_reads_as_below() -> None:
    rows = pairs(100, 0, candidate=0.3499999, incumbent=0.3)
    found = bar(decide(frame(*rows), gone=0), "mean_change")
    assert not found.met
    assert "at least 0.0500000 higher; it is +0.0499999 " in found.what
    assert (report_words.needed(found), report_words.got(found)) == ("at least +0.0500000", "+0.0499999")


def test_a_win_rate_just_below_its_bar_reads_as_below() -> None:
    found = bar(decide(frame(*pairs(1_649, 1_350)), gone=0), "win_rate")  # 54.985 %
    assert not found.met
    assert "(54.98%)" in found.what
    assert (report_words.needed(found), report_words.got(found)) == ("at least 55%", "54.98%")


@settings(max_examples=200)
@given(st.floats(0, 0.06), st.floats(0.01, 0.05), st.sampled_from(["mean_change", "win_rate", "beyond_chance"]))
def test_what_a_bar_shows_compares_as_the_bar_did(got: float, needed: float, key: Any) -> None:
    got, needed = round(got, 9), round(0.55 if key == "win_rate" else 0.05 if key == "beyond_chance" else needed, 9)
    got = round(needed - 0.05 + got, 9)  # around the bar
    met = got < needed if key == "beyond_chance" else got >= needed
    shown = Bar(key, "", needed, got, met)
    texts = [re.sub(r"[^-0-9.]", "", text) for text in (report_words.got(shown), report_words.needed(shown))]
    mine, theirs = (float(text) for text in texts)
    assert (mine < theirs) is (got < needed) or report_words.got(shown).startswith("below")
