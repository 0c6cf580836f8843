"""`loop datasets`: list, create, show, delete, export."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from loop_dagster.cli.context import now, opened
from loop_dagster.cli.output import AsJson, emit_json, flat, out, table
from loop_dagster.errors import BadRequest
from loop_dagster.rules.conditions import DatasetConditions
from loop_dagster.rules.matching import counts
from loop_dagster.store.datasets import Dataset, using
from loop_dagster.store.exporting import exported
from loop_dagster.store.open import Store
from loop_dagster.wire import dataset_row, pipeline_ref

app = typer.Typer(no_args_is_help=True)

Ref = Annotated[str, typer.Argument(help="The dataset's name or id.")]


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """Every dataset of this workspace with what it selects now, the most recently changed first."""
    store = opened()
    rows = _rows(store, store.datasets.list())
    if as_json:
        emit_json({"datasets": rows, "total": len(rows)})
        return
    shown = [(row["name"], row["id"], row["samples"], [one["name"] for one in row["used_by"]]) for row in rows]
    table(("Name", "Id", "Samples", "Used by"), shown, "Datasets")


@app.command()
def create(
    name: Annotated[str, typer.Option(help="Its name, unique in the workspace whatever its case.")],
    tag: Annotated[list[str] | None, typer.Option("--tag", help="Select by this tag; may be repeated.")] = None,
    match: Annotated[str | None, typer.Option(help="`any` of the tags (the default), or `all`.")] = None,
    feedback: Annotated[
        list[str] | None, typer.Option("--feedback", help="Only these: good, corrected, bad, unreviewed.")
    ] = None,
    origin: Annotated[str | None, typer.Option(help="`captured` or `imported`.")] = None,
    model: Annotated[str | None, typer.Option(help="Only what this model answered.")] = None,
    since: Annotated[str | None, typer.Option("--from", help="Recorded since, as 2026-01-31T00:00:00Z.")] = None,
    until: Annotated[str | None, typer.Option("--to", help="Recorded then or before.")] = None,
    as_json: AsJson = False,
) -> None:
    """Save a set of conditions, all of which hold together; without any it is every sample."""
    given = {"tags": tag, "match": match, "feedback": feedback, "origin": origin, "model": model}
    conditions = {**given, "from": since, "to": until}
    wanted = DatasetConditions.from_json({key: value for key, value in conditions.items() if value is not None})
    store = opened()
    made = store.datasets.create(name, conditions=wanted)
    [row] = _rows(store, [made])
    if as_json:
        emit_json({"dataset": row, "dataset_id": made.dataset_id})
        return
    out.print(f"Saved {made.name} ({made.dataset_id}); it selects {row['samples']:,} samples now.")


@app.command()
def show(ref: Ref, as_json: AsJson = False) -> None:
    """One dataset: its conditions, what it selects now by feedback, and which pipelines train on it."""
    store = opened()
    [row] = _rows(store, [store.datasets.get(ref)])
    if as_json:
        emit_json({"dataset": row})
        return
    shown = {**row, "used_by": [one["name"] for one in row["used_by"]]}
    table(("Condition", "Value"), flat(shown), row["name"])


@app.command()
def delete(
    ref: Ref,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; nothing asks without a terminal.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete a dataset and take it off every pipeline; its samples stay."""
    store = opened()
    if not (yes or as_json) and sys.stdin.isatty():
        found = store.datasets.get(ref)
        names = ", ".join(one.name for one in using(store.pipelines.list(), found.dataset_id)) or "no pipeline"
        typer.confirm(f"Delete {found.name}? It is taken off {names}, and its samples stay.", abort=True)
    gone = store.datasets.delete(ref)
    if as_json:
        emit_json({"deleted": True, "removed_from": [pipeline_ref(one) for one in gone.removed_from]})
        return
    names = ", ".join(one.name for one in gone.removed_from)
    out.print(f"Deleted {gone.dataset.name}." + (f" {names} trains on it no more." if names else ""))


@app.command()
def export(
    ref: Ref,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file; standard output unless given.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this many samples.")] = None,
    as_json: AsJson = False,
) -> None:
    """Its samples as JSONL, the oldest first, in the rows that `loop import` takes back as they are."""
    if as_json and output is None:
        raise BadRequest("--json needs --output: without a file the samples themselves go to standard output.")
    store = opened()
    blocks = exported(store, store.datasets.get(ref).conditions, now=now(), limit=limit)
    if output is None:
        for block in blocks:
            sys.stdout.buffer.write(block)
        sys.stdout.buffer.flush()
        return
    samples = _write(output, blocks)
    if as_json:
        emit_json({"samples": samples, "file": output.name})
        return
    out.print(f"Wrote {samples:,} samples to {output.name}.")


def _write(path: Path, blocks: Iterator[bytes]) -> int:
    """Write beside the file and put it there when it is whole; how many lines it has."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise BadRequest(f"{path.name} cannot be written: name a file in a folder that is there.")
    part = path.with_name(path.name + ".part")
    lines = 0
    try:
        with part.open("wb") as file:
            for block in blocks:
                file.write(block)
                lines += block.count(b"\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return lines


def _rows(store: Store, datasets: Sequence[Dataset]) -> list[dict[str, Any]]:
    keys = store.samples.keys()
    groups = [one.conditions for one in datasets]
    found = counts(keys.samples, keys.feedback, keys.labels, groups=groups, now=now())
    pipelines = store.pipelines.list()
    pairs = zip(datasets, found, strict=True)
    return [dataset_row(one, samples, using(pipelines, one.dataset_id)) for one, samples in pairs]
