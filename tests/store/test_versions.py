"""Going live: one transaction, one version per attempt, never over something else than what it was compared with."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from datetime import UTC, datetime, timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import sqlalchemy as sa

from loop_dagster.errors import Conflict, LiveMoved, MoveNotAllowed, NotFound
from loop_dagster.rules.states import FLOW
from loop_dagster.store.attempts import Attempt, Attempts
from loop_dagster.store.pipelines import Pipeline, Pipelines
from loop_dagster.store.registry import Registry
from loop_dagster.store.schema import live
from loop_dagster.store.versions import Version, Versions

NOW = datetime(2026, 12, 1, 8, tzinfo=UTC)
BASE = "b" * 64


@pytest.fixture
def pipeline(registry: Registry) -> Pipeline:
    return Pipelines(registry).create("Support replies", model_id="base", now=NOW)


def promoting(registry: Registry, pipeline: Pipeline, adapter: str = "a1") -> Attempt:
    store = Attempts(registry)
    attempt = store.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW)
    assert attempt is not None
    for state in FLOW[1 : FLOW.index("promoting") + 1]:
        fields = {"adapter_digest": adapter} if state == "checkpoint_ready" else {}
        attempt = store.move(attempt.run_id, state, "On.", now=NOW, **fields)
    return attempt


def promote(registry: Registry, attempt: Attempt, expect_live: int | None, *adapters: str) -> Version:
    return Versions(registry).promote(
        attempt.run_id, base_digest=BASE, adapters=adapters or ("a1",), expect_live=expect_live, now=NOW
    )


def test_v1_and_v2(registry: Registry, pipeline: Pipeline) -> None:
    versions = Versions(registry)
    assert versions.live(pipeline.tag) is None
    first = promoting(registry, pipeline)
    made = promote(registry, first, None)
    assert made == Version(pipeline.pipeline_id, 1, first.run_id, BASE, ("a1",), NOW, None)
    assert versions.live(pipeline.tag) == made
    ended = Attempts(registry).get(first.run_id)
    assert (ended.state, ended.version_no, ended.decision, ended.decided_at) == ("promoted", 1, "auto_promoted", NOW)
    assert ended.finished_at == NOW
    assert Attempts(registry).timeline(first.run_id)[-1].sentence == "Version v1 answers as loop-support-replies."
    assert Pipelines(registry).get(pipeline.tag).failures == 0
    second = promoting(registry, pipeline, "a2")
    made2 = Versions(registry).promote(
        second.run_id,
        base_digest=BASE,
        adapters=["a1", "a2"],
        expect_live=1,
        now=NOW + timedelta(days=1),
        decision="promoted",
        actor="key 1",
    )
    assert (made2.version_no, made2.adapters) == (2, ("a1", "a2"))
    assert versions.all_live() == {pipeline.tag: made2}
    assert versions.list(pipeline.pipeline_id) == versions.list() == (made, made2)
    assert versions.get(pipeline.pipeline_id, 2) == made2
    assert versions.of_attempt(second.run_id) == made2
    assert Attempts(registry).get(second.run_id).decision == "promoted"
    with pytest.raises(NotFound):
        versions.get(pipeline.pipeline_id, 3)
    assert Versions(Registry(registry.url, "other")).list() == ()


def test_numbers_are_those_of_versions_not_of_attempts(registry: Registry, pipeline: Pipeline) -> None:
    attempts = Attempts(registry)
    for _ in range(2):
        attempt = promoting(registry, pipeline)
        attempts.move(attempt.run_id, "rejected", "Not better.", now=NOW)
    assert promote(registry, promoting(registry, pipeline), None).version_no == 1


def test_refused_when_something_else_is_live(registry: Registry, pipeline: Pipeline) -> None:
    promote(registry, promoting(registry, pipeline), None)
    attempt = promoting(registry, pipeline)
    for expected in (None, 2):
        with pytest.raises(LiveMoved, match="answers with v1 by now") as caught:
            promote(registry, attempt, expected)
        assert caught.value.details["found"] == 1
    assert Attempts(registry).get(attempt.run_id) == attempt
    assert len(Versions(registry).list()) == 1
    assert promote(registry, attempt, 1).version_no == 2


def test_refused_when_nothing_is_live_any_more(registry: Registry, pipeline: Pipeline) -> None:
    promote(registry, promoting(registry, pipeline), None)
    attempt = promoting(registry, pipeline)
    with registry.write() as connection:
        connection.execute(sa.delete(live))
    with pytest.raises(LiveMoved, match="answers with nothing by now"):
        promote(registry, attempt, 1)
    assert promote(registry, attempt, None).version_no == 2  # never numbered again


def test_only_an_attempt_that_is_promoting(registry: Registry, pipeline: Pipeline) -> None:
    attempts = Attempts(registry)
    attempt = attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW)
    assert attempt is not None
    with pytest.raises(MoveNotAllowed):
        promote(registry, attempt, None)
    attempts.request_cancel(attempt.run_id, now=NOW)
    with pytest.raises(MoveNotAllowed):
        promote(registry, attempt, None)
    with pytest.raises(NotFound):
        Versions(registry).promote("nobody", base_digest=BASE, adapters=["a"], expect_live=None, now=NOW)
    assert Versions(registry).all_live() == {}


def test_the_attempt_s_own_adapter_must_be_in_it(registry: Registry, pipeline: Pipeline) -> None:
    attempt = promoting(registry, pipeline, "a1")
    with pytest.raises(Conflict, match="kept adapter a1"):
        promote(registry, attempt, None, "someone-elses")
    assert Versions(registry).list() == ()


def test_not_after_its_pipeline_was_deleted(registry: Registry, pipeline: Pipeline) -> None:
    attempt = promoting(registry, pipeline)
    Pipelines(registry).delete(pipeline.tag, now=NOW)
    with pytest.raises(NotFound):
        promote(registry, attempt, None)
    assert Versions(registry).all_live() == {}


def test_promotion_against_deletion_never_leaves_a_live_name(registry: Registry) -> None:
    for number in range(6):
        pipeline = Pipelines(registry).create(f"Pipeline {number}", model_id="base", now=NOW)
        attempt = promoting(registry, pipeline)
        barrier = threading.Barrier(2)

        def delete(tag: str = pipeline.tag, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            Pipelines(registry).delete(tag, now=NOW)

        thread = threading.Thread(target=delete)
        thread.start()
        barrier.wait()
        with contextlib.suppress(NotFound, MoveNotAllowed):
            promote(registry, attempt, None)
        thread.join()
        assert Versions(registry).live(pipeline.tag) is None
        assert Attempts(registry).get(attempt.run_id).ended


def promote_once(url: str, run_id: str, go: str) -> None:
    versions = Versions(Registry(url))
    while not Path(go).exists():
        time.sleep(0.001)
    versions.promote(run_id, base_digest=BASE, adapters=["a1"], expect_live=None, now=NOW)


def test_many_at_once_make_one_version(
    registry: Registry, pipeline: Pipeline, processes: ForkServerContext, tmp_path: Path
) -> None:
    attempt = promoting(registry, pipeline)
    go = tmp_path / "go"
    children = [processes.Process(target=promote_once, args=(registry.url, attempt.run_id, str(go))) for _ in range(3)]
    made: list[Version] = []
    threads = [threading.Thread(target=lambda: made.append(promote(registry, attempt, None))) for _ in range(5)]
    for child in children:
        child.start()
    time.sleep(0.3)
    go.touch()
    for thread in threads:
        thread.start()
    for worker in (*threads, *children):
        worker.join(60)
    assert [child.exitcode for child in children] == [0] * 3
    assert Versions(registry).list() == (made[0],)
    assert made == [made[0]] * 5
    assert len(Attempts(registry).timeline(attempt.run_id)) == len(FLOW)


def test_killed_while_promoting(
    registry: Registry, pipeline: Pipeline, processes: ForkServerContext, tmp_path: Path
) -> None:
    """Killed anywhere: either it all happened or nothing, and asking again makes it one version."""
    go = tmp_path / "go"
    go.touch()
    for number in range(1, 7):
        attempt = promoting(registry, pipeline)
        child = processes.Process(target=promote_killed, args=(registry.url, attempt.run_id, number))
        child.start()
        child.join(30)
        found = Attempts(registry).get(attempt.run_id)
        version = Versions(registry).of_attempt(attempt.run_id)
        pointer = Versions(registry).live(pipeline.tag)
        happened = found.state == "promoted"
        assert happened == (version is not None)
        assert (pointer.version_no if pointer else 0) == (number if happened else number - 1)
        made = promote(registry, attempt, number - 1 or None)
        assert made.version_no == number
    assert [version.version_no for version in Versions(registry).list()] == [1, 2, 3, 4, 5, 6]


def promote_killed(url: str, run_id: str, number: int) -> None:
    threading.Thread(target=kill_me_after, args=(0.001 * number**1.5,)).start()
    Versions(Registry(url)).promote(run_id, base_digest=BASE, adapters=["a1"], expect_live=number - 1 or None, now=NOW)


def kill_me_after(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)
