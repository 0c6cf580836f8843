"""`answers`, `judgements`, `report`: both models answer the held-back samples, a judge rates them, the bars decide."""

import json
from decimal import Decimal
from typing import Any

import dagster as dg
import polars as pl

from assets.adapter import adapter
from assets.children import lease_ref, run_step_child
from assets.metadata import bars_table, definition_metadata, written
from assets.steps import StepRun, attempt_step, first_step, frozen_judge, utc_now
from assets.training_set import Results, holdout
from loop_dagster.models.answer import AdapterRef, AnswerJob, AnswerResult
from loop_dagster.models.judge import Case, Usage, open_judge
from loop_dagster.models.judge_answers import Budget, Judged, judge_answers
from loop_dagster.models.report_pictures import as_markdown, scores_png
from loop_dagster.opening import frozen_base
from loop_dagster.partitions import ATTEMPTS
from loop_dagster.report_route import page_url
from loop_dagster.rules.decision import Decision, decide, too_few_left
from loop_dagster.rules.feedback import agreement
from loop_dagster.rules.money import Prices, comparison_limit, in_dollars
from loop_dagster.store.asking import answer_limit, questions_left
from loop_dagster.tables import ANSWERS, JUDGEMENTS, QUESTIONS, REPORTS, SELECTIONS
from loop_dagster.tables.base import ATTEMPT_COLUMNS
from resources import StoreResource

#: Conversations of up to this many tokens are asked, or of the model's own limit (rules.md, How it is tested).
MOST_ANSWERED_TOKENS = 32_768

GROUP = "comparison"


@dg.asset(
    deps=[adapter, holdout],
    partitions_def=ATTEMPTS,
    group_name=GROUP,
    output_required=False,
    description=ANSWERS.meaning,
    metadata=definition_metadata(ANSWERS),
    kinds={"deltalake"},
)
def answers(context: dg.AssetExecutionContext, store: StoreResource, children: dg.PipesSubprocessClient) -> Results:
    """Candidate and incumbent answer what is left of the held-back samples, on one engine, with the same decoding."""
    with first_step(context, store.open(), "comparison") as step:
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
        version = step.write(ANSWERS, frame)
        ends = dict(
            frame.group_by("side", "finish")
            .len()
            .select(pl.concat_str("side", "finish", separator="_"), "len")
            .iter_rows()
        )
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
    kinds={"deltalake"},
)
def judgements(context: dg.AssetExecutionContext, store: StoreResource) -> dg.MaterializeResult[None]:
    """Ask the judge four times per sample: rate each answer, prefer one in both orders, never told which is live."""
    with attempt_step(context, store.open(), "comparison") as step:
        given = step.rows(ANSWERS)
        judge = open_judge(frozen_judge(step))
        step.advance("candidate_running", "Both models answered.")
        step.advance("evaluating", f"The judge {judge.name} rates {given.height // 2:,} pairs of answers.")
        asked = (
            step.rows(QUESTIONS).join(given.select("sample_id").unique(), on="sample_id", how="semi").sort("ordinal")
        )
        judged = judge_answers(
            judge,
            [Case.from_row(row) for row in asked.iter_rows(named=True)],
            given,
            budget=(budget := _budget(step)),
            used_before=Usage(*step.attempt.counts.get("judge_used", ())),
            may_go_on=lambda: not step.lost(),
            journal=step.work_folder("judge") / "judgements.jsonl",
        )
        version = step.write(JUDGEMENTS, judged.frame)
        step.note_counts(
            judge=judge.name,
            judge_ended=judged.ended,
            judge_stopped=judged.stopped,
            not_reached=judged.not_reached,
            judge_used=judged.total.as_row(),
            judge_nanocents=budget.cost(judged.total),
        )
        return dg.MaterializeResult(
            metadata={
                **written(JUDGEMENTS, rows=judged.frame.height, version=version),
                "judge": judge.name,
                "ended_early": judged.ended or judged.stopped or "no",
                "not_reached": judged.not_reached,
                **_used(judged, budget),
            }
        )


@dg.asset(
    deps=[judgements],
    partitions_def=ATTEMPTS,
    group_name=GROUP,
    description=f"{REPORTS.meaning}; `loop report <attempt> --html` writes it as a page with every conversation",
    metadata=definition_metadata(REPORTS),
    kinds={"deltalake"},
    check_specs=[
        dg.AssetCheckSpec(
            "better", asset="report", description="Every bar is met. A missed one is a warning, not an error."
        )
    ],
)
def report(context: dg.AssetExecutionContext, store: StoreResource) -> Results:
    """Decide by the bars from the stored judgements alone and keep every bar with what it needed and got."""
    with attempt_step(context, store.open(), "comparison", ends=True) as step:
        judged = step.rows(JUDGEMENTS)
        decision = decided(step)
        version = keep_report(step, decision)
        step.advance("evaluating", "The judge has rated.")
        step.advance("reported", decision.sentence, verdict=decision.verdict, report=decision.summary())
        pictures = {"scores": dg.MetadataValue.md(as_markdown(scores_png(judged), "scores"))} if judged.height else {}
        yield dg.MaterializeResult(
            metadata={
                **written(REPORTS, rows=1, version=version),
                "verdict": decision.verdict,
                "judge": _judge_of(step),
                "bars": bars_table(decision.bars),
                "warnings": ", ".join(decision.warnings) or "none",
                **_page(step),
                **pictures,
            }
        )
        yield dg.AssetCheckResult(
            passed=decision.verdict == "better",
            check_name="better",
            severity=dg.AssetCheckSeverity.WARN,
            metadata={"verdict": decision.verdict, "missed_bar": decision.missed_bar or "none"},
        )


def _page(step: StepRun) -> dict[str, Any]:
    """How to see the report with its conversations: the command, and the page while this machine serves."""
    url = page_url(step.store.settings, step.attempt.key)
    return {
        "page_command": f"loop report {step.attempt.key} --html",
        **({"page": dg.MetadataValue.url(url)} if url else {}),
    }


def _budget(step: StepRun) -> Budget:
    """The judge's prices, and what scoring unreviewed samples left of the limit, as the attempt froze them."""
    frozen = step.attempt.frozen
    prices = {name: Decimal(price) for name, price in frozen.get("judge_prices", {}).items()}
    limit = frozen.get("scoring_limit_cents", step.store.settings.scoring_limit_cents)
    on_samples = frozen.get("sample_scoring", {}).get("nanocents", 0)
    return Budget(prices=Prices(**prices), limit=comparison_limit(limit, on_samples=on_samples))


def _used(judged: Judged, budget: Budget) -> dict[str, Any]:
    """What the judge used, as metadata: in this run, and for the attempt with every run and test before."""
    total = judged.total
    how = "as the judge's server counted"
    if total.estimated:
        how = f"{total.estimated:,} of {total.calls:,} calls estimated, since the server said nothing of them"
    return {
        "calls": judged.usage.calls,
        "calls_for_the_attempt": total.calls,
        "tokens_read": total.prompt_tokens,
        "tokens_written": total.answer_tokens,
        "tokens_counted": how,
        "cost": in_dollars(budget.cost(total)),
        "cost_limit": in_dollars(budget.limit),
    }


def decided(step: StepRun) -> Decision:
    """The decision from the stored judgements; whoever applies it derives it anew here."""
    counts = step.attempt.counts
    return decide(
        step.rows(JUDGEMENTS),
        gone=counts.get("gone", 0),
        answers=step.rows(ANSWERS),
        agreement=agreement(_feedback_of(step)),
        ended_early=counts.get("judge_ended"),
        stopped=counts.get("judge_stopped"),
        not_reached=counts.get("not_reached", 0),
        also=["judge_labelled_training_rows"] if counts.get("picked") else [],
    )


def keep_report(step: StepRun, decision: Decision) -> int:
    """Write the decision as the attempt's only report; returns the Delta version."""
    return step.write(REPORTS, pl.DataFrame([_report_row(step, decision)], schema_overrides=REPORTS.schema))


def _judge_of(step: StepRun) -> str:
    return str(step.attempt.counts.get("judge", step.attempt.frozen["judge"]))


def _feedback_of(step: StepRun) -> pl.DataFrame:
    """Feedback on the samples that the attempt selected, for how well the judge agrees with people."""
    mine = step.rows(SELECTIONS).get_column("sample_id")
    return step.store.samples.keys().feedback.filter(pl.col("sample_id").is_in(mine.implode())).collect()


def _answered(
    context: dg.AssetExecutionContext, children: dg.PipesSubprocessClient, step: StepRun, left: pl.DataFrame
) -> pl.DataFrame:
    """Let a child answer; rows of `answers`."""
    folder = step.work_folder("answer")
    questions, out = folder / "questions.jsonl", folder / "answers.jsonl"
    lines = (json.dumps(row, ensure_ascii=False) for row in left.select("sample_id", "messages", "tools").to_dicts())
    questions.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    base = frozen_base(step.store, step.attempt)
    live = step.store.versions.live(step.pipeline.tag)
    assert step.attempt.adapter_digest is not None
    job = AnswerJob(
        work_dir=str(folder),
        base_path=str(base.path),
        base_digest=base.digest,
        candidate=(_adapter_ref(step, step.attempt.adapter_digest, base.digest),),
        incumbent=tuple(_adapter_ref(step, digest, live.base_digest) for digest in live.adapters) if live else (),
        questions=str(questions),
        out=str(out),
        max_new_tokens=answer_limit(left, most=step.attempt.frozen["max_answer_tokens"]),
        max_length=MOST_ANSWERED_TOKENS,
        lease=lease_ref(step),
    )
    run_step_child(context, children, step, module="answer", job=job, result=AnswerResult)
    own = {column.name for column in ATTEMPT_COLUMNS}
    return pl.read_ndjson(out, schema={name: dtype for name, dtype in ANSWERS.schema.items() if name not in own})


def _adapter_ref(step: StepRun, digest: str, base_digest: str) -> AdapterRef:
    return AdapterRef(path=str(step.store.artifacts.open(digest)), digest=digest, base_digest=base_digest)


def _report_row(step: StepRun, decision: Decision) -> dict[str, Any]:
    row = decision.as_row()
    return {
        **row,
        "bars": json.dumps(row["bars"], ensure_ascii=False),
        "warnings": json.dumps(row["warnings"]),
        "judge": _judge_of(step),
        "compared_with": step.attempt.compared_with,
        "compared_with_version": step.attempt.compared_with_version,
        "created_at": utc_now(),
    }
