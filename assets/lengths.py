"""`token_counts`: how long the long samples are, counted once by a child process that has the model's tokenizer.

Nearly every sample is short enough by its bytes alone and is never tokenised. The few others count as too long until
they are counted here, so they are counted whenever samples came in, and once more before an attempt selects.
"""

import json
import shutil
from pathlib import Path

import dagster as dg
import polars as pl

from assets.children import run_child
from assets.intake import GROUP
from assets.steps import sign_of_life, utc_now
from loop_dagster.models.child import LeaseRef
from loop_dagster.models.lengths import LengthsJob, LengthsResult
from loop_dagster.opening import base_of, length_of
from loop_dagster.store.open import Store
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.store.selecting import counted_rows, keep_counts, uncounted_pairs
from loop_dagster.store.work import run_folder, sweep_work
from resources import StoreResource


@dg.asset(
    deps=[dg.AssetKey("samples"), dg.AssetKey("feedback"), dg.AssetKey("labels")],
    group_name=GROUP,
    description="Tokens of the samples that are not short enough by their bytes, per tokenizer and template.",
)
def token_counts(
    context: dg.AssetExecutionContext, store: StoreResource, children: dg.PipesSubprocessClient
) -> dg.MaterializeResult[None]:
    """Count what any pipeline that is switched on selects, may be too long, and nobody has counted."""
    stores = store.open()
    folder = run_folder(stores, context.run.run_id)
    with sign_of_life(stores, context.run.run_id):
        counted = {
            pipeline.tag: count_long_rows(context, children, stores, pipeline, folder=folder / pipeline.tag)
            for pipeline in stores.pipelines.list()
            if pipeline.enabled
        }
    shutil.rmtree(folder, ignore_errors=True)
    sweep_work(stores)
    return dg.MaterializeResult(
        metadata={"dagster/row_count": counted_rows(stores), "counted_now": sum(counted.values())}
    )


def count_long_rows(
    context: dg.AssetExecutionContext,
    children: dg.PipesSubprocessClient,
    store: Store,
    pipeline: Pipeline,
    *,
    folder: Path,
    lease: LeaseRef | None = None,
) -> int:
    """Count the tokens of what the pipeline selects, may be too long, and nobody has counted; returns how many."""
    length = length_of(store, base_of(store, pipeline))
    pairs = uncounted_pairs(store, pipeline, length, utc_now())
    return count_pairs(context, children, store, pipeline, pairs, folder=folder, lease=lease)


def count_pairs(
    context: dg.AssetExecutionContext,
    children: dg.PipesSubprocessClient,
    store: Store,
    pipeline: Pipeline,
    pairs: pl.DataFrame,
    *,
    folder: Path,
    lease: LeaseRef | None = None,
) -> int:
    """Count the tokens of pairs of `sample_id` and `right_key` for the pipeline's model; returns how many."""
    if pairs.is_empty():
        return 0
    base = base_of(store, pipeline)
    length = length_of(store, base)
    folder.mkdir(parents=True, exist_ok=True)
    texts = store.samples.lesson_texts(pairs)
    rows, out = folder / "rows.jsonl", folder / "counts.json"
    columns = texts.select("sample_id", "messages", "tools", "right_answer")
    rows.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in columns.to_dicts()), encoding="utf-8")
    job = LengthsJob(work_dir=str(folder), base_path=str(base.path), rows_path=str(rows), out=str(out), lease=lease)
    run_child(context, children, store.settings, module="lengths", job=job, result=LengthsResult)
    keys = texts.select("sample_id", "right_key").rows()
    keep_counts(store, length, dict(zip(keys, json.loads(out.read_text(encoding="utf-8")), strict=True)))
    return len(keys)
