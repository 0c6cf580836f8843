"""The jobs: one for intake, one for scoring, three for an attempt, each partitioned by attempt and run in one process.

Belongs here: names, what each job materialises, run tags. Does not belong here: when they run (sensors/).
"""

from __future__ import annotations

from dagster import AssetSelection, define_asset_job, in_process_executor

#: One machine, this one: runs that fill it carry this tag, and the run queue lets one through (dagster.yaml).
MACHINE_TAG = {"loop/machine": "local"}

# A step of an attempt is seconds of our own work around one child process: an executor that starts a process per asset
# would cost more than it gives.
intake_job = define_asset_job(
    "intake",
    AssetSelection.assets("samples", "feedback", "labels", "datasets", "token_counts"),
    description="Import the intake folder, drain the inbox, validate what changed, count datasets and what is long.",
    executor_def=in_process_executor,
)
scoring_job = define_asset_job(
    "scoring",
    AssetSelection.assets("scores"),
    description="Let the judge score what nobody reviewed, for one pipeline that is short of samples.",
    executor_def=in_process_executor,
)
training_job = define_asset_job(
    "training",
    AssetSelection.assets("selection", "holdout", "training_set", "adapter"),
    description="Freeze what the attempt takes, hold back, build the training set, train the adapter.",
    tags=MACHINE_TAG,
    executor_def=in_process_executor,
)
comparison_job = define_asset_job(
    "comparison",
    AssetSelection.assets("answers", "judgements", "report"),
    description="Let both models answer the held-back samples, judge the answers, report the bars.",
    tags=MACHINE_TAG,
    executor_def=in_process_executor,
)
promotion_job = define_asset_job(
    "promotion",
    AssetSelection.assets("version"),
    description="Decide from stored evidence and make a better one live.",
    executor_def=in_process_executor,
)

#: The job that each step of an attempt needs (rules/states.py).
STEP_JOBS = {"training": training_job, "comparison": comparison_job, "promotion": promotion_job}
