"""`loop datasets`, and pipelines that name a dataset: on the command line and in a file."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loop_dagster.cli import main

Loop = Callable[..., tuple[int, str]]


@pytest.fixture
def loop(home: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Iterator[Loop]:
    """Runs `loop …` in this process: exit status and standard output."""
    monkeypatch.setenv("LOOP_HOME", str(home))
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["loop", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), capsysbinary.readouterr().out.decode()

    yield run
    signal.signal(signal.SIGTERM, before)


def data(loop: Loop, *arguments: str) -> Any:
    status, text = loop(*arguments, "--json")
    assert status == 0, text
    return json.loads(text)


@pytest.fixture
def filled(loop: Loop, tiny_model: Path, tmp_path: Path) -> str:
    """Tag of a pipeline with two samples that carry it."""
    tag = str(data(loop, "pipelines", "create", "--name", "Support", "--model", str(tiny_model))["tag"])
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "One", "completion": "A", "label": True}, {"prompt": "Two", "completion": "B"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert data(loop, "import", str(file), "--pipeline", tag)["imported"] == 2
    return tag


def test_made_shown_exported_and_deleted(loop: Loop, filled: str, tmp_path: Path) -> None:
    made = data(loop, "datasets", "create", "--name", "Good ones", "--tag", filled, "--feedback", "good")
    assert (made["dataset"]["samples"], made["dataset"]["tags"]) == (1, [filled])
    assert data(loop, "datasets", "list")["datasets"] == [made["dataset"]]
    assert data(loop, "datasets", "show", made["dataset_id"])["dataset"] == made["dataset"]
    assert "Good ones" in loop("datasets", "list")[1]
    assert "Good ones" in loop("datasets", "show", "good ones")[1]

    status, lines = loop("datasets", "export", "Good ones")
    assert status == 0
    assert [json.loads(line)["label"] for line in lines.splitlines()] == [True]
    file = tmp_path / "out.jsonl"
    assert data(loop, "datasets", "export", "Good ones", "-o", str(file)) == {"samples": 1, "file": "out.jsonl"}
    assert file.read_text() == lines
    assert [one.name for one in tmp_path.glob("*.part")] == []
    assert loop("datasets", "export", "Good ones", "--json")[0] == 2
    assert loop("datasets", "export", "Good ones", "-o", str(tmp_path / "no" / "file"))[0] == 2

    assert loop("datasets", "create", "--name", "GOOD ones")[0] == 3
    assert loop("datasets", "create", "--name", "x", "--match", "most")[0] == 2
    assert data(loop, "datasets", "delete", "Good ones") == {"deleted": True, "removed_from": []}
    assert loop("datasets", "show", "Good ones", "--json")[0] == 4


def test_a_pipeline_names_datasets_by_name(loop: Loop, filled: str, tiny_model: Path, tmp_path: Path) -> None:
    one = data(loop, "datasets", "create", "--name", "One", "--tag", filled)["dataset"]
    two = data(loop, "datasets", "create", "--name", "Two")["dataset"]
    made = data(
        loop, "pipelines", "create", "--name", "Other", "--model", str(tiny_model), "--dataset", "one",
        "--dataset", two["id"],
    )["pipeline"]  # fmt: skip
    assert made["datasets"] == [{"id": one["id"], "name": "One"}, {"id": two["id"], "name": "Two"}]
    assert data(loop, "pipelines", "show", "other")["pipeline"]["minimums"]["have"] == 1
    assert "One, Two" in loop("pipelines", "show", "other")[1]
    assert data(loop, "datasets", "show", "One")["dataset"]["used_by"] == [
        {"rule_id": made["rule_id"], "name": "Other"}
    ]

    file = tmp_path / "pipeline.yaml"
    file.write_text(f"name: Other\nmodel: {tiny_model}\ndatasets: [Two]\n")
    assert data(loop, "pipelines", "apply", "-f", str(file))["pipelines"][0]["datasets"] == [
        {"id": two["id"], "name": "Two"}
    ]
    assert data(loop, "pipelines", "apply", "-f", str(file))["pipelines"][0]["outcome"] == "unchanged"
    file.write_text(f"name: Other\nmodel: {tiny_model}\ndatasets: [Nobody]\n")
    assert loop("pipelines", "apply", "-f", str(file))[0] == 4
    edited = data(loop, "pipelines", "edit", "other", "--clear", "datasets")["pipeline"]
    assert edited["datasets"] == []
    assert data(loop, "datasets", "delete", "Two")["removed_from"] == []
