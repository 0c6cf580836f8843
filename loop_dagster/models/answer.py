"""The child that lets both models answer an attempt's questions: `python -m loop_dagster.models.answer JOB.json`.

Belongs here: the job, its result, going on after a kill, the file of answers. Does not belong here: how a model
answers (`engine.py`), what the answers are worth (`judge.py`).

Rule: rules.md, How it is tested. Both models answer every question with the same decoding, from one loaded base.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loop_dagster.models.child import LeaseRef, Reporter, run
from loop_dagster.models.engine import Answer, Request, open_engine
from loop_dagster.models.journal import Journal
from loop_dagster.models.judge import Side
from loop_dagster.models.probe import Dtype, probe
from loop_dagster.models.template import Row, rows_of
from loop_dagster.rules import canonical

SIDES: tuple[Side, ...] = ("incumbent", "candidate")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef:
    """An adapter folder, its digest, and the digest of the base at the bottom of its line."""

    path: str
    digest: str
    base_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerJob:
    """What is asked, and of what.

    `candidate` and `incumbent` are adapters on the base, oldest first; no incumbent means the base as it is.
    `questions` is JSONL with sample_id, messages and tools (the columns of the table `questions`); `out` becomes JSONL
    with the columns of `answers` without the attempt's. A conversation of more than `max_length` tokens, or more than
    the model's own limit, is not asked. `dtype` null is what the probe says.
    """

    work_dir: str
    base_path: str
    base_digest: str
    candidate: tuple[AdapterRef, ...]
    incumbent: tuple[AdapterRef, ...] = ()
    questions: str
    out: str
    max_new_tokens: int
    max_length: int
    engine: str = "transformers"
    dtype: Dtype | None = None
    lease: LeaseRef | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerResult:
    """What was answered. `finishes` counts `side/finish`; `kept` answers are of an earlier try that was ended."""

    rows: int
    kept: int
    finishes: dict[str, int]
    answer_tokens: int
    seconds: float
    dtype: str
    device: str


def answer_questions(job: AnswerJob, reporter: Reporter) -> AnswerResult:
    """Do the job. Answers are kept as they come, in the work folder; `out` appears when all are there.

    Raises BaseChanged or AdapterRefused before anything is asked, Stopped after a signal.
    """
    began = time.monotonic()
    precision = probe()
    dtype = job.dtype or precision.dtype
    text = Path(job.questions).read_text(encoding="utf-8")
    questions = rows_of(json.loads(line) for line in text.splitlines() if line.strip())
    total = len(questions) * len(SIDES)
    header = {
        "base": job.base_digest,
        "adapters": {side: [adapter.digest for adapter in _adapters(job, side)] for side in SIDES},
        "questions": hashlib.sha256(text.encode()).hexdigest(),
        "limits": [job.max_new_tokens, job.max_length],
        "engine": [job.engine, dtype],
    }
    with Journal(Path(job.work_dir) / "answers.journal", header) as journal:
        kept = len(journal.rows)
        if kept < total:
            reporter.say(f"{precision.why} Answers in {dtype}; {kept} of {total} are there already.")
            _ask(job, dtype, questions, journal, reporter)
        rows = {(row["sample_id"], row["side"]): row for row in journal.rows}
    ordered = [rows[question.key, side] for question in questions for side in SIDES]
    reporter.beat()
    _write_whole(Path(job.out), ordered)
    reporter.report(total, total, unit="answer", force=True)
    return AnswerResult(
        rows=len(ordered),
        kept=kept,
        finishes=dict(sorted(Counter(f"{row['side']}/{row['finish']}" for row in ordered).items())),
        answer_tokens=sum(row["answer_tokens"] for row in ordered),
        seconds=round(time.monotonic() - began, 3),
        dtype=dtype,
        device=precision.device,
    )


def _adapters(job: AnswerJob, side: Side) -> tuple[AdapterRef, ...]:
    return job.candidate if side == "candidate" else job.incumbent


def _ask(job: AnswerJob, dtype: Dtype, questions: Sequence[Row], journal: Journal, reporter: Reporter) -> None:
    """Ask what the journal does not hold, one side after the other, and write each answer to it."""
    there = {(row["sample_id"], row["side"]) for row in journal.rows}
    total, before, began = len(questions) * len(SIDES), len(there), time.monotonic()
    engine = open_engine(job.engine, base=Path(job.base_path), base_digest=job.base_digest, dtype=dtype)
    try:
        for adapter in {each.digest: each for side in SIDES for each in _adapters(job, side)}.values():
            engine.load_adapter(adapter.digest, Path(adapter.path), base_digest=adapter.base_digest)
        for side in SIDES:

            def keep(answer: Answer, side: Side = side) -> None:
                journal.append(_row(answer, side))
                done = len(journal.rows)
                left_s = (time.monotonic() - began) / (done - before) * (total - done)
                reporter.report(done, total, unit="answer", side=side, seconds_left=round(left_s))

            engine.answer(
                [
                    Request(key=q.key, messages=q.messages, tools=q.tools, max_new_tokens=job.max_new_tokens)
                    for q in questions
                    if (q.key, side) not in there
                ],
                adapters=[adapter.digest for adapter in _adapters(job, side)],
                max_length=job.max_length,
                on_answer=keep,
                check=reporter.check,
            )
    finally:
        engine.close()


def _row(answer: Answer, side: Side) -> dict[str, Any]:
    return {
        "sample_id": answer.key,
        "side": side,
        "answer": None if answer.message is None else canonical.dumps(canonical.answer(answer.message)),
        "finish": answer.finish,
        "prompt_tokens": answer.prompt_tokens,
        "answer_tokens": answer.answer_tokens,
    }


def _write_whole(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_bytes(b"".join(canonical.dump_bytes(row) + b"\n" for row in rows))
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(run(AnswerJob, answer_questions))
