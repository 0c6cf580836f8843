"""`loop attempts` and `loop train`: what trained, why it ended as it did, start one, stop one."""

from __future__ import annotations

import json
from typing import Annotated, Any

import polars as pl
import typer

from loop_dagster import deciding
from loop_dagster.cli.context import now, opened
from loop_dagster.cli.output import AsJson, emit_json, err, flat, out, table
from loop_dagster.opening import train_now
from loop_dagster.report_words import got, needed
from loop_dagster.rules.decision import Bar
from loop_dagster.store.open import Store
from loop_dagster.store.records import Attempt
from loop_dagster.tables import REPORTS
from loop_dagster.wire import attempt_row, timestamp

app = typer.Typer(no_args_is_help=True)

Ref = Annotated[
    str, typer.Argument(help="An attempt's key (support-3f2a/0007), run id, or number where one pipeline has it.")
]
#: Bars as a person reads them, in the order of rules.md.
BAR_COLUMNS = ("Bar", "Needed", "Got", "Met", "In words")


@app.command("list")
def list_(
    pipeline: Annotated[str | None, typer.Option(help="Only of this pipeline (tag, id or name).")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 100,
    offset: Annotated[int, typer.Option(min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Attempts, newest first, with the field names of the public client's `PipelineAttempt`."""
    store = opened()
    rows = attempt_rows(store, pipeline)
    page = rows[offset : offset + limit]
    if as_json:
        emit_json({"attempts": page, "total": len(rows)})
        return
    table(
        ("Attempt", "Outcome", "Trained", "Held", "Won", "In words"),
        [
            (
                f"{row['pipeline_id']}/{row['attempt']:04d}",
                row["outcome"],
                row["train_rows"],
                row["holdout_rows"],
                row["win_rate"],
                row["explanation"]["headline"],
            )
            for row in page
        ],
        "Attempts",
    )


@app.command()
def show(ref: Ref, as_json: AsJson = False) -> None:
    """One attempt with its timeline, and every bar of its report: why it went live, or not."""
    store = opened()
    attempt = store.attempts.find(ref)
    pipeline = store.pipelines.get(attempt.pipeline_id, deleted=True)
    row = attempt_row(attempt, pipeline)
    timeline = [
        {"at": timestamp(event.at), "state": event.to_state, "sentence": event.sentence}
        for event in store.attempts.timeline(attempt.run_id)
    ]
    bars = bars_of(store, attempt)
    if as_json:
        emit_json({"attempt": row, "timeline": timeline, "bars": bars})
        return
    table(("Field", "Value"), flat({key: row[key] for key in row if key != "explanation"}))
    table(("At", "State", "What happened"), [tuple(event.values()) for event in timeline], "Timeline")
    print_bars(bars)
    explanation = row["explanation"]
    out.print(f"[bold]{explanation['headline']}.[/bold] {explanation['detail']} {explanation['next'] or ''}")


@app.command()
def cancel(ref: Ref, as_json: AsJson = False) -> None:
    """Stop an attempt that is under way; its samples go to the next one."""
    store = opened()
    attempt = store.attempts.request_cancel(
        store.attempts.find(ref).run_id, now=now(), sentence="Cancelled from the command line."
    )
    pipeline = store.pipelines.get(attempt.pipeline_id, deleted=True)
    if as_json:
        emit_json({"attempt": attempt_row(attempt, pipeline)})
        return
    out.print(f"Attempt {attempt.attempt_no} of {pipeline.tag} is cancelled.")


@app.command()
def approve(
    ref: Ref,
    force: Annotated[bool, typer.Option("--force", help="Also when the comparison was inconclusive.")] = False,
    as_json: AsJson = False,
) -> None:
    """Let an attempt that waits for a decision go live, as soon as the daemon has loaded it."""
    store = opened()
    _tell_decided(store, deciding.approve(store, store.attempts.find(ref), force=force, now=now()), as_json=as_json)


@app.command()
def reject(ref: Ref, as_json: AsJson = False) -> None:
    """Close an attempt that waits for a decision; what is live stays."""
    store = opened()
    _tell_decided(store, deciding.reject(store, store.attempts.find(ref), now=now()), as_json=as_json)


@app.command("test-again")
def test_again(ref: Ref, as_json: AsJson = False) -> None:
    """Compare an attempt that trained and was never tested with what is live now, while its adapter is kept."""
    store = opened()
    _tell_decided(store, deciding.test_again(store, store.attempts.find(ref), now=now()), as_json=as_json)


def _tell_decided(store: Store, attempt: Attempt, *, as_json: bool) -> None:
    pipeline = store.pipelines.get(attempt.pipeline_id, deleted=True)
    if as_json:
        emit_json({"attempt": attempt_row(attempt, pipeline)})
        return
    out.print(f"Attempt {attempt.attempt_no} of {pipeline.tag}: {attempt.reason}")


def train(
    pipeline: Annotated[str, typer.Argument(help="The pipeline's tag, id or name.")], as_json: AsJson = False
) -> None:
    """Train now: skips the schedule and the wait after a failure, never the minimum."""
    store = opened()
    found = store.pipelines.get(pipeline)
    attempt = train_now(store, found)
    if as_json:
        emit_json({"attempt": attempt_row(attempt, found)})
        return
    out.print(f"Attempt {attempt.attempt_no} of {found.tag} is open.")
    err.print("[dim]It runs while `loop dev` or `loop run --until-idle` does.[/dim]")


def attempt_rows(store: Store, pipeline: str | None) -> list[dict[str, Any]]:
    """Attempts of pipelines that are there, newest first, as `PipelineAttempt`."""
    chosen = store.pipelines.get(pipeline).pipeline_id if pipeline else None
    known = {one.pipeline_id: one for one in store.pipelines.list()}
    return [
        attempt_row(attempt, known[attempt.pipeline_id])
        for attempt in reversed(store.attempts.list(chosen))
        if attempt.pipeline_id in known
    ]


def bars_of(store: Store, attempt: Attempt) -> list[dict[str, Any]]:
    """The bars of the attempt's report, in order; empty while there is none."""
    stored = store.lake.scan(REPORTS).filter(pl.col("attempt") == attempt.key).select("bars").collect()
    return json.loads(stored.item()) if stored.height else []


def print_bars(bars: list[dict[str, Any]]) -> None:
    """The bars as a table for people."""
    if bars:
        known = [Bar(**bar) for bar in bars]
        rows = [(bar.key, needed(bar), got(bar), bar.met, bar.what) for bar in known]
        table(BAR_COLUMNS, rows, "Bars: better means that every one is met")


__all__ = ["app", "attempt_rows", "bars_of", "print_bars", "train"]
