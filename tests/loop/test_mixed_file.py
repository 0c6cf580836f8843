"""A file of every row shape, with everything that goes wrong in real files, up to the frozen sets of an attempt."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import polars as pl
import pytest

from loop_dagster.definitions import build_defs
from loop_dagster.models.base import resolve
from loop_dagster.opening import Opened, look
from loop_dagster.settings import Settings
from loop_dagster.store.intake import import_for_pipeline
from loop_dagster.store.open import Store, open_store
from loop_dagster.tables import HOLDOUTS, QUESTIONS, SELECTIONS, TRAINING_SETS
from resources import StoreResource

GOOD, WRONG, CORRECTED, GOLD, UNREVIEWED, DUPLICATES, TWINS, LONG = 1150, 30, 20, 10, 15, 12, 5, 8


def lines() -> list[str]:
    """Every shape: good, wrong, corrected, gold and unreviewed ones, duplicates, twins, long ones, broken lines."""
    rows: list[dict[str, object]] = []
    for n in range(GOOD):
        rows.append({"prompt": f"Where is parcel {n}?", "completion": f"On its way, number {n}.", "label": True})
    rows += [{"prompt": f"Wrong {n}?", "completion": "No idea.", "label": False} for n in range(WRONG)]
    rows += [{"prompt": f"Fix {n}?", "chosen": f"Right {n}.", "rejected": "Off."} for n in range(CORRECTED)]
    rows += [{"prompt": f"Gold {n}?", "completion": "Off.", "ground_truth": f"Gold {n}."} for n in range(GOLD)]
    rows += [{"prompt": f"Open {n}?", "completion": "Perhaps."} for n in range(UNREVIEWED)]
    rows += [rows[n] for n in range(DUPLICATES)]
    rows += [
        {"prompt": f"  where is PARCEL {n} ", "completion": f"On its way, number {n}.", "label": True}
        for n in range(100, 100 + TWINS)
    ]
    long = "far too long " * 2000
    rows += [{"prompt": f"{long} {n}?", "completion": "Yes.", "label": True} for n in range(LONG)]
    text = [json.dumps(row) for row in rows]
    text.insert(3, "this line is no JSON")
    text.insert(700, '{"text": "Our shop was founded in a garage."}')
    text.append('{"messages": []}')
    return text


@pytest.fixture
def store(home: Path) -> Store:
    return open_store(Settings(home=home))


def test_a_mixed_file_trains_and_holds_back_exactly_what_it_should(store: Store, tmp_path: Path, tiny_model: Path):
    digest = resolve(str(tiny_model), store.settings.models_dir).digest
    pipeline = store.pipelines.create("Parcels", model_id=str(tiny_model), model_digest=digest, seed=11)
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines()).encode() + b"\r\n")
    now = datetime.now(UTC)
    result = import_for_pipeline(store, path, pipeline, holder="test", now=now)
    total = GOOD + WRONG + CORRECTED + GOLD + UNREVIEWED + DUPLICATES + TWINS + LONG
    assert (result.imported, result.refused, result.needs_review) == (total, 3, UNREVIEWED)
    assert [note.line for note in result.refused_rows] == [4, 701, total + 3]

    home = StoreResource(home=str(store.settings.root))
    defs = build_defs({"store": home})
    with dg.instance_for_test() as instance:
        # The long ones are counted by the tokenizer before anything is opened; they never count toward a minimum.
        assert defs.resolve_job_def("intake").execute_in_process(instance=instance).success
        opened = look(store, store.pipelines.get(pipeline.tag), now)
        assert isinstance(opened, Opened)
        instance.add_dynamic_partitions("attempts", [opened.attempt.key])
        ended = defs.resolve_job_def("training").execute_in_process(
            instance=instance,
            partition_key=opened.attempt.key,
            asset_selection=[dg.AssetKey(name) for name in ("selection", "holdout", "training_set")],
        )
        assert ended.success

    rows = store.lake.scan(SELECTIONS).collect()
    counts = dict(rows.group_by("reason").len().iter_rows())
    usable = GOOD + CORRECTED + GOLD + TWINS
    assert counts.pop("held_new") == 100
    twins = counts.pop("twin_of_held", 0)
    assert counts.pop("new") == usable - 100 - twins
    assert counts == {
        "wrong": WRONG,
        "no_feedback": UNREVIEWED,
        "duplicate": DUPLICATES,
        "too_long": LONG,
    }
    trained = store.lake.scan(TRAINING_SETS).collect()
    asked = store.lake.scan(QUESTIONS).collect()
    assert trained.height == usable - 100 - twins
    assert asked.height == store.lake.row_count(HOLDOUTS) == 100
    assert trained.join(rows.filter(pl.col("role") == "holdout"), on="prompt_key", how="semi").is_empty()
    attempt = store.attempts.get(opened.attempt.run_id)
    assert (attempt.train_rows, attempt.holdout_rows) == (trained.height, 100)
    # A correction is what is learned, never the answer that was wrong.
    corrected = trained.filter(pl.col("teaches") == "edited")
    assert corrected["right_answer"].str.contains('"Right ').all()
    assert asked["right_answer"].null_count() == 0
