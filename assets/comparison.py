"""`answers`, `judgements`, `report`: both models answer the held-back samples, a judge rates them, the bars decide."""

import json
from typing import Any

import dagster as dg
import polars as pl

from assets.adapter import adapter, frozen_base
from assets.children import lease_ref, run_child
from assets.metadata import definition_metadata, records_table, written
from assets.steps import StepRun, attempt_step, utc_now
from assets.training_set import Results, holdout
from loop_dagster.models.answer import AnswerJob, AnswerResult
from loop_dagster.models.judge import Case, judge_answers, open_judge
from loop_dagster.models.report_pictures import as_markdown, scores_png
from loop_dagster.partitions import ATTEMPTS
from loop_dagster.rules.decision import decide, too_few_left
from loop_dagster.store.asking import questions_left
from loop_dagster.tables import ANSWERS, JUDGEMENTS, QUESTIONS, REPORTS, Table
from resources import StoreResource

GROUP = "comparison"


@dg.asset(
    deps=[adapter, holdout],
    partitions_def=ATTEMPTS,
    group_name=GROUP,
    output_required=False,
    description=ANSWERS.meaning,
    metadata=definition_metadata(ANSWERS),
)
def answers(context: dg.AssetExecutionContext, store: StoreResource, children: dg.PipesSubprocessClient) -> Results:
    """Candidate and incumbent answer what is left of the held-back samples, on one engine, with the same decoding."""
    with attempt_step(context, store.open(), "comparison", opens=True) as step:
        if step is None:
            return
        live = step.store.versions.live(step.pipeline.tag)
        step.advance(
            "candidate_booking",
            f"Compared with {f'v{live.version_no}' if live else 'the base model'}, which is what answers now.",
            compared_with="version" if live else "original",
            compared_with_version=live.version_no if live else None,
        )
        left, gone = questions_left(step.store, step.pipeline, step.attempt.key, utc_now())
        step.note_counts(gone=gone)
        if too_few_left(left.height):
            frame = ANSWERS.empty()
        else:
            step.advance("candidate_running", f"Both models answer {left.height:,} held-back samples.")
            frame = _answered(context, children, step, left)
        version = _write(step, ANSWERS, frame)
        ends = dict(frame.group_by("side", "finish").len().select(pl.concat_str("side", "finish", separator="_"), "len").iter_rows())
        yield dg.MaterializeResult(
            metadata={
                **written(ANSWERS, rows=frame.height, version=version),
                "asked": left.height,
                "gone_since_held_back": gone,
                **{f"finish_{name}": count for name, count in sorted(ends.items())},
            }
        )


@dg.asset(
    deps=[answers],
    partitions_def=ATTEMPTS,
    group_name=GROUP,
    description=JUDGEMENTS.meaning,
    metadata=definition_metadata(JUDGEMENTS),
)
def judgements(context: dg.AssetExecutionContext, store: StoreResource) -> dg.MaterializeResult[None]:
    """Ask the judge four times per sample: rate each answer, prefer one in both orders, never told which is live."""
    with attempt_step(context, store.open(), "comparison") as step:
        assert step is not None
        given = _rows(step, ANSWERS)
        judge = open_judge(step.store.settings)
        step.advance("candidate_running", "Both models answered.")
        step.advance("evaluating", f"The judge {judge.name} rates {given.height // 2:,} pairs of answers.")
        asked = _rows(step, QUESTIONS).join(given.select("sample_id").unique(), on="sample_id", how="semi").sort("ordinal")
        judged = judge_answers(
            judge,
            [Case.from_row(row) for row in asked.iter_rows(named=True)],
            given,
            may_go_on=lambda: not step.lost(),
            journal=step.work_folder("judge") / "judgements.jsonl",
        )
        version = _write(step, JUDGEMENTS, judged.frame)
        step.note_counts(not_reached=judged.not_reached)
        return dg.MaterializeResult(
            metadata={
                **written(JUDGEMENTS, rows=judged.frame.height, version=version),
                "judge": judge.name,
                "calls": judged.usage.calls,
                "ended_early": judged.ended or "no",
                "not_reached": judged.not_reached,
            }
        )


@dg.asset(
    deps=[judgements],
    partitions_def=ATTEMPTS,
    group_name=GROUP,
    description=REPORTS.meaning,
    metadata=definition_metadata(REPORTS),
    check_specs=[
        dg.AssetCheckSpec("better", asset="report", description="Every bar is met. A missed one is a warning, not an error.")
    ],
)
def report(context: dg.AssetExecutionContext, store: StoreResource) -> Results:
    """Decide by the bars from the stored judgements alone and keep every bar with what it needed and got."""
    with attempt_step(context, store.open(), "comparison", ends=True) as step:
        assert step is not None
        judged = _rows(step, JUDGEMENTS)
        decision = decide(judged, gone=step.attempt.counts.get("gone", 0))
        row = _report_row(step, decision.as_row())
        version = _write(step, REPORTS, REPORTS.frame([row]))
        step.advance("evaluating", "The judge has rated.")
        step.advance("reported", decision.sentence, verdict=decision.verdict, report=decision.summary())
        pictures = {"scores": dg.MetadataValue.md(as_markdown(scores_png(judged), "scores"))} if judged.height else {}
        yield dg.MaterializeResult(
            metadata={
                **written(REPORTS, rows=1, version=version),
                "verdict": decision.verdict,
                "judge": row["judge"],
                "bars": records_table([bar.as_dict() for bar in decision.bars]),
                "warnings": ", ".join(decision.warnings) or "none",
                **pictures,
            }
        )
        yield dg.AssetCheckResult(
            passed=decision.verdict == "better",
            check_name="better",
            severity=dg.AssetCheckSeverity.WARN,
            metadata={"verdict": decision.verdict, "missed_bar": decision.missed_bar or "none"},
        )
