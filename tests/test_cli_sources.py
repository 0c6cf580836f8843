"""`loop sources`: set up in parts, listed, and the same that the API and the gateway ask."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loop_dagster.cli import main
from loop_dagster.settings import Settings
from loop_dagster.store.open import open_store

Loop = Callable[..., tuple[int, str]]
NAME = "meta-llama/Llama-3.1-8B"


@pytest.fixture
def loop(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Loop]:
    """Runs `loop …` in this process: exit status and standard output."""
    monkeypatch.setenv("LOOP_HOME", str(home))
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["loop", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), capsys.readouterr().out

    yield run
    signal.signal(signal.SIGTERM, before)


def data(loop: Loop, *arguments: str) -> Any:
    status, text = loop("sources", *arguments, "--json")
    assert status == 0, text
    return json.loads(text)


def test_a_source_is_set_up_in_parts_and_listed(loop: Loop, home: Path) -> None:
    assert data(loop, "list") == {"sources": [], "total": 0}
    assert data(loop, "show", NAME)["source"]["enabled"] is False

    saved = data(loop, "set", NAME, "--on", "--retention-days", "90", "--tag", "Support", "--tag", "web")["source"]
    assert saved["updated_at"].endswith("Z")
    assert {**saved, "updated_at": None} == {
        "deployment_id": NAME,
        "enabled": True,
        "retention_days": 90,
        "sample_rate": 1.0,
        "tags": ["support", "web"],
        "updated_at": None,
    }
    kept = data(loop, "set", NAME, "--sample-rate", "0.5")["source"]
    assert (kept["enabled"], kept["sample_rate"], kept["tags"]) == (True, 0.5, ["support", "web"])
    off = data(loop, "set", NAME, "--off", "--no-tags")["source"]
    assert (off["enabled"], off["retention_days"], off["tags"]) == (False, 90, [])
    assert data(loop, "set", "other", "--retention-days", "7")["source"]["enabled"] is False
    assert [one["deployment_id"] for one in data(loop, "list")["sources"]] == [NAME, "other"]

    store = open_store(Settings(home=home))
    assert store.sources.get(NAME).sample_rate == 0.5
    store.registry.dispose()


def test_people_see_a_table(loop: Loop) -> None:
    assert NAME in loop("sources", "set", NAME, "--on", "--tag", "support")[1]
    for command in (("list",), ("show", NAME)):
        status, text = loop("sources", *command)
        assert status == 0
        assert all(word in text for word in (NAME, "yes", "support"))


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--tag", "a", "--no-tags"),
        ("--on", "--retention-days", "0"),
        ("--on", "--sample-rate", "1.5"),
        ("--on", "--sample-rate", "nan"),
        ("--on", "--tag", "two words"),
        ("--on", "--off", "--colour", "red"),
    ],
)
def test_what_a_source_cannot_be_is_refused(loop: Loop, arguments: tuple[str, ...]) -> None:
    assert loop("sources", "set", "refused", *arguments)[0] == 2
    assert loop("sources", "set", " ", "--on")[0] == 2
    assert data(loop, "list")["total"] == 0
