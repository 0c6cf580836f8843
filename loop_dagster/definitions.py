"""`build_defs()`: the only place that puts assets, jobs, sensors and resources together.

Tests and the command line call `build_defs(resources=…)` with their own; Dagster loads `defs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from assets.adapter import adapter
from assets.comparison import answers, judgements, report
from assets.datasets import datasets
from assets.decisions import DECISION_JOBS
from assets.intake import intake
from assets.lengths import token_counts
from assets.scores import scores
from assets.training_set import holdout, selection, training_set
from assets.upkeep import upkeep_job
from assets.version import version
from loop_dagster.jobs import STEP_JOBS, intake_job, scoring_job
from resources import StoreResource
from sensors.attempts import attempts as attempts_sensor
from sensors.intake import intake as intake_sensor
from sensors.progress import progress as progress_sensor
from sensors.scoring import scoring as scoring_sensor
from sensors.upkeep import upkeep as upkeep_sensor

ASSETS = (
    intake,
    scores,
    datasets,
    token_counts,
    selection,
    holdout,
    training_set,
    adapter,
    answers,
    judgements,
    report,
    version,
)


def build_defs(resources: Mapping[str, Any] | None = None) -> dg.Definitions:
    """All definitions of the code location; `resources` replace the default ones by name."""
    return dg.Definitions(
        assets=list(ASSETS),
        jobs=[intake_job, scoring_job, *STEP_JOBS.values(), *DECISION_JOBS, upkeep_job],
        sensors=[intake_sensor, scoring_sensor, attempts_sensor, progress_sensor, upkeep_sensor],
        resources={
            "store": StoreResource(),
            "children": dg.PipesSubprocessClient(),
            **(resources or {}),
        },
    )


defs = build_defs()
