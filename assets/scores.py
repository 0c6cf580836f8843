"""`scores`: what the judge says of samples that nobody reviewed, while a pipeline is short. They become feedback.

A run is for one pipeline, which its tag names. Scores go through the inbox like all other feedback, so that they are
readable at once and reach the Delta table with the next drain.
"""

import shutil
from collections.abc import Iterator

import dagster as dg
import polars as pl

from assets.intake import GROUP
from assets.lengths import count_pairs
from assets.steps import sign_of_life, utc_now
from loop_dagster import scoring
from loop_dagster.errors import LeaseBusy, LeaseLost, LoopError
from loop_dagster.rules.money import in_dollars
from loop_dagster.store.open import Store
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.store.selecting import Length
from loop_dagster.store.work import run_folder
from resources import StoreResource

#: Tag of the runs of a pipeline.
PIPELINE_TAG = "loop/pipeline"


@dg.asset(
    group_name=GROUP,
    output_required=False,
    description="The judge's scores of unreviewed samples, asked for only while a pipeline is short; rows of feedback.",
)
def scores(
    context: dg.AssetExecutionContext, store: StoreResource, children: dg.PipesSubprocessClient
) -> Iterator[dg.MaterializeResult[None]]:
    """Score for the pipeline of this run until it has enough, nothing is left, or something holds it."""
    stores = store.open()
    pipeline = _pipeline(context, stores)
    if pipeline is None:
        context.log.info("Skipped: no pipeline wants samples scored now.")
        return
    folder = run_folder(stores, context.run.run_id)  # while it is there, a purge waits for this run
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (
            sign_of_life(stores, context.run.run_id),
            stores.leases.hold(scoring.LEASE, holder=context.run.run_id) as held,
        ):

            def count_long(owner: Pipeline, _length: Length, pairs: pl.DataFrame) -> None:
                count_pairs(context, children, stores, owner, pairs, folder=folder / "lengths")

            done = scoring.score(stores, pipeline.pipeline_id, lease=held, count_long=count_long)
    except LeaseBusy:
        context.log.info("Skipped: another run scores samples of this workspace now.")
        return
    except LeaseLost:
        raise  # another run has taken over, or somebody ended this one
    except LoopError as error:
        scoring.note_broken(stores, pipeline, error.code, error.message)
        raise dg.Failure(description=f"{error.code}: {error.message}", allow_retries=False) from error
    except Exception as error:
        # Its text may quote a sample, so only its kind goes on record.
        said = f"Scoring stopped with {type(error).__name__}; the log of its run says where."
        scoring.note_broken(stores, pipeline, "SCORING_BROKE", said)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    yield dg.MaterializeResult(metadata=_said(pipeline, done))


def _pipeline(context: dg.AssetExecutionContext, store: Store) -> Pipeline | None:
    """The pipeline that the run's tag names; without a tag (a run by hand) the first that wants its samples scored."""
    wanted = context.run.tags.get(PIPELINE_TAG)
    known = scoring.wanted(store, utc_now()) if wanted is None else store.pipelines.list()
    return next((one for one in known if wanted in (None, one.pipeline_id)), None)


def _said(pipeline: Pipeline, done: scoring.Done) -> dict[str, str | int]:
    return {
        "dagster/row_count": done.scored,
        "pipeline": pipeline.tag,
        "picked": done.picked,
        "no_score_to_be_had": done.failed,
        "calls": done.calls,
        "cost": in_dollars(done.nanocents),
        "now": done.standing.message if done.standing else "",
    }
