"""History of a pipeline's attempts, read from the lake."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest

from loop_dagster.opening import counted, states_of
from loop_dagster.rules.selection import History
from loop_dagster.settings import Settings
from loop_dagster.store.intake import import_for_pipeline
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.selecting import history_of, trained_pairs
from loop_dagster.tables import HOLDOUTS, SELECTIONS

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


@pytest.fixture
def store(home: Path) -> Store:
    return open_store(Settings(home=home))


@pytest.mark.parametrize("seed", range(5))
def test_history_reads_few_rows_and_misses_nothing(store: Store, seed: int) -> None:
    """Attempts that train on changing samples, some of which keep no adapter: all that History says is of all rows."""
    rng = random.Random(seed)
    pipeline = store.pipelines.create("Support", model_id="any")
    last: dict[str, int] = {}
    for _number in range(6):
        attempt = store.attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW)
        assert attempt is not None
        taken = {f"s{n}": rng.choice([1, 2]) for n in rng.sample(range(40), 20)}
        rows = [
            {
                "attempt": attempt.key,
                "pipeline_id": attempt.pipeline_id,
                "attempt_no": attempt.attempt_no,
                "sample_id": sample,
                "role": rng.choice(["train", "check"]),
                "reason": "new",
                "right_key": right,
                "teaches": "accepted",
                "prompt_key": int(sample[1:]) % 15,
                "rank": 0,
                "reviewed": True,
                "is_new": last.get(sample) != right,
                "held_by": None,
            }
            for sample, right in taken.items()
        ]
        store.lake.replace_attempt(SELECTIONS, attempt.key, pl.DataFrame(rows, schema=SELECTIONS.schema))
        if rng.random() < 0.7:
            store.attempts.note(attempt.run_id, adapter_digest="0" * 64)
            last = taken
        store.attempts.fail(attempt.run_id, code="X", sentence="Ended.", now=NOW)
    found = history_of(store, pipeline)
    whole = History.of(store.lake.scan(HOLDOUTS), trained_pairs(store, pipeline))
    assert set(found.trained_prompts) == set(whole.trained_prompts)
    assert found.last_trained == whole.last_trained
    assert sorted(found.last_pairs.rows()) == sorted(whole.last_pairs.rows()) == sorted(last.items())


def test_a_sample_that_was_trained_on_and_marked_wrong_later_says_both(store: Store, tmp_path: Path) -> None:
    pipeline = store.pipelines.create("Support", model_id="any")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "Where is it?", "completion": "On its way.", "label": True}))
    import_for_pipeline(store, path, pipeline, holder="test", now=NOW)
    [taken] = counted(store, pipeline, NOW).selection.rows.to_dicts()
    attempt = store.attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW)
    assert attempt is not None
    own = {"attempt": attempt.key, "pipeline_id": attempt.pipeline_id, "attempt_no": 1}
    row = {**taken, **own, "role": "train", "reason": "new", "is_new": True}
    store.lake.replace_attempt(SELECTIONS, attempt.key, pl.DataFrame([row], schema=SELECTIONS.schema))
    store.attempts.note(attempt.run_id, adapter_digest="0" * 64)
    said = {"feedback_id": "f", "sample_id": taken["sample_id"], "verdict": "rejected", "origin": "here"}
    nothing = dict.fromkeys(("right_answer", "right_key", "right_bytes", "score", "reason"))
    store.inbox.put(feedback=[{**said, **nothing, "created_at": NOW}], now=NOW)
    [state] = states_of(store, pipeline, NOW).to_dicts()
    assert (state["state"], state["attempt_no"]) == ("trained", 1)
    assert "It is not trained on again: it was marked wrong" in state["reason"]
