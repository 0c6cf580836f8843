"""Pipelines: names, tags and ids for ever, revisions, three-valued edits, files applied twice, deletion."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from loop_dagster.errors import BadRequest, LeaseLost, NotFound, Refused, RevisionMismatch, TrainingSettingOutOfRange
from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.store.attempts import Attempts
from loop_dagster.store.leases import Leases
from loop_dagster.store.pipelines import Pipeline, Pipelines
from loop_dagster.store.registry import Registry
from loop_dagster.store.schema import live, pipeline_revisions, sources

NOW = datetime(2026, 12, 1, 8, tzinfo=UTC)


@pytest.fixture
def store(registry: Registry) -> Pipelines:
    return Pipelines(registry)


def make(store: Pipelines, name: str = "Support replies", **options: Any) -> Pipeline:
    return store.create(name, model_id="base", now=NOW, **options)


def source(store: Pipelines, name: str) -> dict[str, Any] | None:
    with store.registry.read() as connection:
        row = connection.execute(sa.select(sources).where(sources.c.source == name)).mappings().one_or_none()
    return None if row is None else dict(row)


def revisions(store: Pipelines, pipeline: Pipeline) -> int:
    query = sa.select(sa.func.count()).where(pipeline_revisions.c.pipeline_id == pipeline.pipeline_id)
    with store.registry.read() as connection:
        return int(connection.execute(query).scalar_one())


def refused(code: str, call: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.code == code
    return caught.value


def test_create_makes_tag_id_seed_and_source(store: Pipelines) -> None:
    made = make(store)
    assert made.tag == "support-replies"
    head, _, tail = made.pipeline_id.rpartition("-")
    assert head == made.tag
    assert len(tail) == 4
    assert int(tail, 16) >= 0
    assert made.live_name == "loop-support-replies"
    assert (made.revision, made.enabled, made.failures, made.train_now) == (1, True, 0, False)
    assert made.settings == PipelineSettings()
    assert made.created_at == NOW
    assert 0 <= made.seed < 2**63
    found = source(store, "support-replies")
    assert found is not None
    assert found["enabled"]
    assert found["tags"] == ["support-replies"]
    assert revisions(store, made) == 1


def test_create_keeps_what_the_source_was_set_to(store: Pipelines) -> None:
    with store.registry.write() as connection:
        connection.execute(
            sa.insert(sources).values(
                workspace="default",
                source="support-replies",
                enabled=False,
                retention_days=7,
                sample_rate=0.5,
                tags=["old"],
                updated_at=NOW,
            )
        )
    make(store)
    found = source(store, "support-replies")
    assert found is not None
    assert (found["enabled"], found["retention_days"], found["sample_rate"]) == (True, 7, 0.5)
    assert set(found["tags"]) == {"old", "support-replies"}


def test_found_by_id_tag_and_name(store: Pipelines) -> None:
    made = make(store, "Support  Replies")
    for ref in (made.pipeline_id, made.tag, "support replies", " SUPPORT\tREPLIES ", made.pipeline_id.upper()):
        assert store.get(ref) == made
    assert store.list() == (made,)


def test_not_found_names_near_ones(store: Pipelines) -> None:
    make(store)
    make(store, "Sales")
    with pytest.raises(NotFound, match=r"Did you mean support-replies\?"):
        store.get("suport-replys")
    with pytest.raises(NotFound) as caught:
        store.get("zzzzzz")
    assert "Did you mean" not in caught.value.message


def test_another_workspace_is_another_world(store: Pipelines) -> None:
    made = make(store)
    other = Pipelines(Registry(store.registry.url, "other"))
    with pytest.raises(NotFound):
        other.get(made.pipeline_id)
    assert make(other).tag == made.tag
    assert len(other.list()) == len(store.list()) == 1
    other.delete(made.tag)
    assert store.get(made.tag) == made


def test_names_and_tags_are_given_once(store: Pipelines) -> None:
    made = make(store)
    refused("PIPELINE_NAME_TAKEN", lambda: make(store, "SUPPORT replies"))
    assert "support-replies" in refused("OWN_TAG_TAKEN", lambda: make(store, "Support: replies!")).message
    store.delete(made.pipeline_id, now=NOW)
    assert "deleted" in refused("PIPELINE_NAME_TAKEN", lambda: make(store)).message
    refused("OWN_TAG_TAKEN", lambda: make(store, "Support: replies!"))
    assert store.list() == ()


@pytest.mark.parametrize("name", ["", "   ", "x" * 81])
def test_names_that_cannot_be(store: Pipelines, name: str) -> None:
    with pytest.raises(BadRequest):
        make(store, name)
    assert store.list() == ()


def test_many_creators_make_one(store: Pipelines) -> None:
    made: list[Pipeline] = []
    codes: list[str] = []
    barrier = threading.Barrier(6)

    def race() -> None:
        barrier.wait()
        try:
            made.append(make(Pipelines(store.registry)))
        except Refused as error:
            codes.append(error.code)

    threads = [threading.Thread(target=race) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert codes == ["PIPELINE_NAME_TAKEN"] * 5
    assert store.list() == tuple(made)


def test_edit_is_three_valued_and_counts_revisions(store: Pipelines) -> None:
    made = make(store)
    later = NOW + timedelta(hours=1)
    edited = store.edit(
        made.tag,
        settings={"training": {"epochs": 4}, "tags": ["vip"], "max_versions": 3},
        name="Replies",
        expected_revision=1,
        now=later,
    )
    assert (edited.revision, edited.name, edited.tag) == (2, "Replies", made.tag)
    assert (edited.settings.training.epochs, edited.settings.tags, edited.settings.max_versions) == (4, ("vip",), 3)
    assert edited.updated_at == later
    back = store.edit(made.tag, settings={"max_versions": None, "training": {"epochs": None}}, now=later)
    assert (back.revision, back.settings.max_versions, back.settings.training.epochs) == (3, None, None)
    assert back.settings.tags == ("vip",)
    assert store.edit(made.tag, settings={"tags": ["vip"]}, name="Replies") == back  # nothing changed: no revision
    assert store.revision(made.pipeline_id, 1) == made.settings
    assert store.revision(made.pipeline_id, 2) == edited.settings
    with pytest.raises(NotFound):
        store.revision(made.pipeline_id, 4)
    assert revisions(store, made) == 3


def test_a_refused_edit_changes_nothing(store: Pipelines) -> None:
    made = make(store)
    other = make(store, "Sales")
    with pytest.raises(RevisionMismatch, match="at revision 1, the edit expected 7"):
        store.edit(made.tag, settings={"tags": ["a"]}, expected_revision=7)
    with pytest.raises(TrainingSettingOutOfRange):
        store.edit(made.tag, settings={"training": {"epochs": 99}}, name="New name")
    with pytest.raises(BadRequest):
        store.edit(made.tag, settings={"unknown": 1})
    refused("PIPELINE_NAME_TAKEN", lambda: store.edit(made.tag, name="sales"))
    assert (store.get(made.tag), store.get(other.tag)) == (made, other)


def test_of_two_edits_on_one_revision_one_wins(store: Pipelines) -> None:
    made = make(store)
    outcomes: list[str] = []
    barrier = threading.Barrier(4)

    def race(number: int) -> None:
        barrier.wait()
        try:
            Pipelines(store.registry).edit(made.tag, settings={"max_versions": number}, expected_revision=1)
            outcomes.append("saved")
        except RevisionMismatch:
            outcomes.append("refused")

    threads = [threading.Thread(target=race, args=(number,)) for number in range(2, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused"] * 3 + ["saved"]
    assert store.get(made.tag).revision == 2


def test_renames_that_cross_wait_for_nobody(store: Pipelines) -> None:
    """Each takes the other's name: a lock on the other's row would be a deadlock."""
    one, two = make(store, "One"), make(store, "Two")
    codes: list[str] = []
    barrier = threading.Barrier(2)

    def rename(tag: str, name: str) -> None:
        for _ in range(10):
            barrier.wait(20)
            try:
                Pipelines(store.registry).edit(tag, name=name)
            except Refused as error:
                codes.append(error.code)

    threads = [threading.Thread(target=rename, args=pair) for pair in ((one.tag, "two"), (two.tag, "one"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == ["PIPELINE_NAME_TAKEN"] * 20


def test_the_model_cannot_change_under_an_attempt(store: Pipelines) -> None:
    made = store.create("Support replies", model_id="base", model_digest="d1", now=NOW)
    attempts = Attempts(store.registry)
    attempt = attempts.open_attempt(made.pipeline_id, trigger="data", frozen={}, now=NOW)
    assert attempt is not None
    assert attempt.run_id in refused("RUN_ACTIVE", lambda: store.edit(made.tag, model_id="other")).message
    refused("RUN_ACTIVE", lambda: store.edit(made.tag, model_digest="d2"))
    kept = store.edit(made.tag, model_id="base", settings={"max_versions": 5})  # the same model is no change
    assert (kept.model_id, kept.model_digest, kept.revision) == ("base", "d1", 2)
    attempts.request_cancel(attempt.run_id, now=NOW)
    changed = store.edit(made.tag, model_id="other")
    assert (changed.model_id, changed.model_digest) == ("other", None)
    assert store.edit(made.tag, model_digest="d3").model_digest == "d3"


def test_pause_and_resume(store: Pipelines) -> None:
    made = make(store)
    store.set_due(made.tag, NOW + timedelta(hours=2))
    paused = store.pause(made.tag, reason="balance_empty", now=NOW)
    assert (paused.enabled, paused.paused_reason, paused.revision) == (False, "balance_empty", 1)
    assert paused.next_due_at is None  # a slot that passes while it is paused is not taken late
    resumed = store.resume(made.tag, now=NOW)
    assert (resumed.enabled, resumed.paused_reason) == (True, None)


def test_due_and_train_now(store: Pipelines) -> None:
    made = make(store)
    assert store.set_due(made.tag, NOW + timedelta(hours=2)).next_due_at == NOW + timedelta(hours=2)
    assert store.want_training(made.tag).train_now
    attempt = Attempts(store.registry).open_attempt(made.pipeline_id, trigger="manual", frozen={}, now=NOW)
    assert attempt is not None
    assert (store.get(made.tag).train_now, store.get(made.tag).next_due_at) == (False, None)  # both are used


def test_delete(store: Pipelines) -> None:
    made = make(store)
    other = make(store, "Sales")
    attempts = Attempts(store.registry)
    attempt = attempts.open_attempt(made.pipeline_id, trigger="data", frozen={}, now=NOW)
    assert attempt is not None
    leases = Leases(store.registry)
    lease = leases.take(f"attempt/{attempt.run_id}")
    with store.registry.write() as connection:
        for pipeline in (made, other):
            connection.execute(
                sa.insert(live).values(
                    workspace="default",
                    tag=pipeline.tag,
                    pipeline_id=pipeline.pipeline_id,
                    version_no=1,
                    moved_at=NOW,
                )
            )
    gone = store.delete(made.name, now=NOW)
    assert gone.cancelled_run_id == attempt.run_id
    assert gone.pipeline.deleted_at == NOW
    for ref in (made.pipeline_id, made.tag, made.name):
        with pytest.raises(NotFound):
            store.get(ref)
    with pytest.raises(NotFound):
        store.delete(made.pipeline_id)
    with pytest.raises(NotFound):
        attempts.open_attempt(made.pipeline_id, trigger="data", frozen={}, now=NOW)
    assert store.get(made.pipeline_id, deleted=True) == gone.pipeline
    ended = attempts.get(attempt.run_id)
    assert (ended.state, ended.cancel_requested, ended.finished_at) == ("cancelled", True, NOW)
    with pytest.raises(LeaseLost, match="revoked"):
        leases.beat(lease.name, lease.token)
    mine, theirs = source(store, made.tag), source(store, other.tag)
    assert mine is not None
    assert theirs is not None
    assert (mine["enabled"], theirs["enabled"]) == (False, True)
    with store.registry.read() as connection:
        assert connection.execute(sa.select(live.c.tag)).scalars().all() == [other.tag]


SPEC = {
    "name": "Support replies",
    "model": "base",
    "tags": ["vip"],
    "conditions": {"feedback": ["corrected", "good"]},
    "training": {"epochs": 4},
    "holdout": {"percent": 7},
}


def test_a_file_applied_twice_changes_nothing(store: Pipelines) -> None:
    assert store.apply(SPEC, now=NOW) == "created"
    made = store.get("support-replies")
    assert made.settings.holdout.percent == 7
    assert store.apply(SPEC, now=NOW + timedelta(days=1)) == "unchanged"
    assert store.get("support-replies") == made
    store.pause(made.tag)
    assert store.apply(SPEC) == "unchanged"  # a file without `enabled` leaves the switch alone
    assert not store.get(made.tag).enabled
    assert store.apply({**SPEC, "enabled": True}) == "changed"
    assert store.get(made.tag).enabled
    assert store.apply({**SPEC, "enabled": True}) == "unchanged"


def test_a_changed_file_makes_one_revision(store: Pipelines) -> None:
    store.apply(SPEC, model_digest="d1")
    without = {name: value for name, value in SPEC.items() if name != "training"}
    assert store.apply({**without, "name": "SUPPORT replies"}) == "changed"
    changed = store.get("support-replies")
    assert (changed.revision, changed.name, changed.settings.training.epochs) == (2, "SUPPORT replies", None)
    assert changed.model_digest == "d1"
    assert store.apply({**without, "name": "SUPPORT replies"}, model_digest="d2") == "changed"
    assert store.get("support-replies").model_digest == "d2"


@pytest.mark.parametrize(
    "spec",
    [{"model": "base"}, {"name": "a"}, {"name": 3, "model": "b"}, {**SPEC, "enabled": "yes"}, {**SPEC, "min_rows": 2}],
)
def test_files_that_cannot_be(store: Pipelines, spec: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        store.apply(spec)
    assert store.list() == ()


def test_a_file_does_not_bring_back_a_deleted_pipeline(store: Pipelines) -> None:
    store.apply(SPEC)
    store.delete("support-replies")
    refused("PIPELINE_NAME_TAKEN", lambda: store.apply(SPEC))
