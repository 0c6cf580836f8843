"""Jobs `approve`, `reject` and `test_again`: what a person decides about one attempt, from Dagster's UI.

Belongs here: a partition (the attempt) and a run's config turned into one call. Does not belong here: what may be
decided (loop_dagster/deciding.py) and what follows from it: the sensors see the attempt's new state.
"""

from collections.abc import Callable

import dagster as dg

from assets.steps import utc_now
from loop_dagster import deciding
from loop_dagster.errors import LoopError
from loop_dagster.partitions import ATTEMPTS, AttemptKey
from loop_dagster.store.open import Store
from loop_dagster.store.records import Attempt
from resources import StoreResource


class Approval(dg.Config):
    """`force` puts an inconclusive one live all the same."""

    force: bool = False


@dg.op(out=dg.Out(dg.Nothing))
def approve_attempt(context: dg.OpExecutionContext, store: StoreResource, config: Approval) -> None:
    """Let an attempt that waits for a decision go live."""
    _decide(context, store, lambda one, attempt: deciding.approve(one, attempt, force=config.force, now=utc_now()))


@dg.op(out=dg.Out(dg.Nothing))
def reject_attempt(context: dg.OpExecutionContext, store: StoreResource) -> None:
    """Close an attempt that waits for a decision; what is live stays."""
    _decide(context, store, lambda one, attempt: deciding.reject(one, attempt, now=utc_now()))


@dg.op(out=dg.Out(dg.Nothing))
def test_attempt_again(context: dg.OpExecutionContext, store: StoreResource) -> None:
    """Compare an attempt that trained and was never tested with what is live now."""
    _decide(context, store, lambda one, attempt: deciding.test_again(one, attempt, now=utc_now()))


@dg.job(partitions_def=ATTEMPTS, executor_def=dg.in_process_executor, description=approve_attempt.description)
def approve() -> None:
    """One attempt, one decision."""
    approve_attempt()


@dg.job(partitions_def=ATTEMPTS, executor_def=dg.in_process_executor, description=reject_attempt.description)
def reject() -> None:
    """One attempt, one decision."""
    reject_attempt()


@dg.job(partitions_def=ATTEMPTS, executor_def=dg.in_process_executor, description=test_attempt_again.description)
def test_again() -> None:
    """One attempt, tested once more."""
    test_attempt_again()


DECISION_JOBS = (approve, reject, test_again)


def _decide(context: dg.OpExecutionContext, store: StoreResource, decide: Callable[[Store, Attempt], Attempt]) -> None:
    """Decide about the attempt that the run's partition names; a refusal fails the run with its sentence."""
    stores = store.open()
    key = AttemptKey.parse(context.partition_key)
    try:
        decided = decide(stores, stores.attempts.by_number(key.pipeline_id, key.attempt_no))
    except LoopError as error:
        raise dg.Failure(description=f"{error.code}: {error.message}", allow_retries=False) from None
    context.log.info(f"{decided.key} is {decided.state}: {decided.reason}")
