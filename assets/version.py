"""`version`: the decision, derived again from stored evidence, and what it makes live."""

from typing import Any

import dagster as dg

from assets.adapter import load_check
from assets.comparison import decided, keep_report, report
from assets.metadata import bars_table
from assets.steps import StepRun, first_step, utc_now
from assets.training_set import Results
from loop_dagster.errors import LiveMoved
from loop_dagster.partitions import ATTEMPTS
from loop_dagster.rules.decision import Decision
from loop_dagster.rules.promotion import Fate, fate, must_compare_again
from loop_dagster.store.records import Attempt
from loop_dagster.store.work import sweep_work
from resources import StoreResource


@dg.asset(
    deps=[report],
    partitions_def=ATTEMPTS,
    group_name="promotion",
    output_required=False,
    kinds={"huggingface"},
    description="The attempt as the pipeline's next version under its live name; nothing where it did not win.",
)
def version(context: dg.AssetExecutionContext, store: StoreResource) -> Results:
    """Decide by the policy in force now; a winner must load and answer before the live pointer moves to it."""
    with first_step(context, store.open(), "promotion", ends=True) as step:
        if step is None:
            return
        if _moved_on(step):
            return
        decision = _decided_again(step)
        outcome = fate(
            step.store.pipelines.get(step.attempt.pipeline_id, deleted=True).settings.promotion.policy,
            verdict=decision.verdict,
            tested=decision.tested,
            approved=step.attempt.state == "promoting" and step.attempt.decision == "promoted",
            forced=step.attempt.forced,
            now=utc_now(),
        )
        ended = _apply(step, outcome)
        sweep_work(step.store)
        if ended.version_no is not None:
            yield dg.MaterializeResult(metadata=_said_of(ended, step, decision, outcome))


#: An approval was of one comparison; it does not count for another.
_UNDECIDED: dict[str, Any] = {"decision": None, "decided_at": None, "forced": False}


def _decided_again(step: StepRun) -> Decision:
    """The decision from the evidence as it is now; where its verdict is another one, that is what people see from here.

    So a person who is asked once more reads the report that the question is about.
    """
    decision = decided(step)
    if decision.verdict != step.attempt.verdict:
        keep_report(step, decision)
        facts = {"verdict": decision.verdict, "report": decision.summary()}
        step.attempt = step.store.attempts.note(step.attempt.run_id, **facts)
    return decision


def _moved_on(step: StepRun) -> bool:
    """Send the attempt back to be compared with what is live now, if that changed since it was compared."""
    live = step.store.versions.live(step.pipeline.tag)
    attempt = step.attempt
    stale = must_compare_again(
        compared_with=attempt.compared_with or "original",
        compared_with_version=attempt.compared_with_version,
        live_version=live.version_no if live else None,
    )
    if stale:
        sentence = "What is live changed since the comparison; it is compared again."
        step.store.attempts.move(attempt.run_id, "checkpoint_ready", sentence, now=utc_now(), **_UNDECIDED)
    return stale


def _apply(step: StepRun, outcome: Fate) -> Attempt:
    attempts, run_id = step.store.attempts, step.attempt.run_id
    if outcome.action != "promote":
        return attempts.move(
            run_id,
            outcome.state,
            outcome.sentence,
            now=utc_now(),
            decision=outcome.decision,
            decided_at=utc_now() if outcome.decision else None,
            forced=False,
            review_until=outcome.review_until,
        )
    step.advance("promoting", "It is loaded beside what is live, then the live name moves to it.")
    load_check(step)
    attempt = step.attempt
    assert attempt.base_digest is not None
    assert attempt.adapter_digest is not None
    step.lease.verify()
    try:
        step.store.versions.promote(
            run_id,
            base_digest=attempt.base_digest,
            adapters=[attempt.adapter_digest],
            expect_live=attempt.compared_with_version,
            now=utc_now(),
            decision=outcome.decision or "auto_promoted",
        )
    except LiveMoved as moved:
        sentence = f"{moved.message} It is compared again."
        return attempts.move(run_id, "checkpoint_ready", sentence, now=utc_now(), **_UNDECIDED)
    return attempts.get(run_id)


def _said_of(attempt: Attempt, step: StepRun, decision: Decision, outcome: Fate) -> dict[str, Any]:
    return {
        "version": attempt.version_no or 0,
        "answers_as": f"loop-{step.pipeline.tag}",
        "attempt": attempt.key,
        "decided": outcome.sentence,
        "base_digest": attempt.base_digest or "",
        "adapter_digest": attempt.adapter_digest or "",
        "bars": bars_table(decision.bars),
    }
