"""`loop samples` and `loop feedback`: what is there, what each sample is worth, and saying so."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, get_args

import polars as pl
import typer

from loop_dagster.cli.context import now, opened
from loop_dagster.cli.output import AsJson, emit_json, out, table
from loop_dagster.errors import BadRequest, LeaseBusy, NotFound
from loop_dagster.opening import states_of
from loop_dagster.rules.samples_state import State
from loop_dagster.store.giving import feedback_row
from loop_dagster.store.leases import this_process
from loop_dagster.store.open import Store
from loop_dagster.store.purging import purge_deleted
from loop_dagster.store.samples import among
from loop_dagster.store.selecting import live_that_learned
from loop_dagster.tables import SELECTIONS
from loop_dagster.wire import rebuilds, timestamp

app = typer.Typer(no_args_is_help=True)

#: Words of every door → stored word (rules.md, What a sample teaches).
STORED = {"good": "accepted", "bad": "rejected", "corrected": "edited", "gold": "gold"}
WORDS = {stored: word for word, stored in STORED.items()}
STATES: tuple[str, ...] = get_args(State)
#: How an attempt's split reads on the wire → roles of its selection.
SPLITS = {"train": ("train", "check"), "held_back": ("holdout",)}


@app.command("list")
def list_(
    pipeline: Annotated[str | None, typer.Option(help="Only what this pipeline selects, each with its state.")] = None,
    state: Annotated[
        str | None, typer.Option(help="held_back, learned, trained, waiting or left_out; needs --pipeline.")
    ] = None,
    attempt: Annotated[
        str | None, typer.Option(help="Only what this attempt (key or run id) took; see --split.")
    ] = None,
    split: Annotated[str, typer.Option(help="With --attempt: train or held_back.")] = "train",
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 25,
    offset: Annotated[int, typer.Option(min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Samples, newest first; with --pipeline, each with its state there and the sentence that says why."""
    store = opened()
    if state is not None and state not in STATES:
        raise BadRequest(f"--state must be one of {', '.join(STATES)}, got {state!r}.")
    if state is not None and pipeline is None:
        raise BadRequest("--state needs --pipeline: a sample's state is its state in one pipeline.")
    states = states_of(store, store.pipelines.get(pipeline), now()) if pipeline else None
    ids = _chosen(store, states, state, attempt, split)
    total = store.samples.count(now()) if states is None and attempt is None else ids.select(pl.len()).collect().item()
    page = ids.top_k(offset + limit, by="sample_id").collect()["sample_id"].sort(descending=True).slice(offset, limit)
    rows = _rows(store, page, states)
    if as_json:
        emit_json({"traces": rows, "total": total, "limit": limit, "offset": offset})
        return
    table(
        ("Sample", "Recorded", "Source", "Feedback", "State", "Why"),
        [
            (
                row["trace_id"],
                row["created_at"],
                row["deployment_id"],
                row["feedback"] or "none",
                (row.get("state") or {}).get("state"),
                (row.get("state") or {}).get("reason"),
            )
            for row in rows
        ],
        f"Samples {offset + 1} to {offset + len(rows)} of {total:,}",
    )


@app.command()
def show(sample: Annotated[str, typer.Argument(help="A sample's id.")], as_json: AsJson = False) -> None:
    """One sample with its conversation, feedback and tags."""
    store = opened()
    row = store.samples.get(sample, now())
    if row is None:
        raise NotFound("sample", sample)
    turns: list[dict[str, Any]] = json.loads(str(row["messages"]))
    answer: dict[str, Any] | None = json.loads(str(row["answer"])) if row["answer"] else None
    if as_json:
        emit_json({"trace": {**row, "messages": turns, "answer": answer}})
        return
    for message in [*turns, *([answer] if answer else [])]:
        out.print(f"[bold]{message['role']}[/bold]  ", end="")
        out.print(message.get("content") or json.dumps(message.get("tool_calls")), markup=False)
    feedback = row["feedback"]
    assert isinstance(feedback, list)
    table(
        ("At", "Verdict", "From"),
        [(one["created_at"], WORDS.get(one["verdict"], one["verdict"]), one["origin"]) for one in feedback],
        "Feedback",
    )


@app.command()
def counts(pipeline: Annotated[str, typer.Argument(help="Tag, id or name.")], as_json: AsJson = False) -> None:
    """How many samples of a pipeline are in each state, and why those that are left out are."""
    store = opened()
    states = states_of(store, store.pipelines.get(pipeline), now())
    grouped = states.group_by("state", "reason").len().sort("state", "len", descending=[False, True])
    if as_json:
        by_state = dict(states.group_by("state").len().iter_rows())
        emit_json({"states": by_state, "reasons": grouped.to_dicts(), "total": states.height})
        return
    table(("State", "Why", "Samples"), list(grouped.iter_rows()), f"{states.height:,} samples")


@app.command()
def delete(
    samples: Annotated[list[str], typer.Argument(help="Ids of samples.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; nothing asks without a terminal.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete samples with their feedback, also from stored training sets and from every file of the installation.

    Finished reports keep their copy under no name; what a step under way still works with goes once it has ended.
    """
    store = opened()
    for sample in samples:
        if store.samples.get(sample, now()) is None:
            raise NotFound("sample", sample)
    if not (yes or as_json) and sys.stdin.isatty():
        typer.confirm(f"Delete {len(samples)} samples for good?", abort=True)
    learned = live_that_learned(store, *samples)
    store.inbox.add_tombstones(samples, now=now())
    try:
        waiting = purge_deleted(store, holder=f"loop samples delete ({this_process()})").waiting
    except LeaseBusy:
        waiting = len(samples)
    if as_json:
        emit_json({"deleted": True, "trace_ids": samples, "purged": waiting == 0, "rebuilds": rebuilds(learned)})
        return
    out.print(f"Deleted {len(samples):,} samples: nobody sees them any more.")
    for pipeline in learned:
        said = "learned from them and owes a rebuild without them, which this version does not start by itself yet."
        out.print(f"What is live of {pipeline.name} {said}", markup=False)
    if waiting:
        out.print("The text of some leaves the files once the step that works with them has ended (job upkeep).")


def feedback(
    sample: Annotated[str, typer.Argument(help="A sample's id.")],
    verdict: Annotated[str, typer.Argument(help="good, bad, corrected or gold; the last two need --answer.")],
    answer: Annotated[str | None, typer.Option(help="The right answer.")] = None,
    reason: Annotated[str | None, typer.Option(help="Why, for whoever reads it later.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what an answer was worth; the newest feedback given here decides what the sample teaches."""
    store = opened()
    if verdict not in STORED:
        raise BadRequest(f"The verdict must be one of {', '.join(STORED)}, got {verdict!r}.")
    if (verdict in ("corrected", "gold")) != (answer is not None):
        raise BadRequest("corrected and gold need --answer, the right answer; good and bad take none.")
    if answer is not None and not answer.strip():
        raise BadRequest("--answer is empty; there is nothing to learn from it. Say bad, or give the right answer.")
    if store.samples.get(sample, now()) is None:
        raise NotFound("sample", sample)
    row = feedback_row(sample, STORED[verdict], answer, reason, now())
    store.inbox.put(feedback=[row], now=now())
    if as_json:
        emit_json({"signal": {"id": row["feedback_id"], "trace_id": sample, "verdict": row["verdict"]}})
        return
    out.print(f"Recorded {verdict} on {sample}.")


def _chosen(
    store: Store, states: pl.DataFrame | None, state: str | None, attempt: str | None, split: str
) -> pl.LazyFrame:
    """The column `sample_id` of what was asked for."""
    if attempt is not None:
        if split not in SPLITS:
            raise BadRequest(f"--split must be one of {', '.join(SPLITS)}, got {split!r}.")
        mine = pl.col("attempt") == store.attempts.find(attempt).key
        roles = pl.col("role").is_in(SPLITS[split])
        took = store.lake.scan(SELECTIONS).filter(mine & roles).select("sample_id")
        return took.join(store.samples.keys(now()).samples, on="sample_id", how="semi")
    if states is not None:
        return (states.filter(pl.col("state") == state) if state else states).lazy().select("sample_id")
    return store.samples.keys(now()).samples.select("sample_id")


def _rows(store: Store, ids: pl.Series, states: pl.DataFrame | None) -> list[dict[str, Any]]:
    """One page with the field names of the public client's traces, as far as they exist, newest first."""
    whole = store.samples.whole()
    here = among(ids)
    rows = whole.samples.filter(here).sort("sample_id", descending=True).collect()
    verdicts = whole.feedback.filter(here).sort("created_at", "feedback_id").collect()
    newest = {row["sample_id"]: row for row in verdicts.iter_rows(named=True) if row["origin"] != "judge"}
    given_here = {row["sample_id"]: row for row in verdicts.iter_rows(named=True) if row["origin"] == "here"}
    known = {row["sample_id"]: row for row in states.filter(here).iter_rows(named=True)} if states is not None else {}
    return [_row(row, given_here.get(row["sample_id"], newest.get(row["sample_id"])), known) for row in rows.to_dicts()]


def _row(row: dict[str, Any], deciding: dict[str, Any] | None, states: dict[str, dict[str, Any]]) -> dict[str, Any]:
    answer = json.loads(row["answer"]) if row["answer"] else {}
    found = {
        "id": row["sample_id"],
        "trace_id": row["sample_id"],
        "deployment_id": row["source"],
        "conversation_id": row["conversation_id"],
        "model": row["model"],
        "origin": row["origin"],
        "messages": json.loads(row["messages"]),
        "completion": answer.get("content"),
        "tool_calls": answer.get("tool_calls"),
        "flag": row["flag"],
        "feedback": WORDS.get(deciding["verdict"]) if deciding else None,
        "created_at": timestamp(row["created_at"]),
        "expires_at": timestamp(row["expires_at"]),
    }
    state = states.get(row["sample_id"])
    if state is not None:
        found["state"] = {key: state[key] for key in ("state", "attempt_no", "version_no", "reason")}
    return found
