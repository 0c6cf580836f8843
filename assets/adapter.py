"""`adapter`: the LoRA adapter that an attempt trains, kept under its digest, with its curve."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl

from assets.children import lease_ref, run_step_child
from assets.metadata import definition_metadata, written
from assets.steps import StepRun, attempt_step, frozen_judge, utc_now
from assets.training_set import GROUP, training_set
from loop_dagster.models.base import BaseModel, verify
from loop_dagster.models.judge import open_judge
from loop_dagster.models.report_pictures import as_markdown, training_curve_png
from loop_dagster.models.serve import prepare
from loop_dagster.models.train import TrainJob, TrainResult, recipe_fields
from loop_dagster.opening import frozen_base
from loop_dagster.partitions import ATTEMPTS
from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.rules.recipe import Recipe, resolve_recipe
from loop_dagster.tables import ADAPTERS, TRAINING_SETS
from resources import StoreResource


@dg.asset(
    deps=[training_set],
    partitions_def=ATTEMPTS,
    group_name=GROUP,
    description=ADAPTERS.meaning,
    metadata=definition_metadata(ADAPTERS),
    kinds={"huggingface", "deltalake"},
)
def adapter(
    context: dg.AssetExecutionContext, store: StoreResource, children: dg.PipesSubprocessClient
) -> dg.MaterializeResult[None]:
    """Train in a child process, keep the best checked checkpoint; a second try goes on with a kept one."""
    with attempt_step(context, store.open(), "training", ends=True) as step:
        step.advance("preflighting", "Checking the base model, the chat template and the precision.")
        base = frozen_base(step.store, step.attempt)
        open_judge(frozen_judge(step))  # a judge that cannot be opened is found now, not after the training
        kept = _kept_before(step)
        if kept is None:
            job, recipe = _job(step, base)
            step.advance("job_creating", f"{recipe.sentence} This machine trains it.")
            step.advance("training", f"Training on {step.attempt.train_rows:,} samples.")
            result = run_step_child(context, children, step, module="train", job=job, result=TrainResult)
            kept = _keep(step, base, recipe, result, Path(job.out_dir))
        step.advance(
            "checkpoint_ready",
            f"Kept the weights of step {kept['kept_step']} of {kept['planned_steps']}.",
            base_digest=base.digest,
            adapter_digest=kept["adapter_digest"],
            gpu_seconds=round(kept["seconds"]),
        )
        return dg.MaterializeResult(metadata=_said_of(step, kept))


def load_check(step: StepRun) -> None:
    """Make sure that the attempt's adapter can be served before anything points at it.

    Weights and base are verified byte for byte; a running serving process loads it now, beside what is live. Raises
    what loading raised, and the live pointer then stays where it was.
    """
    attempt = step.attempt
    assert attempt.base_digest is not None
    assert attempt.adapter_digest is not None
    step.store.artifacts.open(attempt.adapter_digest, verify=True)
    verify(frozen_base(step.store, step.attempt).path, attempt.base_digest)
    prepare(step.store.settings, base_digest=attempt.base_digest, adapters=[attempt.adapter_digest])


def base_name(base: BaseModel) -> str:
    """What an adapter's config calls its base: a hub id, or a folder's name, never a path of this machine."""
    return base.path.name if base.model_id == str(base.path) else base.model_id


def _kept_before(step: StepRun) -> dict[str, Any] | None:
    """What an earlier try of this attempt kept and wrote, if it came so far."""
    rows = step.rows(ADAPTERS).to_dicts()
    return rows[0] if rows and step.store.artifacts.has(rows[0]["adapter_digest"]) else None


def _job(step: StepRun, base: BaseModel) -> tuple[TrainJob, Recipe]:
    """Write the rows where the child reads them, and resolve the recipe from them."""
    rows = step.rows(TRAINING_SETS).sort("ordinal")
    folder = step.work_folder("train")
    shutil.rmtree(folder / "adapter", ignore_errors=True)  # of a try that ended before it was kept
    rows_path = folder / "rows.jsonl"
    columns = ["sample_id", "role", "messages", "tools", "right_answer"]
    rows_path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.select(columns).to_dicts()))
    sizes = rows.select(pl.col("messages", "right_answer").str.len_bytes()).sum_horizontal().to_list()
    recipe = resolve_recipe(
        PipelineSettings.from_json(step.attempt.frozen["settings"]).training,
        rows=rows.filter(pl.col("role") == "train").height,
        mean_bytes=sum(sizes) / max(len(sizes), 1),
        family=base.family,
    )
    job = TrainJob(
        work_dir=str(folder),
        lease=lease_ref(step),
        seed=step.pipeline.seed % 2**31,
        base_path=str(base.path),
        base_digest=base.digest,
        base_name=base_name(base),
        rows_path=str(rows_path),
        out_dir=str(folder / "adapter"),
        max_length=step.attempt.frozen["length"]["max_tokens"],
        **recipe_fields(recipe),
    )
    return job, recipe


def _keep(step: StepRun, base: BaseModel, recipe: Recipe, result: TrainResult, folder: Path) -> dict[str, Any]:
    """Keep the adapter under its digest, under a valid lease, then write its row."""
    digest = step.store.artifacts.keep(folder, still_mine=step.lease.verify)
    row = {
        "adapter_digest": digest,
        "base_digest": base.digest,
        "dtype": result.dtype,
        "planned_steps": result.planned_steps,
        "trained_steps": result.trained_steps,
        "kept_step": result.kept_step,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "recipe": json.dumps(dataclasses.asdict(recipe)),
        "curve": json.dumps(result.curve),
        "created_at": utc_now(),
    }
    step.write(ADAPTERS, pl.DataFrame([row], schema_overrides=ADAPTERS.schema))
    return row


def _said_of(step: StepRun, kept: dict[str, Any]) -> dict[str, Any]:
    picture = as_markdown(training_curve_png(json.loads(kept["curve"]), kept["kept_step"]), "training curve")
    numbers = (
        "adapter_digest",
        "base_digest",
        "dtype",
        "planned_steps",
        "trained_steps",
        "kept_step",
        "tokens",
        "seconds",
    )
    return {
        **written(ADAPTERS, rows=1, version=step.store.lake.version(ADAPTERS)),
        **{name: kept[name] for name in numbers},
        "tokens_per_second": kept["tokens"] / max(kept["seconds"], 1e-9),
        "recipe": dg.MetadataValue.json(json.loads(kept["recipe"])),
        "curve": dg.MetadataValue.md(picture),
    }
