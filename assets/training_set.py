"""`selection`, `holdout`, `training_set`: what one attempt takes, frozen once, then copied.

The selection is frozen when the training job starts; `holdout` and `training_set` derive from it and every later step
reads only those copies, so that nothing that comes in meanwhile changes an attempt.
"""

from collections.abc import Iterator
from typing import Any

import dagster as dg
import polars as pl

from assets.children import lease_ref
from assets.lengths import count_long_rows
from assets.metadata import definition_metadata, records_table, written
from assets.steps import StepRun, attempt_step, first_step, utc_now
from loop_dagster.errors import NotEnoughSamples
from loop_dagster.opening import frozen_length, frozen_pipeline
from loop_dagster.partitions import ATTEMPTS
from loop_dagster.rules.holdback import questions
from loop_dagster.rules.selection import LEFT_OUT, TAKEN
from loop_dagster.store.intake import drain
from loop_dagster.store.selecting import measure
from loop_dagster.tables import HOLDOUTS, QUESTIONS, SELECTIONS, TRAINING_SETS
from resources import StoreResource

GROUP = "training"
Results = Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]


@dg.asset(
    deps=[dg.AssetKey(name) for name in ("samples", "feedback", "labels", "datasets", "token_counts")],
    partitions_def=ATTEMPTS,
    group_name=GROUP,
    output_required=False,
    description=SELECTIONS.meaning,
    metadata=definition_metadata(SELECTIONS),
    kinds={"deltalake"},
)
def selection(context: dg.AssetExecutionContext, store: StoreResource, children: dg.PipesSubprocessClient) -> Results:
    """Drain what waits, then freeze what the attempt takes of every selected sample and why."""
    with first_step(context, store.open(), "training") as step:
        if step is None:
            return
        rows = step.rows(SELECTIONS)
        if rows.is_empty():
            drain(step.store, holder=f"run {context.run.run_id}")
            frozen = frozen_pipeline(step.pipeline, step.attempt)
            folder = step.work_folder("lengths")
            count_long_rows(context, children, step.store, frozen, folder=folder, lease=lease_ref(step))
            rows = _freeze(step)
        counts = dict(rows.group_by("reason").len().iter_rows())
        train = rows.filter(pl.col("role").is_in(["train", "check"])).height
        step.advance(
            "registering",
            f"Selected {train:,} samples to train on.",
            train_rows=train,
            holdout_rows=rows.filter(pl.col("role") == "holdout").height,
            counts={**counts, "new": rows["is_new"].sum(), "picked": _picked(rows)},
        )
        yield dg.MaterializeResult(metadata=_said_of(rows, counts, step))


@dg.asset(
    deps=[selection],
    partitions_def=ATTEMPTS,
    group_name=GROUP,
    description="The held-back samples that the attempt is judged on, copied; never trained on by any attempt.",
    metadata=definition_metadata(QUESTIONS),
    kinds={"deltalake"},
)
def holdout(context: dg.AssetExecutionContext, store: StoreResource) -> dg.MaterializeResult[None]:
    """Keep what this attempt is the first to hold back, and copy the questions that it is judged on."""
    with attempt_step(context, store.open(), "training") as step:
        rows = step.rows(SELECTIONS).filter(pl.col("role") == "holdout")
        fresh = rows.filter(pl.col("reason") == "held_new")
        step.write(HOLDOUTS, fresh)
        asked = questions(rows.with_columns(pl.col("held_by").fill_null(step.attempt.attempt_no)))
        # A pick of the judge has no right answer of a person: it is rated on the rubric alone.
        lessons = asked.with_columns(right_key=pl.when(pl.col("reviewed")).then("right_key"))
        version = step.write(QUESTIONS, step.store.samples.lesson_texts(lessons))
        return dg.MaterializeResult(
            metadata={
                **written(QUESTIONS, rows=asked.height, version=version),
                "held_back": rows.height,
                "held_back_first_by_this_attempt": fresh.height,
            }
        )


@dg.asset(
    deps=[selection],
    partitions_def=ATTEMPTS,
    group_name=GROUP,
    description=TRAINING_SETS.meaning,
    metadata=definition_metadata(TRAINING_SETS),
    kinds={"deltalake"},
    check_specs=[
        dg.AssetCheckSpec(
            "apart_from_holdout",
            asset="training_set",
            blocking=True,
            description="No prompt, up to case, white space and punctuation, is both trained on and held back.",
        )
    ],
)
def training_set(context: dg.AssetExecutionContext, store: StoreResource) -> Results:
    """Copy the rows that the attempt trains on, oldest sample first."""
    with attempt_step(context, store.open(), "training") as step:
        rows = step.rows(SELECTIONS)
        train = rows.filter(pl.col("role").is_in(["train", "check"])).sort("sample_id")
        texts = step.store.samples.lesson_texts(train).with_row_index("ordinal").cast({"ordinal": pl.Int64})
        version = step.write(TRAINING_SETS, texts)
        step.advance("dataset_validating", f"Copied {texts.height:,} rows; the set is checked.")
        shared = texts.join(rows.filter(pl.col("role") == "holdout"), on="prompt_key", how="semi").height
        yield dg.MaterializeResult(
            metadata={
                **written(TRAINING_SETS, rows=texts.height, version=version),
                "kept_aside_for_checks": texts.filter(pl.col("role") == "check").height,
                "gone_since_selected": train.height - texts.height,
            }
        )
        yield dg.AssetCheckResult(passed=shared == 0, check_name="apart_from_holdout", metadata={"shared": shared})


def _freeze(step: StepRun) -> pl.DataFrame:
    """Select once with the settings that the attempt froze, write it, and return what was written."""
    pipeline = frozen_pipeline(step.pipeline, step.attempt)
    length = frozen_length(step.attempt)
    selected = measure(step.store, pipeline, length, utc_now(), before=step.attempt.attempt_no).selection
    if not selected.ready:
        raise NotEnoughSamples(pipeline.tag, selected.minimum.have, selected.minimum.needed, selected.message)
    step.write(SELECTIONS, selected.rows.sort("sample_id"))
    return step.rows(SELECTIONS)


def _picked(rows: pl.DataFrame) -> int:
    return rows.filter(pl.col("role").is_in(["train", "check"]) & (pl.col("teaches") == "scored")).height


def _said_of(rows: pl.DataFrame, counts: dict[str, int], step: StepRun) -> dict[str, Any]:
    sentences = {**TAKEN, **LEFT_OUT}
    table = [
        {"reason": reason, "samples": counts[reason], "what it means": sentence}
        for reason, sentence in sentences.items()
        if reason in counts
    ]
    version = step.store.lake.version(SELECTIONS)
    return {**written(SELECTIONS, rows=rows.height, version=version), "reasons": records_table(table)}
