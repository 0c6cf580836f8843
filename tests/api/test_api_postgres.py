"""The API over a registry on PostgreSQL: what it writes there is read back, across two servers on one database."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_world import compared, questions
from running_api import serving
from wire_types import check

from loop_dagster.settings import Settings
from loop_dagster.store.intake import drain
from loop_dagster.store.open import open_store

pytestmark = pytest.mark.postgres


def test_two_servers_on_one_database_answer_alike(postgres_url: str, tmp_path: Path, tiny_model: Path) -> None:
    stores = [open_store(Settings(home=tmp_path, registry_url=postgres_url)) for _ in range(2)]
    with serving(stores[0]) as one, serving(stores[1]) as other:
        made = one.client.loop.create_pipeline(name="Desk", model={"id": str(tiny_model)})["pipeline"]
        path = f"/api/loop/pipelines/{made['rule_id']}"
        assert other.call("GET", path, key=one.key).json()["pipeline"]["rule_name"] == "Desk"

        said = [{"role": "user", "content": "A \0 in the middle?"}]
        seen = [
            each.client.loop.capture("desk", "m", said, "Yes.", request_id="r1", feedback={"verdict": "good"})
            for each in (one, other)
        ]
        assert seen[0]["trace_id"] == seen[1]["trace_id"]
        other.client.loop.signal(seen[0]["trace_id"], "corrected", correction="No.", labels=["late"])
        drain(stores[1], holder="a test")
        found = one.client.loop.get_trace(seen[0]["trace_id"])
        assert (found["messages"], found["feedback"]) == (said, "corrected")
        assert [label["label"] for label in found["labels"]] == ["desk", "late"]
        check(one.client.loop.stats(), "LoopStats")
        check(other.client.loop.get_pipeline(made["rule_id"]), "Pipeline")

        attempt = compared(stores[0], questions(3), name="Compared", state="awaiting_review")
        other.client.loop.reject_training_run(attempt.run_id)
        check(one.client.loop.get_training_run(attempt.run_id), "TrainingRunResponse")
        revoked = stores[0].keys.revoke(stores[0].keys.find(one.key).key_id)  # type: ignore[union-attr]
        assert revoked.revoked_at is not None
        assert other.call("GET", path, key=one.key).status_code == 401
    for store in stores:
        store.registry.dispose()
