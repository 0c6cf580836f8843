"""The command line in front of real stores: JSON shapes, exit codes, sentences. No daemon and no training here."""

from __future__ import annotations

import gzip
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from doctor_patient import mounted
from report_world import compared, questions

from loop_dagster.cli import main
from loop_dagster.settings import Settings
from loop_dagster.store.open import open_store
from loop_dagster.tables import SAMPLES, SELECTIONS


@dataclass(frozen=True)
class Said:
    """What one command printed and how it ended."""

    status: int
    text: str
    errors: str

    @property
    def data(self) -> Any:
        return json.loads(self.text)


Loop = Callable[..., Said]


@pytest.fixture
def loop(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Loop]:
    """Runs `loop …` in this process, in a home of its own."""
    monkeypatch.setenv("LOOP_HOME", str(home))
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["loop", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        code = ended.value.code
        return Said(code if isinstance(code, int) else 0, captured.out, captured.err)

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def support(loop: Loop, tiny_model: Path) -> str:
    """Tag of a pipeline on the tiny model."""
    made = loop("pipelines", "create", "--name", "Support", "--model", str(tiny_model), "--json")
    assert made.status == 0, made
    return str(made.data["tag"])


def rows(path: Path, *given: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in given), encoding="utf-8")
    return str(path)


GOOD = {"prompt": "Where is it?", "completion": "On its way.", "label": True}
PROSE = {"text": "Our shop was founded in a garage."}


def test_create_prints_what_a_script_needs(loop: Loop, tiny_model: Path) -> None:
    options = ("--epochs", "3", "--learning-rate", "1e-3", "--holdout-percent", "10", "--promotion", "manual")
    made = loop("pipelines", "create", "--name", "Réponses", "--model", str(tiny_model), *options, "--json").data
    pipeline = made["pipeline"]
    assert (made["tag"], pipeline["own_tag"], pipeline["serving_name"]) == ("reponses", "reponses", "loop-reponses")
    assert (pipeline["training"]["epochs"], pipeline["training"]["learning_rate"]) == (3, 1e-3)
    assert (pipeline["holdout"]["percent"], pipeline["promotion"]["policy"]) == (10, "manual")
    assert loop("pipelines", "list", "--json").data["total"] == 1


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (("pipelines", "create", "--json"), 2, "BAD_REQUEST"),
        (("pipelines", "create", "--name", "A", "--epochs", "16", "--json"), 2, "TRAINING_SETTING_OUT_OF_RANGE"),
        (("pipelines", "show", "nobody", "--json"), 4, "NOT_FOUND"),
        (("train", "support", "--json"), 3, "NOT_ENOUGH_SAMPLES"),
        (("ask", "support", "Anyone there?", "--json"), 4, "NOT_FOUND"),
        (("ask", "support", "  ", "--json"), 2, "BAD_REQUEST"),
        (("ask", "support", "\udcff", "--json"), 2, "BAD_REQUEST"),
        (("samples", "list", "--state", "learned", "--json"), 2, "BAD_REQUEST"),
        (("attempts", "cancel", "nothing", "--json"), 4, "NOT_FOUND"),
        (("import", "nowhere.jsonl", "--pipeline", "support", "--json"), 2, "BAD_REQUEST"),
    ],
)
def test_exit_codes_and_one_error_shape(
    loop: Loop, support: str, arguments: tuple[str, ...], status: int, code: str
) -> None:
    said = loop(*arguments)
    assert (said.status, said.data["error"]["code"]) == (status, code)
    assert said.data["error"]["message"]


def test_the_lists_are_objects_with_a_total(loop: Loop, support: str) -> None:
    assert loop("attempts", "list", "--json").data == {"attempts": [], "total": 0}
    assert loop("versions", "list", "--json").data == {"versions": [], "total": 0}
    assert loop("samples", "list", "--json").data == {"traces": [], "total": 0, "limit": 25, "offset": 0}


def test_import_counts_and_feedback_changes_a_state(loop: Loop, support: str, tmp_path: Path) -> None:
    file = rows(tmp_path / "rows.jsonl", GOOD, PROSE, {"prompt": "Open?", "completion": "Perhaps."})
    said = loop("import", file, "--pipeline", support, "--json")
    counts = {name: said.data[name] for name in ("imported", "reviewed", "needs_review", "refused")}
    assert (said.status, counts) == (0, {"imported": 2, "reviewed": 1, "needs_review": 1, "refused": 1})
    listed = loop("samples", "list", "--pipeline", support, "--json").data["traces"]
    [open_one] = [row for row in listed if row["feedback"] is None]
    assert open_one["state"]["state"] == "left_out"
    said = loop("feedback", open_one["trace_id"], "corrected", "--answer", "Yes, until six.", "--json")
    assert said.data["signal"]["verdict"] == "edited"
    states = loop("samples", "counts", support, "--json").data["states"]
    assert sum(states.values()) == 2
    assert "left_out" not in states


def test_a_deleted_sample_is_gone_at_once(loop: Loop, support: str, tmp_path: Path) -> None:
    file = rows(tmp_path / "rows.jsonl", GOOD, {"prompt": "Open?", "completion": "Perhaps."})
    one, other = loop("import", file, "--pipeline", support, "--json").data["trace_ids"]
    assert loop("samples", "delete", one, "--json").data == {
        "deleted": True,
        "trace_ids": [one],
        "purged": True,
        "rebuilds": [],
    }
    assert [row["trace_id"] for row in loop("samples", "list", "--json").data["traces"]] == [other]
    assert loop("samples", "delete", one, "--json").status == 4


def test_rows_of_an_array_on_one_line_are_told_apart(loop: Loop, support: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([GOOD, PROSE, PROSE]))
    refused = loop("import", str(path), "--pipeline", support, "--json").data["refused_rows"]
    assert [(row["row"], row["line"]) for row in refused] == [(2, 1), (3, 1)]


def test_a_file_of_which_nothing_is_taken_is_no_success(loop: Loop, support: str, tmp_path: Path) -> None:
    said = loop("import", rows(tmp_path / "prose.jsonl", PROSE), "--pipeline", support, "--json")
    assert (said.status, said.data["refused"]) == (1, 1)


def test_an_array_that_is_cut_off_and_a_file_of_nothing_are_told(loop: Loop, support: str, tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    path.write_text("[" + json.dumps(GOOD))
    said = loop("import", str(path), "--pipeline", support, "--json").data
    assert (said["imported"], said["refused_why"]) == (1, ["array_cut_off"])
    path.write_text(" \n")
    assert "holds no row" in loop("import", str(path), "--pipeline", support).text


def test_a_sample_whose_length_nobody_counted_says_so(loop: Loop, support: str, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": word} for word in ("Hello?", "Anyone?")]
    odd = {"messages": [*turns, {"role": "assistant", "content": "Yes."}], "label": True}
    loop("import", rows(tmp_path / "odd.jsonl", odd), "--pipeline", support, "--json")
    [reason] = loop("samples", "counts", support, "--json").data["reasons"]
    assert reason["reason"].startswith("Nobody has counted yet")


def test_a_file_of_another_form_is_named_and_nothing_is_stored(loop: Loop, support: str, tmp_path: Path) -> None:
    path = tmp_path / "wide.jsonl"
    text = json.dumps(GOOD)
    for data, name in (
        (text.encode("utf-16"), "UTF-16"),
        (gzip.compress(text.encode()), "gzip"),
        (b"PAR1 ", "Parquet"),
    ):
        path.write_bytes(data)
        said = loop("import", str(path), "--pipeline", support)
        assert said.status == 2
        assert name in said.errors
    assert loop("samples", "list", "--json").data["total"] == 0


def test_a_pipeline_file_is_applied_once(loop: Loop, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "here" / "model")
    file = tmp_path / "here" / "pipeline.yaml"
    file.write_text("name: Support\nmodel: model\ntraining:\n  learning_rate: 1e-3\n")
    first = loop("pipelines", "apply", "-f", str(file), "--json").data["pipelines"][0]
    assert (first["outcome"], first["training"]["learning_rate"]) == ("created", 1e-3)
    assert first["base_model_id"] == str(tmp_path / "here" / "model")
    assert loop("pipelines", "apply", "-f", str(file), "--json").data["pipelines"][0]["outcome"] == "unchanged"
    file.write_text("name: Support\nmodel: model\nepochs: 3\n")
    said = loop("pipelines", "apply", "-f", str(file), "--json")
    assert said.status == 2
    assert "epochs is not a field of a pipeline file (known: name, model, " in said.data["error"]["message"]


def test_a_change_that_changes_nothing_says_so(loop: Loop, support: str) -> None:
    assert loop("pipelines", "edit", support, "--epochs", "3").text.startswith("Saved")
    assert loop("pipelines", "edit", support, "--epochs", "3").text.startswith("Nothing changed")
    assert loop("pipelines", "pause", support).text.startswith("Paused")
    assert loop("pipelines", "pause", support).text.startswith("It was paused already")
    assert loop("pipelines", "resume", support).text.startswith("Switched on")
    stale = loop("pipelines", "edit", support, "--epochs", "4", "--expected-revision", "1", "--json")
    assert (stale.status, stale.data["error"]["code"]) == (3, "REVISION_MISMATCH")


def test_a_script_deletes_without_being_asked(loop: Loop, support: str, tiny_model: Path) -> None:
    assert loop("pipelines", "delete", support).text.startswith("Deleted")
    assert loop("pipelines", "show", support, "--json").status == 4
    again = loop("pipelines", "create", "--name", "Support", "--model", str(tiny_model), "--json")
    assert again.data["error"]["code"] == "PIPELINE_NAME_TAKEN"


def test_samples_can_be_looked_at_while_the_model_is_missing(loop: Loop, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    loop("pipelines", "create", "--name", "Support", "--model", str(folder), "--json")
    loop("import", rows(tmp_path / "rows.jsonl", GOOD), "--pipeline", "support", "--json")
    shutil.rmtree(folder)
    assert loop("samples", "counts", "support", "--json").data["total"] == 1
    shown = loop("pipelines", "show", "support", "--json")
    assert shown.status == 0
    assert shown.data["pipeline"]["minimums"]["have"] == 1
    assert "model" in shown.data["pipeline"]["minimums"]["message"]


def test_tables_are_for_people(loop: Loop, support: str) -> None:
    text = loop("pipelines", "show", support).text
    assert "training.epochs" in text
    assert not {"{", "None", "True", "False"} & set(text.split())
    assert "{'" not in text


def test_a_setting_that_is_none_is_named_where_it_was_given(
    loop: Loop, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "settings.yaml").write_text("drain_row: 5\n")
    said = loop("pipelines", "list")
    assert (said.status, "drain_row in settings.yaml: there is no such setting" in said.errors) == (2, True)
    (home / "settings.yaml").unlink()
    monkeypatch.setenv("LOOP_DRAIN_ROWS", "none")
    assert "LOOP_DRAIN_ROWS must be a whole number." in loop("pipelines", "list").errors


def test_on_a_read_only_file_system_what_is_there_can_be_read(
    loop: Loop, support: str, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop("import", rows(tmp_path / "rows.jsonl", GOOD), "--pipeline", support, "--json")
    copy = tmp_path / "copy"
    copy.mkdir()
    with mounted(copy, "-t", "tmpfs", "tmpfs"):
        shutil.copytree(home, copy, dirs_exist_ok=True)
        subprocess.run(["mount", "-o", "remount,ro", str(copy)], check=True)
        monkeypatch.setenv("LOOP_HOME", str(copy))
        assert loop("samples", "list", "--json").data["total"] == 1
        assert loop("pipelines", "list", "--json").data["total"] == 1
        assert loop("attempts", "list", "--json").data["total"] == 0
        refused = loop("pipelines", "pause", support)
        assert "cannot be written to" in refused.errors
        assert refused.status == 5


@pytest.mark.parametrize("secret", ["john.doe@secretcorp.example", "sk-proj-Abc123Def456Ghi789Jkl012"])
def test_no_refusal_repeats_a_secret(loop: Loop, support: str, secret: str) -> None:
    for command in (
        ["pipelines", "show", secret],
        ["samples", "show", secret],
        ["samples", "list", "--pipeline", support, "--state", secret],
        ["samples", "list", f"--{secret}"],
        ["datasets", "create", "--name", "Some", "--tag", f"{secret} !"],
        ["import", f"{secret}.jsonl", "--pipeline", support],
    ):
        for more in ([], ["--json"]):
            said = loop(*command, *more)
            assert said.status in (2, 4), command
            assert secret not in said.text + said.errors


def test_an_expired_sample_is_nowhere_to_be_seen(loop: Loop, support: str, home: Path, tmp_path: Path) -> None:
    assert loop("import", rows(tmp_path / "rows.jsonl", GOOD), "--pipeline", support).status == 0
    store = open_store(Settings(home=home))
    old = (
        store.samples.whole()
        .samples.collect()
        .with_columns(
            sample_id=pl.lit("0190a0a0-0000-7000-8000-000000000001"),
            expires_at=pl.lit(datetime(2026, 1, 1, tzinfo=UTC)),
        )
    )
    store.lake.append(SAMPLES, SAMPLES.frame(old.to_dicts()))
    store.registry.dispose()
    listed = loop("samples", "list", "--json").data
    assert (listed["total"], len(listed["traces"])) == (1, 1)
    [sample] = old["sample_id"]
    for command in (["samples", "show", sample], ["feedback", sample, "good"], ["samples", "delete", sample]):
        assert loop(*command, "--json").status == 4


def test_a_deletion_names_what_owes_a_rebuild(loop: Loop, support: str, home: Path, tmp_path: Path) -> None:
    both = [{**GOOD, "prompt": "One"}, {**GOOD, "prompt": "Two"}, {**GOOD, "prompt": "Three"}]
    assert loop("import", rows(tmp_path / "rows.jsonl", *both), "--pipeline", support).status == 0
    one, two, three = (row["trace_id"] for row in loop("samples", "list", "--json").data["traces"])
    store = open_store(Settings(home=home))
    went_live = compared(store, questions(3), name="Live one", state="promoting")
    taken = store.lake.scan(SELECTIONS).filter(pl.col("attempt") == went_live.key).collect()
    ids = taken.filter(pl.col("role") == "train")["sample_id"][:2]
    named = dict(zip(ids, (one, two), strict=True))
    store.lake.replace_attempt(SELECTIONS, went_live.key, taken.with_columns(pl.col("sample_id").replace(named)))
    store.versions.promote(
        went_live.run_id, base_digest="b" * 64, adapters=["a" * 64], expect_live=None, now=datetime.now(UTC)
    )
    store.registry.dispose()
    owes = [{"pipeline_id": went_live.pipeline_id, "pipeline_name": "Live one"}]
    assert loop("samples", "delete", three, one, "--json").data["rebuilds"] == owes
    assert "What is live of Live one learned from them and owes a rebuild" in loop("samples", "delete", two, "-y").text
