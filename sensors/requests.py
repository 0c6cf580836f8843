"""How a run of an attempt is asked for: one function, so that every sensor asks for the same run of a step."""

import dagster as dg

from assets.steps import ATTEMPT_TAG, STEP_TAG, TRY_TAG
from loop_dagster.jobs import STEP_JOBS
from loop_dagster.rules.progress import step_key
from loop_dagster.rules.states import Step
from loop_dagster.store.records import Attempt


def request(attempt: Attempt, step: Step, try_no: int) -> dg.RunRequest:
    """The run of one try of one step, under the one run key of that try."""
    key = attempt.key
    return dg.RunRequest(
        run_key=step_key(key, step, try_no),
        job_name=STEP_JOBS[step].name,
        partition_key=key,
        tags={ATTEMPT_TAG: key, STEP_TAG: step, TRY_TAG: str(try_no)},
    )
