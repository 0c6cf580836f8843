"""The answering child on a real tiny model; as a process of its own where its end is what is tested."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_adapter

from loop_dagster.errors import AdapterRefused, BaseChanged, ChildFailed
from loop_dagster.models.answer import AdapterRef, AnswerJob, AnswerResult, answer_questions
from loop_dagster.models.base import digest_of
from loop_dagster.models.child import Reporter, command, read_result, write_job
from loop_dagster.models.engine import Request, TransformersEngine, open_engine
from loop_dagster.models.journal import Journal
from loop_dagster.rules import canonical
from loop_dagster.tables import ANSWERS
from loop_dagster.tables.base import ATTEMPT_COLUMNS

pytestmark = pytest.mark.model

OWN_COLUMNS = set(ANSWERS.schema) - {column.name for column in ATTEMPT_COLUMNS}


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef]:
    base = digest_of(tiny_model)
    made = [tiny_adapter.adapter(tiny_model, tmp_path_factory.mktemp("made"), seed=seed) for seed in (1, 2)]
    return [AdapterRef(path=str(path), digest=f"{at}" * 64, base_digest=base) for at, path in enumerate(made)]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[TransformersEngine]:
    engine = open_engine(base=tiny_model, base_digest=digest_of(tiny_model), dtype="float32")
    assert isinstance(engine, TransformersEngine)
    yield engine
    engine.close()


def _questions(count: int) -> list[dict[str, Any]]:
    found = []
    for at, fact in enumerate(tiny.facts(count)):
        messages, _ = tiny.conversation(fact, at)
        found.append({"sample_id": f"s{at:04}", "messages": canonical.dumps(messages), "tools": None})
    return found


def _job(folder: Path, base: Path, questions: list[dict[str, Any]], **fields: Any) -> AnswerJob:
    folder.mkdir(exist_ok=True)
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in questions), encoding="utf-8")
    return AnswerJob(
        work_dir=str(folder / "work"),
        base_path=str(base),
        base_digest=digest_of(base),
        questions=str(path),
        out=str(folder / "answers.jsonl"),
        max_new_tokens=fields.pop("max_new_tokens", 20),
        max_length=fields.pop("max_length", 32_768),
        dtype="float32",
        **fields,
    )


def _start(job: AnswerJob) -> subprocess.Popen[bytes]:
    path = write_job(Path(job.work_dir).parent / "job.json", job)
    return subprocess.Popen(command("answer", path), stderr=subprocess.DEVNULL)


def _here(job: AnswerJob) -> AnswerResult:
    """The same work in this process."""
    return answer_questions(job, Reporter(job.work_dir, log=lambda _: None))


def _rows(job: AnswerJob) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(job.out).read_text(encoding="utf-8").splitlines()]


def test_both_sides_answer_every_question(
    tiny_model: Path, tmp_path: Path, adapters: list[AdapterRef], engine: TransformersEngine
) -> None:
    questions = _questions(12)
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    long = [{"role": "user", "content": "What is the city of banek? " * 30}]
    call = {"function": {"arguments": {"b": 1e2, "a": 1}, "name": "look"}, "id": "c", "type": "function"}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    asks = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "c"},
    ]
    questions += [
        {"sample_id": "refused", "messages": canonical.dumps(twice), "tools": None},
        {"sample_id": "long", "messages": canonical.dumps(long), "tools": None},
        {"sample_id": "tools", "messages": canonical.dumps(asks), "tools": canonical.dumps(tools)},
    ]
    job = _job(tmp_path, tiny_model, questions, candidate=(adapters[0],), max_length=200)
    assert _start(job).wait(timeout=120) == 0
    result = read_result(AnswerResult, job.work_dir)
    rows = _rows(job)
    assert [(row["sample_id"], row["side"]) for row in rows] == [
        (question["sample_id"], side) for question in questions for side in ("incumbent", "candidate")
    ]
    assert all(set(row) == OWN_COLUMNS for row in rows)
    assert all(row["finish"] in ANSWERS["finish"].words for row in rows)
    assert (result.rows, result.kept, result.dtype) == (30, 0, "float32")
    assert sum(result.finishes.values()) == 30
    finishes = {(row["sample_id"], row["side"]): row["finish"] for row in rows}
    assert finishes["refused", "candidate"] == finishes["refused", "incumbent"] == "error"
    assert finishes["long", "candidate"] == finishes["long", "incumbent"] == "too_long"
    asked = [Request(key=q["sample_id"], messages=json.loads(q["messages"]), max_new_tokens=20) for q in questions[:12]]
    engine.load_adapter("x", Path(adapters[0].path), base_digest=adapters[0].base_digest)
    for side, names in (("incumbent", ()), ("candidate", ("x",))):
        for answer in engine.answer(asked, adapters=names):
            row = next(row for row in rows if (row["sample_id"], row["side"]) == (answer.key, side))
            assert answer.message is not None
            assert row["answer"] == canonical.dumps(answer.message)
            assert (row["prompt_tokens"], row["answer_tokens"]) == (answer.prompt_tokens, answer.answer_tokens)
    engine.unload_adapter("x")
    progress = json.loads((Path(job.work_dir) / "progress.json").read_text())
    assert (progress["done"], progress["total"], progress["unit"]) == (30, 30, "answer")


def test_an_incumbent_with_an_adapter_answers_with_it(
    tiny_model: Path, tmp_path: Path, adapters: list[AdapterRef]
) -> None:
    questions = _questions(4)
    one = _job(tmp_path / "one", tiny_model, questions, candidate=(adapters[0],), incumbent=(adapters[1],))
    other = _job(tmp_path / "other", tiny_model, questions, candidate=(adapters[1],), incumbent=(adapters[0],))
    _here(one)
    _here(other)

    def by_side(job: AnswerJob, side: str) -> list[str]:
        return [row["answer"] for row in _rows(job) if row["side"] == side]

    assert by_side(one, "incumbent") == by_side(other, "candidate") != by_side(one, "candidate")
    assert by_side(one, "candidate") == by_side(other, "incumbent")


def test_a_killed_child_goes_on_where_it_was(tiny_model: Path, tmp_path: Path, adapters: list[AdapterRef]) -> None:
    questions = _questions(200)
    job = _job(tmp_path / "killed", tiny_model, questions, candidate=(adapters[0],))
    journal = Path(job.work_dir) / "answers.journal"
    child = _start(job)
    while child.poll() is None and _lines(journal) < 1:
        time.sleep(0.005)
    time.sleep(random.Random(7).uniform(0, 0.05))
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not Path(job.out).exists(), "it was faster than the kill; ask more questions"
    kept = _lines(journal)
    assert 0 < kept < 400
    before = journal.read_bytes().splitlines()[: kept + 1]
    with journal.open("ab") as file:  # a row that the kill cut
        file.write(b'{"sample_id": "s01')
    assert _here(job).kept == kept
    assert journal.read_bytes().splitlines()[: kept + 1] == before
    whole = _job(tmp_path / "whole", tiny_model, questions, candidate=(adapters[0],))
    assert _here(whole).kept == 0
    assert _rows(job) == _rows(whole)
    # Again from the start: everything is there, no model is loaded, the same file appears.
    Path(job.out).unlink()
    assert _here(dataclasses.replace(job, base_path=str(tmp_path / "gone"))).kept == 400
    assert _rows(job) == _rows(whole)


def _lines(journal: Path) -> int:
    """Whole rows after the header."""
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0


def test_a_signal_ends_it_without_a_file(tiny_model: Path, tmp_path: Path, adapters: list[AdapterRef]) -> None:
    job = _job(tmp_path, tiny_model, _questions(200), candidate=(adapters[0],))
    child = _start(job)
    while child.poll() is None and not _lines(Path(job.work_dir) / "answers.journal"):
        time.sleep(0.005)
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=30) == 143
    with pytest.raises(ChildFailed) as failed:
        read_result(AnswerResult, job.work_dir)
    assert failed.value.code == "STOPPED" and not Path(job.out).exists()


def test_a_wrong_base_is_refused_before_anything_is_asked(
    tiny_model: Path, tmp_path: Path, adapters: list[AdapterRef]
) -> None:
    job = _job(tmp_path, tiny_model, _questions(2), candidate=(adapters[0],))
    foreign = dataclasses.replace(adapters[1], base_digest="0" * 64)
    for wrong, error in (
        (dataclasses.replace(job, base_digest="0" * 64), BaseChanged),
        (dataclasses.replace(job, incumbent=(foreign,)), AdapterRefused),
    ):
        with pytest.raises(error):
            _here(wrong)
        assert not Path(job.out).exists() and _lines(Path(job.work_dir) / "answers.journal") == 0


def test_a_journal_of_other_work_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "work" / "journal"
    with Journal(path, {"what": 1}) as journal:
        journal.append({"a": 1})
        journal.append({"a": "ü\n\u2028"})
    with Journal(path, {"what": 1}) as journal:
        assert journal.rows == [{"a": 1}, {"a": "ü\n\u2028"}]
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with Journal(path, {"what": 1}) as journal:
            assert journal.rows == [{"a": 1}, {"a": "ü\n\u2028"}][: max(0, whole[:cut].count(b"\n") - 1)]
            journal.append({"b": 2})
        with Journal(path, {"what": 1}) as journal:
            assert journal.rows[-1] == {"b": 2}
    with Journal(path, {"what": 2}) as journal:
        assert journal.rows == []


def test_the_module_says_how_it_is_called() -> None:
    called = [sys.executable, "-m", "loop_dagster.models.answer"]
    done = subprocess.run(called, check=False, capture_output=True, text=True)
    assert done.returncode == 2 and "JOB.json" in done.stderr
