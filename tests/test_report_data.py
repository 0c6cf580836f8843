"""What a report is made of, read from real stores: who won which sample, what is missing, which attempt is meant."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from report_world import NOW, Question, compared, questions

from loop_dagster.errors import BadRequest, NoReport, NotFound
from loop_dagster.report_data import find_attempt, report_of
from loop_dagster.settings import Settings
from loop_dagster.store.open import Store, open_store
from loop_dagster.tables import ADAPTERS, ANSWERS, JUDGEMENTS, QUESTIONS, REPORTS
from loop_dagster.tables.attempts import deleted_id


@pytest.fixture
def store(home: Path) -> Store:
    return open_store(Settings(home=home))


def test_the_figures_are_those_of_the_stored_verdict(store: Store) -> None:
    report = report_of(store, compared(store, questions(100)))
    result = report.result
    assert (result.verdict, result.missed) == ("better", ())
    assert [bar.key for bar in result.bars][:2] == ["rows_scored", "failures"]
    won, lost, tied = (report.count(outcome) for outcome in ("won", "lost", "tie"))
    assert (won, lost, tied) == (result.wins, result.losses, result.ties) == (63, 12, 25)
    assert report.candidate_passed == round(result.candidate_pass_rate * 100)
    assert report.incumbent_passed == round(result.incumbent_pass_rate * 100)
    assert [dimension.name for dimension in report.dimensions] == ["correctness", "completeness", "style"]
    assert report.dimensions[0].candidate / 10 == pytest.approx(result.candidate_mean)
    assert report.dimensions[0].change == pytest.approx(result.mean_change * 10)
    assert not report.answers_are_newer
    assert report.explanation["headline"] == "Compared"


def test_each_sample_says_what_became_of_it(store: Store) -> None:
    asked = [
        Question(),
        Question(orders=("incumbent", "incumbent"), teaches="edited"),
        Question(orders=("candidate", "incumbent"), teaches="gold"),
        Question(orders=("tie", "tie"), right=None, teaches="scored"),
        Question(candidate=None),
        Question(status="failed", error_code="JUDGE_UNREADABLE"),
        Question(status="gone"),
        Question(status="not_reached"),
    ]
    report = report_of(store, compared(store, asked))
    items = report.items
    assert (report.judged.not_reached, report.result.rows_gone, report.result.rows_failed) == (1, 1, 1)
    assert [item.outcome for item in items] == [
        *("won", "lost", "tie", "tie", "lost", "failed", "gone", "not_reached"),
    ]
    assert [item.agreed for item in items] == [True, True, False, True, None, None, None, None]
    assert [item.unanswered for item in items] == [False] * 4 + [True] + [False] * 3
    assert [item.reference for item in items][:4] == ["good", "correction", "gold", None]
    assert (items[4].candidate.answer, items[4].candidate.finish, items[4].candidate.passed) == (None, "empty", False)
    assert items[5].reason == "The judge's reply could not be read, twice."
    assert items[5].candidate.passed is None
    assert items[6].candidate.answer is None
    assert items[7].candidate.answer is not None
    assert [item.number for item in items] == [*range(1, 9)]


def test_with_too_few_left_nothing_was_asked(store: Store) -> None:
    report = report_of(store, compared(store, [Question(status="gone")] * 3))
    assert {item.outcome for item in report.items} == {"not_asked"}
    assert report.result.verdict == "inconclusive"
    assert report.dimensions == ()


def test_a_stored_winner_that_the_orders_contradict_is_not_believed(store: Store) -> None:
    attempt = compared(store, [Question(orders=("candidate", "incumbent"))])
    frame = store.lake.scan(JUDGEMENTS).collect().with_columns(winner=pl.lit("candidate"))
    store.lake.replace_attempt(JUDGEMENTS, attempt.key, frame)
    assert report_of(store, attempt).items[0].outcome == "tie"


def test_a_pass_is_0_70_after_rounding(store: Store) -> None:
    report = report_of(store, compared(store, [Question(rated=(7.0, 6.99)), Question(rated=(7.0 - 1e-12, 7.0))]))
    assert [item.candidate.passed for item in report.items] == [True, True]
    assert [item.incumbent.passed for item in report.items] == [False, True]


def test_a_deleted_sample_keeps_its_copy_and_no_id(store: Store) -> None:
    attempt = compared(store, [Question(prompt="first"), Question(prompt="second")])
    renamed = pl.when(pl.col("sample_id") == "sample-0000").then(pl.lit(deleted_id(0))).otherwise("sample_id")
    for table in (QUESTIONS, ANSWERS, JUDGEMENTS):
        frame = store.lake.scan(table).collect().with_columns(renamed.alias("sample_id"))
        store.lake.replace_attempt(table, attempt.key, frame)
    first, second = report_of(store, attempt).items
    assert (first.sample_id, first.outcome, first.messages[0]["content"]) == (None, "won", "first")
    assert second.sample_id == "sample-0001"


def test_what_it_trained_on_is_counted_and_never_read(store: Store) -> None:
    report = report_of(store, compared(store, questions(5)))
    selected = report.selected
    assert (selected.train, selected.check, selected.held_back, selected.new) == (19, 1, 5, 20)
    assert selected.taught_by == {"accepted": 5, "edited": 15}
    assert selected.left_out == (
        ("An older sample has the same prompt and the same right answer; that one counts.", 1),
    )
    training = report.training
    assert training is not None
    assert (training.kept_step, training.kept_check_loss, len(training.points)) == (30, 0.1, 40)


def test_a_curve_of_a_training_that_diverged_has_gaps_not_nan(store: Store) -> None:
    attempt = compared(store, questions(1))
    curve = '[{"step": 1, "train_loss": NaN, "check_loss": null}, {"step": 2, "train_loss": 1.5, "check_loss": null}]'
    frame = store.lake.scan(ADAPTERS).collect().with_columns(curve=pl.lit(curve))
    store.lake.replace_attempt(ADAPTERS, attempt.key, frame)
    training = report_of(store, attempt).training
    assert training is not None
    assert [point.train_loss for point in training.points] == [None, 1.5]


def test_the_judge_is_named_for_what_it_is(store: Store) -> None:
    embedded = report_of(store, compared(store, questions(1), name="One")).judged
    assert (embedded.kind, "not a language model" in embedded.sentence) == ("reference", True)
    model = report_of(store, compared(store, questions(1), name="Two", judge="big-judge", judge_setting="openai"))
    assert "the model big-judge" in model.judged.sentence
    own = compared(store, questions(1), name="Three", judge="ours", judge_setting="mine:make")
    assert "this installation's own" in report_of(store, own).judged.sentence


def test_a_comparison_that_ended_early_says_why(store: Store) -> None:
    why = "The judge big-judge at judge.example answered 401: it refused the key."
    report = report_of(store, compared(store, questions(100), ended=why, warnings=["judge_unreliable"]))
    assert report.result.verdict == "inconclusive"
    assert why in report.result.sentence
    assert [caution.code for caution in report.warnings] == ["judge_unreliable"]
    assert "mostly prefers the longer answer" in report.warnings[0].sentence


def test_answers_of_a_newer_comparison_are_told_apart(store: Store) -> None:
    attempt = compared(store, questions(4))
    store.attempts.move(attempt.run_id, "checkpoint_ready", "What is live changed.", now=NOW)
    assert report_of(store, store.attempts.get(attempt.run_id)).answers_are_newer
    rows = store.lake.scan(JUDGEMENTS).collect()
    store.lake.replace_attempt(JUDGEMENTS, attempt.key, rows.head(3))
    store.attempts.fail(attempt.run_id, code="X", sentence="It broke.", now=NOW)
    assert report_of(store, store.attempts.get(attempt.run_id)).answers_are_newer


def test_an_attempt_is_found_by_key_run_id_and_number(store: Store) -> None:
    attempt = compared(store, questions(1))
    for ref in (attempt.key, attempt.run_id, "1", "0001"):
        assert find_attempt(store, ref).run_id == attempt.run_id
    assert find_attempt(store, "1", pipeline="support").run_id == attempt.run_id


@pytest.mark.parametrize("ref", ["2", "9" * 30, "support/0001", f"x/{'9' * 30}", "", "nobody", "①", "-1"])
def test_what_is_not_there_is_not_found(store: Store, ref: str) -> None:
    compared(store, questions(1))
    with pytest.raises(NotFound):
        find_attempt(store, ref)


def test_a_number_alone_needs_one_pipeline(store: Store) -> None:
    with pytest.raises(NotFound):
        find_attempt(store, "1")
    compared(store, questions(1), name="One")
    other = compared(store, questions(1), name="Two")
    with pytest.raises(BadRequest, match=r"there are 2 pipelines \(one, two\)"):
        find_attempt(store, "1")
    assert find_attempt(store, "1", pipeline="two").run_id == other.run_id
    with pytest.raises(BadRequest, match="not one of pipeline one"):
        find_attempt(store, other.key, pipeline="one")


def test_a_deleted_pipeline_takes_its_reports_along(store: Store) -> None:
    attempt = compared(store, questions(1))
    store.pipelines.delete("support")
    for ref in (attempt.key, attempt.run_id):
        with pytest.raises(NotFound):
            find_attempt(store, ref)
    with pytest.raises(NotFound):
        report_of(store, attempt)


def test_a_row_that_nobody_acknowledged_is_no_report(store: Store) -> None:
    pipeline = store.pipelines.create("Support", model_id="any")
    attempt = store.attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW)
    assert attempt is not None
    written = store.lake.scan(REPORTS).filter(attempt=compared(store, questions(1), name="Other").key).collect()
    mine = {"attempt": attempt.key, "pipeline_id": attempt.pipeline_id}
    store.lake.replace_attempt(REPORTS, attempt.key, written.with_columns(**{k: pl.lit(v) for k, v in mine.items()}))
    with pytest.raises(NoReport):
        report_of(store, attempt)


def test_an_attempt_without_a_report_says_where_it_stands(store: Store) -> None:
    pipeline = store.pipelines.create("Support", model_id="any")
    attempt = store.attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW)
    assert attempt is not None
    with pytest.raises(NoReport, match="no report yet: it is built") as raised:
        report_of(store, attempt)
    assert (raised.value.code, raised.value.exit_code) == ("NOT_FOUND", 4)
    store.attempts.fail(attempt.run_id, code="DISK_FULL", sentence="The disk is full.", now=NOW)
    with pytest.raises(NoReport, match=r"ended as failed before it was compared\. The disk is full\."):
        report_of(store, store.attempts.get(attempt.run_id))
