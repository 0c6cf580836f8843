"""`loop import`: a file of conversations into a pipeline."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from loop_dagster.cli.context import now, opened
from loop_dagster.cli.output import AsJson, emit_error, emit_json, err, out, progress, table
from loop_dagster.errors import EXIT_FAILED, EXIT_UNAVAILABLE, BadRequest
from loop_dagster.store.import_result import ImportResult
from loop_dagster.store.intake import import_for_pipeline
from loop_dagster.store.leases import this_process

#: Rows of a table of refusals that a person is shown.
SHOWN = 50


def import_(
    file: Annotated[Path, typer.Argument(help="JSONL, one conversation a line, or one JSON array.")],
    pipeline: Annotated[str, typer.Option("--pipeline", help="Tag, id or name; its tag is put on every row.")],
    default_feedback: Annotated[
        str | None,
        typer.Option("--default-feedback", help="`good`: answered rows without a verdict are good examples."),
    ] = None,
    source: Annotated[str | None, typer.Option(help="What the rows come from; the pipeline's tag if left out.")] = None,
    label: Annotated[list[str] | None, typer.Option("--label", help="A further tag for every row.")] = None,
    import_id: Annotated[
        str | None, typer.Option(help="Identity of this import; the digest of the file if left out.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import a file. Importing it again adds nothing, so after an interruption just run it again."""
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise BadRequest(f"{file} {what}. Name a JSONL file or a JSON array.")
    if default_feedback not in (None, "good"):
        raise BadRequest(f"--default-feedback must be `good` or left out, got {default_feedback!r}.")
    store = opened()
    found = store.pipelines.get(pipeline)
    with progress("Importing", quiet=as_json or not err.is_terminal) as update:
        result = import_for_pipeline(
            store,
            file,
            found,
            holder=f"loop import ({this_process()})",
            now=now(),
            source=source,
            labels=tuple(label or ()),
            default_feedback=default_feedback,
            import_id=import_id,
            on_progress=update,
        )
    if as_json:
        emit_json(result.as_dict())
    else:
        _print(result, found.tag)
    if not result.complete:
        if not as_json:
            emit_error({"error": result.as_dict()["error"]}, as_json=False)
        sys.exit(EXIT_UNAVAILABLE)
    if result.refused and not (result.imported or result.already_present):
        sys.exit(EXIT_FAILED)  # a script must not take a file of which nothing was taken for a success


def _print(result: ImportResult, tag: str) -> None:
    if not (result.imported or result.already_present or result.refused or result.not_saved):
        out.print("The file holds no row: it is empty, or all of it is white space. Nothing was stored.")
        return
    out.print(
        f"Imported {result.imported:,} samples into {tag}: {result.reviewed:,} with a verdict, "
        f"{result.needs_review:,} wait for one, {result.waiting_for_answer:,} wait for an answer. "
        f"{result.already_present:,} were there already, {result.refused:,} were refused."
    )
    if result.redacted:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(result.redacted.items()))
        out.print(f"Replaced by markers before anything was stored: {kinds}.")
    for title, total, notes in (
        ("Refused", result.refused, result.refused_rows),
        ("Imported, and odd", result.flagged, result.flagged_rows),
    ):
        if notes:
            rows = [(one.row, one.line, one.code, one.sentence) for one in notes[:SHOWN]]
            table(("Row", "Line", "Code", "Why"), rows, title)
        if total > SHOWN:
            out.print(f"… and {total - min(SHOWN, len(notes)):,} more; --json names up to 1,000 of them.")
    for note in result.notes:
        out.print(note)
