"""What can still be asked when a comparison starts, and how long an answer may be."""

from __future__ import annotations

import polars as pl

from loop_dagster.store.asking import answer_limit


def asked(*answers: str | None) -> pl.DataFrame:
    return pl.DataFrame({"right_answer": list(answers)}, schema={"right_answer": pl.String})


def test_short_right_answers_still_leave_room():
    assert answer_limit(asked("yes", "no"), most=512) == 128


def test_long_right_answers_get_four_times_their_length():
    assert answer_limit(asked("a" * 100, "b" * 120), most=512) == 240


def test_the_installation_has_the_last_word():
    assert answer_limit(asked("a" * 10_000), most=512) == 512
    assert answer_limit(asked("a"), most=64) == 64


def test_without_right_answers_nothing_is_known():
    assert answer_limit(asked(None, None), most=512) == 512
    assert answer_limit(asked(), most=512) == 512
