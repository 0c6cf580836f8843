"""The whole loop with its lake on an S3 server and its registry on PostgreSQL, by commands alone, and a kill in it."""

from __future__ import annotations

import json
from pathlib import Path

import kills
import pytest
from homes import Homes

pytestmark = [pytest.mark.loop, pytest.mark.postgres]


def test_conversations_become_a_tested_attempt_though_its_child_is_killed(
    tmp_path: Path, postgres_server: str, tiny_model: Path, conversations: Path, bucket: str
) -> None:
    home = Homes(tmp_path, postgres_server, {"LOOP_LAKE_URL": bucket}).new("far")
    create = ("pipelines", "create", "--name", "Facts", "--model", str(tiny_model), "--epochs", "1", "--json")
    assert home.loop(*create) == 0
    assert home.loop("import", str(conversations), "--pipeline", "facts", "--default-feedback", "good", "--json") == 0
    kills.kill_in(home, "child", seed=1)
    assert not (home.root / "lake").exists()
    page = tmp_path / "report.html"
    assert home.loop("report", "1", "--html", "--out", str(page)) == 0
    assert "facts" in page.read_text()
    [sample] = json.loads(home.said("samples", "list", "--limit", "1", "--json"))["traces"]
    assert home.loop("samples", "delete", sample["id"], "--yes", "--json") == 0
    assert home.loop("doctor") == 0
