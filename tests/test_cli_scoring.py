"""The scoring of unreviewed samples on the command line: its switch, and where it stands."""

from __future__ import annotations

from pathlib import Path

import bios._types as client
import pytest
from test_cli import Loop, loop, rows

__all__ = ["loop"]  # the fixture


def test_the_switch_on_the_command_line(loop: Loop, tiny_model: Path, tmp_path: Path) -> None:
    made = ("pipelines", "create", "--name", "Support", "--model", str(tiny_model))
    assert loop(*made, "--no-auto-scoring", "--json").data["pipeline"]["auto_scoring"] == {"enabled": False}
    assert "The scoring of unreviewed samples is switched off." in loop("pipelines", "show", "support").text
    assert loop("pipelines", "edit", "support", "--auto-scoring", "--json").data["pipeline"]["revision"] == 2
    loop("import", rows(tmp_path / "rows.jsonl", {"prompt": "Where?", "completion": "Here."}), "--pipeline", "support")
    auto = loop("pipelines", "show", "support", "--json").data["pipeline"]["auto_scoring"]
    assert set(auto) == client.PipelineAutoScoring.__required_keys__
    assert (auto["enabled"], auto["status"], auto["unscored"]) == (True, "held", 1)
    assert "compares with a right answer" in loop("pipelines", "show", "support").text.replace("\n", " ")
    loop("pipelines", "pause", "support")
    assert "The pipeline is paused, so nothing is scored." in loop("pipelines", "show", "support").text


@pytest.mark.parametrize("said", ["auto_scoring: false", "auto_scoring: {enabled: false}"])
def test_the_switch_in_a_pipeline_file(loop: Loop, tiny_model: Path, tmp_path: Path, said: str) -> None:
    file = tmp_path / "pipelines.yaml"
    file.write_text(f"name: Support\nmodel: {tiny_model}\n{said}\n")
    applied = loop("pipelines", "apply", "-f", str(file), "--json").data["pipelines"][0]
    assert (applied["outcome"], applied["auto_scoring"]) == ("created", {"enabled": False})
    assert loop("pipelines", "apply", "-f", str(file), "--json").data["pipelines"][0]["outcome"] == "unchanged"
    file.write_text(f"name: Support\nmodel: {tiny_model}\n")
    on_again = loop("pipelines", "apply", "-f", str(file), "--json").data["pipelines"][0]
    assert (on_again["outcome"], on_again["auto_scoring"]) == ("changed", {"enabled": True})
    file.write_text(f"name: Support\nmodel: {tiny_model}\nauto_scoring: {{enabled: perhaps}}\n")
    assert loop("pipelines", "apply", "-f", str(file)).status == 2
