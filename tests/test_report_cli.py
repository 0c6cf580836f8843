"""`loop report`: for people, as data with the client's names, as a page; which attempt is meant, and the exit codes."""

from __future__ import annotations

import os
import threading
import typing
from pathlib import Path
from typing import Any

import bios._types as client
import pytest
from report_world import NOW, Question, compared, questions
from test_cli import Loop, loop

from loop_dagster.report_data import report_of
from loop_dagster.report_page import render
from loop_dagster.rules.money import NANOCENTS
from loop_dagster.settings import Settings
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.scorings import Chunk

__all__ = ["loop"]  # the fixture


@pytest.fixture
def store(home: Path) -> Store:
    return open_store(Settings(home=home))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)


def test_people_read_verdict_bars_and_warnings(loop: Loop, store: Store) -> None:
    compared(store, questions(96), warnings=["capture_source_moved"])
    said = loop("report", "1")
    assert said.status == 0
    for words in (
        *("Inconclusive against the base model", "At least 100 samples must be scored; 96 were.", "rows_scored"),
        *("Warning: Fewer than 100 samples were scored", "Warning: The source that", "not a language model"),
        *("96 of 96 held-back samples", "Compared. "),
    ):
        assert words in said.text, words
    assert "--html" in said.errors
    assert not list(Path().iterdir())


def test_what_scoring_unreviewed_samples_did_is_said(loop: Loop, store: Store) -> None:
    pipeline = store.pipelines.create("Support", model_id="any/model", now=NOW)
    picked = {f"s{number}": 0.9 if number % 3 else 0.2 for number in range(1_500)}
    cost = 180 * NANOCENTS + 5
    store.scorings.keep(
        pipeline.pipeline_id,
        Chunk(chunk_id="c", judge_key="k" * 32, scores=picked, failed=(), nanocents=cost),
        now=NOW,
    )
    attempt = compared(store, questions(100))
    words = "1,500 scored, 1,000 of them picked, $1.80"
    assert words in loop("report", "1").text
    assert words in render(report_of(store, attempt))
    shown = loop("attempts", "show", attempt.key)
    assert "sample_scoring_cents" in shown.text
    again = compared(store, questions(100), name="Other")
    assert "Scoring unreviewed samples" not in render(report_of(store, again))


def test_the_page_is_written_here_there_or_to_standard_output(loop: Loop, store: Store, tmp_path: Path) -> None:
    attempt = compared(store, questions(10), name="Réponses")
    page = render(report_of(store, attempt))
    assert loop("report", "1", "--html").text.startswith("Wrote report-reponses-1.html")
    written = Path("report-reponses-1.html")
    assert written.read_text(encoding="utf-8") == page
    assert written.stat().st_mode & 0o777 == 0o666 & ~_umask()
    target = tmp_path / "there.html"
    target.write_text("of before")
    said = loop("report", attempt.key, "--html", "--out", str(target), "--json")
    assert said.data == {"attempt": attempt.key, "file": str(target), "bytes": len(page.encode())}
    assert target.read_text(encoding="utf-8") == page
    assert loop("report", attempt.run_id, "--html", "--out", "-").text == page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "home", "there.html"]


def test_a_pipe_is_written_to_and_stays_one(loop: Loop, store: Store, tmp_path: Path) -> None:
    attempt = compared(store, questions(1))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    came: list[str] = []
    reader = threading.Thread(target=lambda: came.append(pipe.read_text(encoding="utf-8")), daemon=True)
    reader.start()
    assert loop("report", "1", "--html", "--out", str(pipe)).status == 0
    reader.join(10)
    assert came == [render(report_of(store, attempt))]
    assert pipe.is_fifo()


def test_a_folder_that_is_not_there_is_named(loop: Loop, store: Store) -> None:
    compared(store, questions(1))
    said = loop("report", "1", "--html", "--out", "nowhere/page.html", "--json")
    assert (said.status, said.data["error"]["code"]) == (2, "BAD_REQUEST")
    assert said.data["error"]["message"].startswith("There is no folder 'nowhere'")


def test_json_has_the_names_and_types_of_the_client(loop: Loop, store: Store) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "find", "arguments": "{}"}}]
    asked = [
        *questions(96),
        Question(candidate=None),
        Question(status="failed", error_code="INCUMBENT_UNANSWERED", incumbent=None),
        Question(status="failed", error_code="JUDGE_UNREADABLE"),
        Question(status="gone", right=None, teaches="scored"),
        Question(calls=calls, tools=[{"type": "function"}]),
    ]
    data = loop_json(loop, store, asked)
    fits(data["evaluation"], client.Evaluation)
    fits(data["training_curve"], client.TrainingCurve)
    for item in data["items"]:
        fits(item, client.EvaluationItem)
    assert data["total"] == len(data["items"]) == 101
    statuses = [(item["winner"], item["status"], item["error_code"]) for item in data["items"][96:]]
    assert statuses == [
        ("incumbent", "done", None),
        (None, "failed", "incumbent_unanswered"),
        (None, "failed", "scorer_failed"),
        (None, "pending", None),
        ("candidate", "done", None),
    ]
    first = data["items"][0]
    assert first["candidate"]["judge"] == {
        "overall": 0.9,
        "dimensions": {"correctness": 0.9, "completeness": 0.9, "style": 0.9},
        "reason": None,
    }
    assert first["reference"] == {"answer": "Parcel 0 is on its way.", "kind": "good", "tool_calls": None}
    evaluation = data["evaluation"]
    assert (evaluation["prompt_tokens"], evaluation["completion_tokens"]) == (52_000, 4_800)
    assert evaluation["margin_used"]["min_holdout_rows"] == 97
    assert [bar["key"] for bar in data["bars"]][-1] == "beyond_chance"
    assert data["samples"]["taught_by"] == {"accepted": 5, "edited": 15}


def loop_json(loop: Loop, store: Store, asked: list[Question]) -> Any:
    compared(store, asked)
    return loop("report", "1", "--json").data


def fits(value: Any, kind: Any) -> None:
    """Raise unless `value` has every required key of a TypedDict of the client, with a value of the declared type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return
    if origin is typing.Union:
        fits_one_of(value, arguments)
    elif origin is typing.Literal:
        assert value in arguments, (value, kind)
    elif origin is list:
        assert isinstance(value, list), (value, kind)
        for one in value:
            fits(one, arguments[0])
    elif origin is dict:
        for name, one in value.items():
            fits(name, arguments[0])
            fits(one, arguments[1])
    elif typing.is_typeddict(kind):
        missing = kind.__required_keys__ - value.keys()
        assert not missing, (kind, missing)
        hints = typing.get_type_hints(kind)
        for name, one in value.items():
            if name in hints:
                fits(one, hints[name])
    elif kind is float:
        assert isinstance(value, int | float) and not isinstance(value, bool), (value, kind)
    else:
        assert isinstance(value, kind) and (kind is bool or not isinstance(value, bool)), (value, kind)


def fits_one_of(value: Any, kinds: tuple[Any, ...]) -> None:
    if value is None:
        assert type(None) in kinds
        return
    [kind] = [kind for kind in kinds if kind is not type(None)]
    fits(value, kind)


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (("report",), 2, "BAD_REQUEST"),
        (("report", "1"), 2, "BAD_REQUEST"),
        (("report", "3", "--pipeline", "support"), 4, "NOT_FOUND"),
        (("report", "nobody"), 4, "NOT_FOUND"),
        (("report", "1", "--pipeline", "nobody"), 4, "NOT_FOUND"),
        (("report", "2", "--pipeline", "support"), 4, "NOT_FOUND"),
        (("report", "1", "--pipeline", "support", "--out", "x"), 2, "BAD_REQUEST"),
        (("report", "1", "--pipeline", "support", "--html", "--out", "-"), 2, "BAD_REQUEST"),
        (("report", "1", "--pipeline", "support", "--html", "--out", "."), 2, "BAD_REQUEST"),
    ],
)
def test_exit_codes(loop: Loop, store: Store, arguments: tuple[str, ...], status: int, code: str) -> None:
    attempt = compared(store, questions(1))
    store.attempts.fail(attempt.run_id, code="X", sentence="It broke.", now=NOW)
    store.attempts.open_attempt(attempt.pipeline_id, trigger="data", frozen={}, now=NOW)  # without a report
    compared(store, questions(1), name="Sales")
    said = loop(*arguments, "--json")
    assert (said.status, said.data["error"]["code"]) == (status, code)
    assert said.data["error"]["message"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
