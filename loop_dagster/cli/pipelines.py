"""`loop pipelines`: create, list, show, edit, apply from a file, pause, resume, delete."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from loop_dagster.cli.context import described, opened
from loop_dagster.cli.output import AsJson, emit_json, flat, out, table
from loop_dagster.errors import BadRequest
from loop_dagster.models.base import EMBEDDED, resolve
from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.store.open import Store
from loop_dagster.store.pipelines import Pipeline, settings_of

app = typer.Typer(no_args_is_help=True)

Ref = Annotated[str, typer.Argument(help="The pipeline's tag, id or name.")]
Model = Annotated[str, typer.Option("--model", help="A folder, a hub id, or the embedded model's id.")]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="A further tag to train on; may be repeated.")]
Dataset = Annotated[
    list[str] | None, typer.Option("--dataset", help="A dataset to train on too, by name or id; may be repeated.")
]
Feedback = Annotated[
    list[str] | None, typer.Option("--feedback", help="Train only on these: good, corrected, bad, unreviewed.")
]
Epochs = Annotated[int | None, typer.Option(help="Passes over the data, 1 to 15; automatic if left out.")]
Rate = Annotated[float | None, typer.Option("--learning-rate", help="1e-6 to 1e-2; automatic if left out.")]
Rank = Annotated[int | None, typer.Option("--lora-rank", help="4, 8, 16, 32 or 64; automatic if left out.")]
Alpha = Annotated[int | None, typer.Option("--lora-alpha", help="1 to 512; automatic if left out.")]
Replay = Annotated[int | None, typer.Option("--replay-percent", help="0 to 50; automatic if left out.")]
Holdout = Annotated[int | None, typer.Option("--holdout-percent", help="Share that is held back, 5 to 20.")]
Limit = Annotated[int | None, typer.Option("--max-versions", help="Stop after this many versions, 1 to 100.")]
Policy = Annotated[str | None, typer.Option("--promotion", help="`holdout` (goes live when better) or `manual`.")]
Every = Annotated[str | None, typer.Option("--every", help="Schedule: `day` or `week`; needs --hour.")]
Weekday = Annotated[int | None, typer.Option(help="Weekday of a weekly schedule, 0 is Sunday.")]
Hour = Annotated[int | None, typer.Option("--hour", help="Hour of the schedule, 0 to 23 UTC.")]
Auto = Annotated[
    bool | None,
    typer.Option("--auto-scoring/--no-auto-scoring", help="Let the judge score what nobody reviewed; on unless said."),
]


@app.command()
def create(
    name: Annotated[str, typer.Option(help="Name of the use case; its tag is made from it.")],
    model: Model = EMBEDDED,
    tag: Tags = None,
    dataset: Dataset = None,
    feedback: Feedback = None,
    epochs: Epochs = None,
    learning_rate: Rate = None,
    lora_rank: Rank = None,
    lora_alpha: Alpha = None,
    replay_percent: Replay = None,
    holdout_percent: Holdout = None,
    max_versions: Limit = None,
    promotion: Policy = None,
    every: Every = None,
    weekday: Weekday = None,
    hour: Hour = None,
    auto_scoring: Auto = None,
    as_json: AsJson = False,
) -> None:
    """Create a pipeline: its tag, its source, its live name `loop-<tag>`."""
    store = opened()
    training = _training(epochs, learning_rate, lora_rank, lora_alpha, replay_percent)
    when = (every, weekday, hour)
    given = _given(tag, feedback, training, holdout_percent, max_versions, promotion, *when, auto_scoring)
    settings = PipelineSettings.from_json(given | _datasets(store, dataset))
    base = resolve(model, store.settings.models_dir)
    pipeline = store.pipelines.create(name, model_id=_model_id(model), model_digest=base.digest, settings=settings)
    _show(store, pipeline, "Created", as_json=as_json)


@app.command()
def edit(
    ref: Ref,
    name: Annotated[str | None, typer.Option(help="A new name; the tag stays.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="A new base; the next attempt starts from it.")] = None,
    expected_revision: Annotated[
        int | None, typer.Option(help="Refuse if the pipeline is at another revision.")
    ] = None,
    tag: Tags = None,
    dataset: Dataset = None,
    feedback: Feedback = None,
    epochs: Epochs = None,
    learning_rate: Rate = None,
    lora_rank: Rank = None,
    lora_alpha: Alpha = None,
    replay_percent: Replay = None,
    holdout_percent: Holdout = None,
    max_versions: Limit = None,
    promotion: Policy = None,
    every: Every = None,
    weekday: Weekday = None,
    hour: Hour = None,
    auto_scoring: Auto = None,
    clear: Annotated[
        list[str] | None, typer.Option("--clear", help="Put a setting back to its default, as in training.epochs.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change what is given and nothing else; every change makes a new revision."""
    store = opened()
    training = _training(epochs, learning_rate, lora_rank, lora_alpha, replay_percent)
    when = (every, weekday, hour)
    given = _given(tag, feedback, training, holdout_percent, max_versions, promotion, *when, auto_scoring)
    given |= _datasets(store, dataset)
    for path in clear or []:
        _clear(given, path)
    digest = resolve(model, store.settings.models_dir).digest if model else None
    before = store.pipelines.get(ref)
    pipeline = store.pipelines.edit(
        ref,
        settings=given,
        name=name,
        model_id=_model_id(model) if model else None,
        model_digest=digest,
        expected_revision=expected_revision,
    )
    _show(store, pipeline, "Nothing changed in" if pipeline == before else "Saved", as_json=as_json)


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """Every pipeline of this workspace."""
    store = opened()
    rows = [described(store, pipeline) for pipeline in store.pipelines.list()]
    if as_json:
        emit_json({"pipelines": rows, "total": len(rows)})
        return
    columns = ("Name", "Tag", "Model", "On", "Attempts", "Live")
    table(
        columns,
        [
            (
                row["rule_name"],
                row["own_tag"],
                row["base_model_id"],
                row["enabled"],
                row["attempts_total"],
                f"v{row['live_version']}" if row["live_version"] else None,
            )
            for row in rows
        ],
        "Pipelines",
    )


@app.command()
def show(ref: Ref, as_json: AsJson = False) -> None:
    """One pipeline with what its next attempt has and needs, counted now."""
    store = opened()
    row = described(store, store.pipelines.get(ref), measured=True)
    if as_json:
        emit_json({"pipeline": row})
        return
    said = row["auto_scoring"].pop("message")
    shown = {**row, "datasets": [one["name"] for one in row["datasets"]]}
    table(("Setting", "Value"), flat({key: shown[key] for key in shown if key != "minimums"}), row["rule_name"])
    out.print(row["minimums"]["message"])
    out.print(said)


@app.command()
def apply(
    file: Annotated[Path, typer.Option("--file", "-f", help="A YAML file of one pipeline or a list of them.")],
    as_json: AsJson = False,
) -> None:
    """Make pipelines as a file says; applying it twice changes nothing."""
    store = opened()
    specs = _specs(file)
    for spec in specs:  # all of them are read before the first is applied
        settings_of(spec)
    results = []
    for spec in specs:
        outcome, pipeline = apply_spec(store, spec, beside=file.parent)
        results.append({"outcome": outcome, **described(store, pipeline)})
    if as_json:
        emit_json({"pipelines": results, "total": len(results)})
        return
    table(("Pipeline", "Outcome"), [(row["own_tag"], row["outcome"]) for row in results], "Applied")


@app.command()
def pause(ref: Ref, as_json: AsJson = False) -> None:
    """Start no further attempt; one under way finishes and is decided."""
    store = opened()
    verb = "Paused" if store.pipelines.get(ref).enabled else "It was paused already:"
    _show(store, store.pipelines.pause(ref), verb, as_json=as_json)


@app.command()
def resume(ref: Ref, as_json: AsJson = False) -> None:
    """Switch a paused pipeline back on."""
    store = opened()
    verb = "It was on already:" if store.pipelines.get(ref).enabled else "Switched on"
    _show(store, store.pipelines.resume(ref), verb, as_json=as_json)


@app.command()
def delete(
    ref: Ref,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; nothing asks without a terminal.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete a pipeline: its attempt is cancelled, its live name stops, its samples stay, its name stays taken."""
    store = opened()
    if not (yes or as_json) and sys.stdin.isatty():
        pipeline = store.pipelines.get(ref)
        typer.confirm(
            f"Delete {pipeline.name}? {pipeline.live_name} stops answering, and the name is never free again.",
            abort=True,
        )
    gone = store.pipelines.delete(ref)
    if as_json:
        emit_json({"deleted": True, "rule_id": gone.pipeline.pipeline_id, "cancelled_run_id": gone.cancelled_run_id})
        return
    out.print(f"Deleted {gone.pipeline.tag}." + (" Its attempt was cancelled." if gone.cancelled_run_id else ""))


def apply_spec(store: Store, spec: dict[str, Any], *, beside: Path) -> tuple[str, Pipeline]:
    """Apply one pipeline of a file that lies in `beside`; `created`, `changed` or `unchanged`, and the pipeline.

    A model folder with a relative path is looked for beside the file first; a dataset may stand by its name.
    """
    model = spec.get("model", EMBEDDED)
    if isinstance(model, dict):
        model = model.get("id")
    if not isinstance(model, str):
        raise BadRequest(f"model must be a folder, a hub id or {{id: …}}, got {model!r}.")
    if (beside / model).is_dir():
        model = str(beside / model)
    digest = resolve(model, store.settings.models_dir).digest
    spec = {**spec, "model": _model_id(model)} | _datasets(store, spec.get("datasets"))
    outcome = store.pipelines.apply(spec, model_digest=digest)
    return outcome, store.pipelines.get(str(spec["name"]))


def _datasets(store: Store, refs: list[str] | None) -> dict[str, list[str]]:
    """The setting for datasets named by name or id; nothing where none were named."""
    return {"datasets": [store.datasets.get(ref).dataset_id for ref in refs]} if refs else {}


class _Yaml(yaml.SafeLoader):
    """YAML 1.1 reads `1e-4` as text; people who write learning rates mean the number."""


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def _specs(file: Path) -> list[dict[str, Any]]:
    try:
        loaded = yaml.load(file.read_text(encoding="utf-8"), Loader=_Yaml)  # noqa: S506  # a SafeLoader
    except FileNotFoundError:
        raise BadRequest(f"There is no file {file.name}.") from None
    except IsADirectoryError:
        raise BadRequest(f"{file.name} is a folder. Name a YAML file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadRequest(f"{file.name} is not YAML in UTF-8: {error}") from None
    specs = loaded if isinstance(loaded, list) else [loaded]
    if not specs or not all(isinstance(spec, dict) for spec in specs):
        raise BadRequest(f"{file.name} must hold one pipeline (name, model, settings) or a list of them.")
    return specs


def _model_id(model: str) -> str:
    """A folder as absolute path, so that it is found from anywhere; anything else as it is."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model


def _training(
    epochs: int | None, rate: float | None, rank: int | None, alpha: int | None, replay: int | None
) -> dict[str, Any]:
    given = {
        "epochs": epochs,
        "learning_rate": rate,
        "lora_rank": rank,
        "lora_alpha": alpha,
        "replay_percent": replay,
    }
    return {key: value for key, value in given.items() if value is not None}


def _given(
    tag: list[str] | None,
    feedback: list[str] | None,
    training: dict[str, Any],
    holdout_percent: int | None,
    max_versions: int | None,
    promotion: str | None,
    every: str | None,
    weekday: int | None,
    hour: int | None,
    auto_scoring: bool | None,
) -> dict[str, Any]:
    """Settings in the API's nesting, only what was given."""
    given: dict[str, Any] = {}
    if tag:
        given["tags"] = tag
    if feedback:
        given["conditions"] = {"feedback": feedback}
    if training:
        given["training"] = training
    if holdout_percent is not None:
        given["holdout"] = {"percent": holdout_percent}
    if max_versions is not None:
        given["max_versions"] = max_versions
    if promotion is not None:
        given["promotion"] = {"policy": promotion}
    if auto_scoring is not None:
        given["auto_scoring"] = auto_scoring
    if every is not None or hour is not None or weekday is not None:
        schedule = {"every": every, "weekday": weekday, "hour_utc": hour}
        given["train_when"] = {"schedule": {key: value for key, value in schedule.items() if value is not None}}
    return given


def _clear(given: dict[str, Any], path: str) -> None:
    *parents, leaf = path.split(".")
    at = given
    for part in parents:
        at = at.setdefault(part, {})
    at[leaf] = None


def _show(store: Store, pipeline: Pipeline, verb: str, *, as_json: bool) -> None:
    row = described(store, pipeline)
    if as_json:
        emit_json({"pipeline": row, "tag": pipeline.tag, "pipeline_id": pipeline.pipeline_id})
        return
    out.print(
        f"{verb} {pipeline.name}: tag {pipeline.tag}, revision {pipeline.revision}, answers as {pipeline.live_name}."
    )
