from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from loop_dagster.rules.feedback import COLUMNS, Agreement, agreement, deciding, id_key, word
from loop_dagster.tables import FEEDBACK

START = datetime(2026, 1, 1, tzinfo=UTC)


def row(number: int, sample: str, verdict: str, origin: str, minute: int, score: float | None = None) -> dict[str, Any]:
    corrected = verdict in ("edited", "gold")
    return {
        "feedback_id": f"f{number:04d}",
        "sample_id": sample,
        "verdict": verdict,
        "origin": origin,
        "right_answer": "{}" if corrected else None,
        "right_key": 1_000 + number if corrected else None,
        "right_bytes": 2 if corrected else None,
        "score": score,
        "reason": None,
        "created_at": START + timedelta(minutes=minute),
    }


def frame(*rows: dict[str, Any]) -> pl.DataFrame:
    return FEEDBACK.frame(list(rows)).select(COLUMNS)


def decision(*rows: dict[str, Any]) -> dict[str, Any]:
    return deciding(frame(*rows)).row(0, named=True)


def test_the_newest_of_a_person_decides() -> None:
    found = decision(row(1, "s", "accepted", "here", 1), row(2, "s", "rejected", "here", 2))
    assert (found["teaches"], found["reviewed"]) == ("rejected", True)


def test_an_import_never_overrules_feedback_given_here() -> None:
    assert decision(row(1, "s", "rejected", "here", 1), row(2, "s", "accepted", "import", 9))["teaches"] == "rejected"
    assert decision(row(1, "s", "edited", "import", 1), row(2, "s", "accepted", "import", 9))["teaches"] == "accepted"


def test_the_judge_never_overrules_a_person() -> None:
    found = decision(row(1, "s", "edited", "import", 1), row(2, "s", "scored", "judge", 9, 1.0))
    assert (found["teaches"], found["right_key"], found["score"]) == ("edited", 1_001, None)


def test_the_newest_score_of_the_judge_counts_from_0_8() -> None:
    assert decision(row(1, "s", "scored", "judge", 1, 0.8))["teaches"] == "scored"
    assert decision(row(1, "s", "scored", "judge", 1, 0.1 + 0.7))["teaches"] == "scored", (
        "rounded before it is compared"
    )
    below = decision(row(1, "s", "scored", "judge", 1, 0.9), row(2, "s", "scored", "judge", 2, 0.79))
    assert (below["teaches"], below["reviewed"], below["score"]) == (None, False, 0.79)


def test_at_the_same_moment_the_higher_id_decides() -> None:
    assert decision(row(2, "s", "rejected", "here", 1), row(1, "s", "accepted", "here", 1))["teaches"] == "rejected"


def test_agreement_counts_only_feedback_given_here() -> None:
    said = frame(
        row(1, "a", "accepted", "here", 1),
        row(2, "a", "scored", "judge", 2, 0.8),  # both say good
        row(3, "b", "accepted", "here", 1),
        row(4, "b", "scored", "judge", 2, 0.79),  # they differ
        row(5, "c", "edited", "here", 1),
        row(6, "c", "scored", "judge", 2, 0.1),  # both say wrong
        row(7, "d", "rejected", "import", 1),
        row(8, "d", "scored", "judge", 2, 0.9),  # an import
        row(9, "e", "gold", "here", 1),
        row(10, "e", "scored", "judge", 2, 0.9),  # says nothing about the answer
        row(11, "f", "accepted", "here", 1),  # no score
        row(12, "c", "scored", "judge", 1, 1.0),  # an older score
    )
    assert agreement(said) == Agreement(agreed=2, compared=3)
    assert agreement(said.clear()) == Agreement(agreed=0, compared=0)


def test_words() -> None:
    assert [word(verdict) for verdict in ("accepted", "edited", "gold", "rejected", "scored", None)] == [
        "good",
        "corrected",
        "corrected",
        "bad",
        "unreviewed",
        "unreviewed",
    ]


rows = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(["accepted", "rejected", "edited", "gold"]),
        st.sampled_from(["here", "import", "judge"]),
        st.integers(0, 4),
        st.floats(0, 1),
    ),
    min_size=1,
    max_size=12,
)


@given(rows, st.randoms(use_true_random=False))
def test_against_the_rule_in_plain_words(given_rows: list[Any], random: Any) -> None:
    made = [
        row(n, sample, "scored" if origin == "judge" else verdict, origin, minute, score if origin == "judge" else None)
        for n, (sample, verdict, origin, minute, score) in enumerate(given_rows)
    ]
    shuffled = random.sample(made, len(made))
    names = dict(frame(*shuffled).select(id_key(), "sample_id").iter_rows())
    found = {names[one["id_key"]]: one for one in deciding(frame(*shuffled)).to_dicts()}
    assert set(found) == {one["sample_id"] for one in made}
    for sample, got in found.items():
        of_sample = [one for one in made if one["sample_id"] == sample]
        for origin in ("here", "import", "judge"):
            said = [one for one in of_sample if one["origin"] == origin]
            if said:
                newest = max(said, key=lambda one: (one["created_at"], one["feedback_id"]))
                break
        picked = origin != "judge" or round(newest["score"], 9) >= 0.8
        assert got["teaches"] == (newest["verdict"] if picked else None)
        assert got["reviewed"] == (origin != "judge")
        assert got["right_key"] == newest["right_key"]
