"""`loop versions` and `loop ask`: what went live, and what it answers."""

from __future__ import annotations

from typing import Annotated

import typer

from loop_dagster.cli.context import opened
from loop_dagster.cli.output import AsJson, emit_json, err, out, table
from loop_dagster.errors import BadRequest
from loop_dagster.wire import version_row

app = typer.Typer(no_args_is_help=True)


@app.command("list")
def list_(
    pipeline: Annotated[str | None, typer.Option(help="Only of this pipeline (tag, id or name).")] = None,
    as_json: AsJson = False,
) -> None:
    """Versions, newest first, with the field names of the public client's `PipelineVersion`."""
    store = opened()
    pipelines = [store.pipelines.get(pipeline)] if pipeline else store.pipelines.list()
    rows = []
    for one in pipelines:
        live = store.versions.live(one.tag)
        for version in reversed(store.versions.list(one.pipeline_id)):
            attempt = store.attempts.get(version.run_id)
            is_live = live is not None and live.version_no == version.version_no
            rows.append({"tag": one.tag, **version_row(version, attempt, live=is_live)})
    if as_json:
        emit_json({"versions": rows, "total": len(rows)})
        return
    table(
        ("Version", "Attempt", "Live", "Promoted at", "Win rate", "Passed", "Passed before"),
        [
            (
                f"{row['tag']} v{row['version']}",
                f"#{row['attempt']}",
                row["is_live"],
                row["promoted_at"],
                row["win_rate"],
                row["candidate_pass_rate"],
                row["incumbent_pass_rate"],
            )
            for row in rows
        ],
        "Versions",
    )


def ask(
    tag: Annotated[str, typer.Argument(help="The pipeline's tag, id or name.")],
    question: Annotated[str, typer.Argument(help="What a user would say.")],
    as_json: AsJson = False,
) -> None:
    """Answer with the live version; at once while `loop dev` keeps it loaded."""
    from loop_dagster.models.serve import ask as ask_live

    if not question.strip():
        raise BadRequest("The question is empty. Say what a user would say.")
    if any("\ud800" <= sign <= "\udfff" for sign in question):  # how Python passes on bytes that are no text
        raise BadRequest("The question is no text in UTF-8. Set the terminal to UTF-8 and ask again.")
    store = opened()
    pipeline = store.pipelines.get(tag)
    answer = ask_live(pipeline.tag, question, store.settings)
    if as_json:
        emit_json(
            {
                "answer": answer.text,
                "model": pipeline.live_name,
                "version": answer.version_no,
                "served_by": answer.served_by,
            }
        )
        return
    out.print(answer.text, markup=False)
    err.print(f"[dim]{pipeline.live_name} v{answer.version_no}, {answer.served_by}[/dim]")
