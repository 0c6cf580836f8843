"""The whole loop with its lake on an S3 server and its registry on PostgreSQL, by commands alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from homes import Homes

from loop_dagster.settings import Settings
from loop_dagster.store.open import open_store

pytestmark = [pytest.mark.loop, pytest.mark.postgres]


def test_conversations_become_a_tested_attempt(
    tmp_path: Path, postgres_server: str, tiny_model: Path, conversations: Path, bucket: str
) -> None:
    home = Homes(tmp_path, postgres_server, {"LOOP_LAKE_URL": bucket}).new("far")
    create = ("pipelines", "create", "--name", "Facts", "--model", str(tiny_model), "--epochs", "1", "--json")
    assert home.loop(*create) == 0
    assert home.loop("import", str(conversations), "--pipeline", "facts", "--default-feedback", "good", "--json") == 0
    assert home.loop("run", "--until-idle", "--json") == 0
    store = open_store(Settings(home=home.root, registry_url=home.registry, lake_url=bucket))
    [attempt] = store.attempts.list()
    assert attempt.state in ("promoted", "rejected", "awaiting_review"), attempt.reason
    assert (attempt.train_rows, attempt.holdout_rows) == (1000, 100)
    assert not (home.root / "lake").exists()
    page = tmp_path / "report.html"
    assert home.loop("report", "1", "--html", "--out", str(page)) == 0
    assert "facts" in page.read_text()
    [sample] = json.loads(home.said("samples", "list", "--limit", "1", "--json"))["traces"]
    assert home.loop("samples", "delete", sample["id"], "--yes", "--json") == 0
    assert home.loop("doctor") == 0
    store.registry.dispose()
