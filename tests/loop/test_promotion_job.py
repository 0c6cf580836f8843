"""The promotion job on stored evidence: decided anew, once, against what is live at that moment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest

from loop_dagster import deciding
from loop_dagster.definitions import build_defs
from loop_dagster.errors import Conflict, LoopError, Refused
from loop_dagster.models.base import resolve
from loop_dagster.opening import Opened, look
from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.rules.states import FLOW
from loop_dagster.settings import Settings
from loop_dagster.store.intake import import_for_pipeline
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.records import Attempt
from loop_dagster.tables import ANSWERS, JUDGEMENTS, REPORTS, Table
from resources import StoreResource

#: Scores of a candidate that is better, no better, and one that nobody could rate.
BETTER, WORSE, FAILED = (0.9, 0.4), (0.4, 0.9), None


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as instance:
        yield instance


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def settings(request: pytest.FixtureRequest, home: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    if request.param == "postgres":
        monkeypatch.setenv("LOOP_REGISTRY_URL", request.getfixturevalue("postgres_url"))
    return Settings(home=home)


@pytest.fixture
def store(settings: Settings) -> Store:
    return open_store(settings)


def compared(
    store: Store,
    model: Path,
    folder: Path,
    scores: tuple[float, float] | None,
    *,
    policy: str = "manual",
    version: int | None = None,
) -> Attempt:
    """A real attempt with 100 judgements of these scores, in `reported`, as the comparison job leaves it."""
    wanted = PipelineSettings.from_json({"promotion": {"policy": policy}})
    digest = resolve(str(model), store.settings.models_dir).digest
    pipeline = store.pipelines.create("Parcels", model_id=str(model), model_digest=digest, settings=wanted)
    file, now = folder / "rows.jsonl", datetime.now(UTC)
    rows = ({"prompt": f"Where is {n}?", "completion": f"{n} is on its way."} for n in range(1100))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    import_for_pipeline(store, file, pipeline, holder="test", now=now, default_feedback="good")
    opened = look(store, store.pipelines.get(pipeline.tag), now)
    assert isinstance(opened, Opened)
    attempt = opened.attempt
    weights = store.artifacts.private("adapter")
    (weights / "weights.txt").write_text("weights")
    adapter = store.artifacts.keep(weights, still_mine=lambda: None)
    ids = [f"sample-{n:03d}" for n in range(100)]
    own = {"attempt": attempt.key, "pipeline_id": attempt.pipeline_id, "attempt_no": 1}
    write(store, ANSWERS, attempt, [own | _answer(one, side) for one in ids for side in ("candidate", "incumbent")])
    write(store, JUDGEMENTS, attempt, [own | _judgement(one, scores) for one in ids])
    facts = {"base_digest": digest, "adapter_digest": adapter, "compared_with": "version" if version else "original"}
    for state in FLOW[1 : FLOW.index("reported")]:
        fields = {**facts, "compared_with_version": version} if state == "checkpoint_ready" else {}
        store.attempts.move(attempt.run_id, state, "On.", now=now, **fields)
    verdict = "inconclusive" if scores is None else "better" if scores == BETTER else "not_better"
    scored = 0 if scores is None else 100
    return store.attempts.move(
        attempt.run_id, "reported", "Compared.", now=now, verdict=verdict, report={"rows_scored": scored}
    )


def write(store: Store, table: Table, attempt: Attempt, rows: list[dict[str, Any]]) -> None:
    store.lake.replace_attempt(table, attempt.key, pl.DataFrame(rows, schema=table.schema))


def _answer(sample_id: str, side: str) -> dict[str, Any]:
    text = json.dumps({"role": "assistant", "content": f"{side} says so"})
    tokens = {"prompt_tokens": 5, "answer_tokens": 5}
    return {"sample_id": sample_id, "side": side, "answer": text, "finish": "stop", **tokens}


def _judgement(sample_id: str, scores: tuple[float, float] | None) -> dict[str, Any]:
    if scores is None:
        return {"sample_id": sample_id, "status": "failed", "error_code": "JUDGE_UNREADABLE", "unanswered": False}
    ratings = [json.dumps(dict.fromkeys(("correctness", "completeness", "style"), round(10 * one))) for one in scores]
    winner = "candidate" if scores[0] > scores[1] else "incumbent"
    return {
        "sample_id": sample_id,
        "status": "scored",
        "candidate_score": scores[0],
        "incumbent_score": scores[1],
        "candidate_ratings": ratings[0],
        "incumbent_ratings": ratings[1],
        "candidate_first": winner,
        "incumbent_first": winner,
        "winner": winner,
        "unanswered": False,
    }


def run_job(store: Store, instance: dg.DagsterInstance, name: str, key: str, config: Any = None) -> bool:
    job = build_defs({"store": StoreResource(home=str(store.settings.root))}).resolve_job_def(name)
    instance.add_dynamic_partitions("attempts", [key])
    done = job.execute_in_process(instance=instance, partition_key=key, run_config=config, raise_on_error=False)
    return bool(done.success)


def test_a_better_one_goes_live_on_its_own(
    store: Store, tiny_model: Path, tmp_path: Path, instance: dg.DagsterInstance
):
    attempt = compared(store, tiny_model, tmp_path, BETTER, policy="holdout")
    assert run_job(store, instance, "promotion", attempt.key)
    ended = store.attempts.get(attempt.run_id)
    assert (ended.state, ended.decision, ended.version_no) == ("promoted", "auto_promoted", 1)
    live = store.versions.live("parcels")
    assert live is not None
    assert (live.version_no, live.adapters) == (1, (attempt.adapter_digest,))
    assert run_job(store, instance, "promotion", attempt.key)  # a second run has nothing to do
    assert len(store.versions.list()) == 1


def test_one_that_is_not_better_is_closed(store: Store, tiny_model: Path, tmp_path: Path, instance: dg.DagsterInstance):
    attempt = compared(store, tiny_model, tmp_path, WORSE, policy="holdout")
    assert run_job(store, instance, "promotion", attempt.key)
    ended = store.attempts.get(attempt.run_id)
    assert (ended.state, ended.decision) == ("rejected", "auto_rejected")
    assert store.versions.list() == ()


def test_two_approvals_at_once_make_one_version(
    store: Store, settings: Settings, tiny_model: Path, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    attempt = compared(store, tiny_model, tmp_path, BETTER)
    assert run_job(store, instance, "promotion", attempt.key)
    waiting = store.attempts.get(attempt.run_id)
    assert (waiting.state, store.versions.list()) == ("awaiting_review", ())

    def approve(_: int) -> str:
        mine = open_store(settings)
        try:
            return deciding.approve(mine, waiting, force=False, now=datetime.now(UTC)).state
        except LoopError as error:
            return error.code

    with ThreadPoolExecutor(4) as pool:
        said = sorted(pool.map(approve, range(4)))
    assert said.count("promoting") == 1, said
    for _ in range(2):
        assert run_job(store, instance, "promotion", attempt.key)
    assert [version.version_no for version in store.versions.list()] == [1]
    assert store.attempts.get(attempt.run_id).decision == "promoted"


def test_a_person_decides_in_dagsters_ui(
    store: Store, tiny_model: Path, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    attempt = compared(store, tiny_model, tmp_path, FAILED)
    run_job(store, instance, "promotion", attempt.key)
    assert store.attempts.get(attempt.run_id).state == "awaiting_review"
    forced = {"ops": {"approve_attempt": {"config": {"force": True}}}}
    assert not run_job(store, instance, "approve", attempt.key, forced)  # untested: force never helps
    assert store.attempts.get(attempt.run_id).state == "awaiting_review"
    assert run_job(store, instance, "test_again", attempt.key)
    assert store.attempts.get(attempt.run_id).state == "checkpoint_ready"
    assert not run_job(store, instance, "reject", attempt.key)  # it waits for no decision now


def test_a_verdict_about_another_incumbent_does_not_count(
    store: Store, tiny_model: Path, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    attempt = compared(store, tiny_model, tmp_path, BETTER, policy="holdout", version=7)
    assert run_job(store, instance, "promotion", attempt.key)
    again = store.attempts.get(attempt.run_id)
    assert (again.state, store.versions.list()) == ("checkpoint_ready", ())
    with pytest.raises(Conflict):
        deciding.approve(store, again, force=True, now=datetime.now(UTC))


def test_the_evidence_decides_and_not_the_verdict_on_the_row(
    store: Store, tiny_model: Path, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    attempt = compared(store, tiny_model, tmp_path, WORSE, policy="holdout")
    store.attempts.note(attempt.run_id, verdict="better")  # as if somebody had edited the registry
    assert run_job(store, instance, "promotion", attempt.key)
    assert store.versions.list() == ()


def fail_rows(store: Store, attempt: Attempt, count: int) -> None:
    """Make `count` of the attempt's hundred better judgements failed ones: derived again, that is inconclusive."""
    own = {"attempt": attempt.key, "pipeline_id": attempt.pipeline_id, "attempt_no": 1}
    scores = [FAILED if number < count else BETTER for number in range(100)]
    rows = [own | _judgement(f"sample-{number:03d}", one) for number, one in enumerate(scores)]
    write(store, JUDGEMENTS, attempt, rows)


@pytest.mark.parametrize("policy", ["manual", "holdout"])
def test_an_approval_is_checked_again_on_what_the_evidence_says_when_it_is_applied(
    store: Store, tiny_model: Path, tmp_path: Path, instance: dg.DagsterInstance, policy: str
) -> None:
    attempt = compared(store, tiny_model, tmp_path, BETTER)
    run_job(store, instance, "promotion", attempt.key)
    store.pipelines.edit(attempt.pipeline_id, settings={"promotion": {"policy": policy}})
    fail_rows(store, attempt, 60)
    deciding.approve(store, store.attempts.get(attempt.run_id), force=False, now=datetime.now(UTC))
    assert run_job(store, instance, "promotion", attempt.key)
    back = store.attempts.get(attempt.run_id)
    assert (back.state, back.decision, back.decided_at, back.forced) == ("awaiting_review", None, None, False)
    assert (store.versions.list(), store.versions.live("parcels")) == ((), None)
    assert back.review_until is not None and back.review_until > datetime.now(UTC) + timedelta(days=13)
    assert "the approval does not hold" in store.attempts.timeline(attempt.run_id)[-1].sentence
    # What people see is what the evidence says, so the next approval needs force as well, and then holds.
    assert (back.verdict, (back.report or {})["rows_scored"]) == ("inconclusive", 40)
    kept = store.lake.scan(REPORTS).filter(pl.col("attempt") == attempt.key).collect()
    assert kept["verdict"].to_list() == ["inconclusive"]
    with pytest.raises(Refused):
        deciding.approve(store, back, force=False, now=datetime.now(UTC))
    deciding.approve(store, back, force=True, now=datetime.now(UTC))
    assert run_job(store, instance, "promotion", attempt.key)
    ended = store.attempts.get(attempt.run_id)
    assert (ended.state, ended.decision, ended.forced, ended.version_no) == ("promoted", "promoted", True, 1)


def test_force_that_was_given_holds_for_the_evidence_of_later(
    store: Store, tiny_model: Path, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    attempt = compared(store, tiny_model, tmp_path, BETTER)
    run_job(store, instance, "promotion", attempt.key)
    deciding.approve(store, store.attempts.get(attempt.run_id), force=True, now=datetime.now(UTC))
    fail_rows(store, attempt, 60)
    assert run_job(store, instance, "promotion", attempt.key)
    assert store.attempts.get(attempt.run_id).state == "promoted"
    assert [version.version_no for version in store.versions.list()] == [1]


@pytest.mark.parametrize("force", [False, True])
def test_an_approval_of_what_turns_out_untested_goes_back_to_review(
    store: Store, tiny_model: Path, tmp_path: Path, instance: dg.DagsterInstance, force: bool
) -> None:
    attempt = compared(store, tiny_model, tmp_path, BETTER)
    run_job(store, instance, "promotion", attempt.key)
    deciding.approve(store, store.attempts.get(attempt.run_id), force=force, now=datetime.now(UTC))
    fail_rows(store, attempt, 100)
    assert run_job(store, instance, "promotion", attempt.key)
    back = store.attempts.get(attempt.run_id)
    assert (back.state, store.versions.list()) == ("awaiting_review", ())
    assert back.review_until is not None


def test_damaged_weights_never_go_live(store: Store, tiny_model: Path, tmp_path: Path, instance: dg.DagsterInstance):
    attempt = compared(store, tiny_model, tmp_path, BETTER, policy="holdout")
    (store.artifacts.root / str(attempt.adapter_digest) / "weights.txt").write_text("w3ights")
    assert not run_job(store, instance, "promotion", attempt.key)
    ended = store.attempts.get(attempt.run_id)
    assert (ended.state, ended.error_code) == ("failed", "ARTIFACT_TORN")
    assert store.versions.list() == ()
    with pytest.raises(Refused):
        deciding.test_again(store, ended, now=datetime.now(UTC))
