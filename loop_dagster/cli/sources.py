"""`loop sources`: list, show, set: whether what comes from a source is recorded, for how long, under which tags."""

from __future__ import annotations

from typing import Annotated

import typer

from loop_dagster.cli.context import now, opened
from loop_dagster.cli.output import AsJson, emit_json, table
from loop_dagster.errors import BadRequest
from loop_dagster.store.sources import Source
from loop_dagster.wire import source_row

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The source's name: of the gateway's calls, the model asked for.")]


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """Every source that was set up, by name; any other is not recorded."""
    found = opened().sources.list()
    if as_json:
        emit_json({"sources": [source_row(one) for one in found], "total": len(found)})
        return
    _table(found)


@app.command()
def show(name: Name, as_json: AsJson = False) -> None:
    """How one source is recorded; one that nobody set up is switched off."""
    found = opened().sources.get(name)
    if as_json:
        emit_json({"source": source_row(found)})
        return
    _table((found,))


@app.command("set")
def set_(
    name: Name,
    on: Annotated[bool | None, typer.Option("--on/--off", help="Record what comes from it, or do not.")] = None,
    retention_days: Annotated[int | None, typer.Option(help="Days that its samples stay, 1 to 3,650.")] = None,
    sample_rate: Annotated[
        float | None, typer.Option(help="The share of its conversations that is recorded, 0 to 1.")
    ] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="Put on each of its samples; may be repeated.")] = None,
    no_tags: Annotated[bool, typer.Option("--no-tags", help="Put no tag on its samples any more.")] = False,
    as_json: AsJson = False,
) -> None:
    """Set a source up; what is not named stays as it is, and a new one is off until --on."""
    if tag and no_tags:
        raise BadRequest("--tag and --no-tags cannot go together. Nothing was saved.")
    if (on, retention_days, sample_rate) == (None, None, None) and not (tag or no_tags):
        raise BadRequest("Say what to set: --on or --off, --retention-days, --sample-rate, --tag or --no-tags.")
    saved = opened().sources.put(
        name,
        enabled=on,
        days=retention_days,
        sample_rate=sample_rate,
        tags=[] if no_tags else tag,
        now=now(),
    )
    if as_json:
        emit_json({"source": source_row(saved)})
        return
    _table((saved,))


def _table(sources: tuple[Source, ...]) -> None:
    rows = [(one.name, one.enabled, one.retention_days, one.sample_rate, list(one.tags)) for one in sources]
    table(("Source", "Recorded", "Days", "Share", "Tags"), rows, "Sources")
