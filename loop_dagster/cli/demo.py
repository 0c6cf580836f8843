"""`loop demo`: the main job on the embedded default, from a file of conversations to a live version.

Nothing here knows the company: pipeline, conversations and unseen questions come from examples/. Every rule is the real
one, with the real daemon and the real sensors; only what a person would type is typed here.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer
import yaml

from loop_dagster.cli.attempts import attempt_rows, bars_of, print_bars
from loop_dagster.cli.context import now, opened
from loop_dagster.cli.output import AsJson, emit_json, err, out, table
from loop_dagster.cli.pipelines import apply_spec
from loop_dagster.cli.watching import until_idle
from loop_dagster.errors import EXIT_FAILED, DiskFull
from loop_dagster.models.serve import ask_both
from loop_dagster.processes import PROJECT, running, start_daemon
from loop_dagster.store.intake import import_for_pipeline
from loop_dagster.store.leases import this_process
from loop_dagster.store.open import Store
from loop_dagster.store.pipelines import Pipeline

EXAMPLES = PROJECT / "examples"
#: What a demo writes at the most: the converted base model, the lake, adapters, logs.
NEEDS_BYTES = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Unseen:
    """A question that is in no file that the demo imports, with the right answer."""

    question: str
    right_answer: str


def demo(
    questions: Annotated[int, typer.Option(help="How many unseen questions to ask at the end.", min=1, max=44)] = 3,
    as_json: AsJson = False,
) -> None:
    """Import a made-up company's conversations, let the sensor open attempt 1, and put the winner live as v1."""
    started = time.monotonic()
    store = opened()
    _check_disk(store)
    pipeline = _prepare(store, quiet=as_json)
    before = store.versions.live(pipeline.tag)
    daemon = start_daemon(store.settings)
    with running(daemon):
        watch = until_idle(store, daemon, quiet=as_json)
    live = store.versions.live(pipeline.tag)
    answers = _ask(store, pipeline, questions)
    seconds = time.monotonic() - started
    if as_json:
        attempts = attempt_rows(store, pipeline.tag)
        emit_json({"attempts": attempts, "live_version": live.version_no if live else None, "answers": answers})
    else:
        _tell(store, pipeline, answers, seconds, changed=bool(watch.ended) or before != live)
    if watch.failed or live is None:
        sys.exit(EXIT_FAILED)


def _check_disk(store: Store) -> None:
    free = shutil.disk_usage(store.settings.root).free
    if free < NEEDS_BYTES:
        raise DiskFull(str(store.settings.home), free, NEEDS_BYTES)


def _prepare(store: Store, *, quiet: bool) -> Pipeline:
    """Apply the pipeline's file and import its conversations; both change nothing the second time."""
    spec = yaml.safe_load((EXAMPLES / "pipeline.yaml").read_text(encoding="utf-8"))
    if not quiet:
        err.print("Preparing the embedded base model (the first time, about 20 s) and the pipeline …")
    outcome, pipeline = apply_spec(store, spec, beside=EXAMPLES)
    result = import_for_pipeline(
        store, EXAMPLES / "company.jsonl", pipeline, holder=this_process(), now=now(), default_feedback="good"
    )
    if not quiet:
        out.print(
            f"Pipeline {pipeline.tag} {outcome}; {result.imported:,} conversations imported, "
            f"{result.already_present:,} were there already."
        )
    return pipeline


def _unseen(count: int) -> list[Unseen]:
    lines = (EXAMPLES / "company_unseen.jsonl").read_text(encoding="utf-8").splitlines()
    step = max(1, len(lines) // count)
    rows = [json.loads(line)["messages"] for line in lines[::step][:count]]
    return [Unseen(question=row[-2]["content"], right_answer=row[-1]["content"]) for row in rows]


def _ask(store: Store, pipeline: Pipeline, count: int) -> list[dict[str, Any]]:
    """What the base and the live version answer to questions that nobody imported."""
    unseen = _unseen(count)
    given = ask_both(pipeline.tag, [one.question for one in unseen], store.settings)
    return [
        {"question": one.question, "base": base, "live": live, "right_answer": one.right_answer}
        for one, (base, live) in zip(unseen, given, strict=True)
    ]


def _tell(store: Store, pipeline: Pipeline, answers: list[dict[str, Any]], seconds: float, *, changed: bool) -> None:
    attempt = store.attempts.list(pipeline.pipeline_id)[-1]
    print_bars(bars_of(store, attempt))
    live = store.versions.live(pipeline.tag)
    version = f"v{live.version_no}" if live else "nothing live"
    rows = [(row["question"], row["base"], row["live"], row["right_answer"]) for row in answers]
    table(("Unseen question", "Base model", version, "Right answer"), rows, "Questions that are in no imported file")
    if not changed:
        out.print("Nothing changed: every conversation was there already and no attempt was due.")
    if live is not None:
        out.print(f"[bold]{pipeline.live_name} answers with {version}.[/bold] It took {seconds / 60:.1f} minutes.")
    out.print(
        "\nWhere to look next (`source .venv/bin/activate` makes `loop` a plain word)\n"
        f'  loop ask {pipeline.tag} "a question of yours"   ask the live version\n'
        f"  loop attempts show {attempt.key}   its timeline and bars\n"
        f"  loop report {attempt.key} --html   every held-back conversation, both answers side by side, as one page\n"
        "  make dev                          Dagster's UI: lineage, curve and scores of each attempt\n"
        "  docs/first-own-model.md           your own file, model and judge",
        highlight=False,
    )
