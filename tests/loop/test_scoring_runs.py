"""Scoring of unreviewed samples on real stores with a judge over real HTTP, from short to an attempt that opens."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from scoring_world import PRICES, fill, judged, likes, made, now, number_of, run, scores, settings_of, status
from stub_judge import Reply, Shown, completion, rating

from loop_dagster import scoring
from loop_dagster.errors import AgentCouldNotStart, LeaseBusy, LeaseLost, NotEnoughSamples, Refused
from loop_dagster.opening import NotYet, Opened, look, train_now
from loop_dagster.rules import scoring as rule
from loop_dagster.rules.money import NANOCENTS, Prices
from loop_dagster.settings import Settings
from loop_dagster.store.giving import feedback_row
from loop_dagster.store.intake import drain
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.store.records import Attempt
from loop_dagster.store.scorings import SCORING_LIMIT
from loop_dagster.store.work import scoring_folder, sweep_work

CHILD = Path(__file__).with_name("scoring_child.py")
#: What one call of the stub costs.
CALL = Prices(input_cents_per_million=Decimal(10_000), output_cents_per_million=Decimal(20_000)).cost(
    input_tokens=100, output_tokens=10
)


def opened(store: Store, pipeline: Pipeline) -> Attempt:
    found = look(store, store.pipelines.get(pipeline.pipeline_id), now())
    assert isinstance(found, Opened), found
    return found.attempt


# the whole path


def test_a_short_pipeline_is_filled_with_picks_and_its_attempt_opens(home: Path, tiny_model: Path) -> None:
    with judged(home, likes(lambda number: 9 if number % 4 else 2), **PRICES) as (store, stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 1_000, good=True)
        fill(store, pipeline, 1_000, 1_400)
        assert isinstance(look(store, pipeline, now()), NotYet)
        done = run(store, pipeline)
        assert done.picked == 100
        assert done.standing is not None
        assert (done.standing.status, done.standing.message) == (
            "waiting",
            "The next attempt has what it needs, so nothing is scored.",
        )
        # The newest first, and none beyond the one that made it enough.
        asked = sorted(number_of(shown) for shown in stub.seen)
        assert asked == list(range(asked[0], 1_400))
        assert len(asked) == done.scored == done.calls == len(scores(store))
        assert sum(number % 4 != 0 for number in asked) == 100
        assert not any("RIGHT ANSWER" in shown.blocks for shown in stub.seen)
        assert all("on its own" in shown.task for shown in stub.seen)
        attempt = opened(store, pipeline)
        assert "1,100 are there (100 of them picked by the judge)" in (attempt.reason or "")
        spent = done.scored * CALL
        assert done.nanocents == spent
        assert attempt.frozen["sample_scoring"] == {
            "nanocents": spent // NANOCENTS * NANOCENTS,
            "scored": done.scored,
            "picked": 100,
        }
        assert store.scorings.get(pipeline.pipeline_id).nanocents == spent % NANOCENTS
        assert not list(store.settings.work.rglob("*.json*"))
        # While the attempt is under way nothing more is asked.
        assert status(store, pipeline)[0] == "waiting"
        before = len(stub.seen)
        assert run(store, pipeline).scored == 0
        assert len(stub.seen) == before


def test_among_very_many_the_newest_are_looked_at_first_and_all_of_them_in_the_end(
    home: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "WINDOW", 10)
    monkeypatch.setattr(rule, "CHUNK", 4)
    with judged(home, likes(lambda number: number % 11), judge_concurrency=1) as (store, stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 35)
        assert scoring.plan(store, pipeline, now()).todo.height == 10
        assert run(store, pipeline).scored == 35
        assert [number_of(shown) for shown in stub.seen] == list(range(34, -1, -1))
        assert status(store, pipeline)[0] == "idle"


def test_with_enough_reviewed_samples_nobody_is_asked(home: Path, tiny_model: Path) -> None:
    with judged(home, likes(lambda _: 10)) as (store, stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 1_100, good=True)
        fill(store, pipeline, 1_100, 2_000)
        assert run(store, pipeline).standing is not None
        assert status(store, pipeline) == ("waiting", "The next attempt has what it needs, so nothing is scored.")
        assert stub.seen == []


def test_scores_reach_the_lake_with_the_drain_and_are_not_asked_for_again(home: Path, tiny_model: Path) -> None:
    with judged(home, likes(lambda number: number % 10)) as (store, stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 30)
        assert run(store, pipeline).scored == 30
        before = sorted(scores(store))
        drain(store, holder="test")
        assert sorted(scores(store)) == before
        done = run(store, pipeline)
        assert (done.scored, done.standing and done.standing.status) == (0, "idle")
        assert len(stub.seen) == 30


def test_what_a_person_says_later_wins_and_is_never_asked_about(home: Path, tiny_model: Path) -> None:
    with judged(home, likes(lambda _: 10)) as (store, stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 10)
        ids = store.samples.keys().samples.sort("created_at", "sample_id").collect()["sample_id"].to_list()
        store.inbox.put(feedback=[feedback_row(ids[0], "rejected", None, None, now())])
        assert run(store, pipeline).picked == 9
        assert ids[0] not in dict(scores(store))
        store.inbox.put(feedback=[feedback_row(ids[1], "rejected", None, None, now())])
        selection = scoring.measure(store, pipeline, None, now()).selection
        taught = dict(selection.rows.select("sample_id", "teaches").iter_rows())
        assert taught[ids[1]] == "rejected"
        assert sum(word == "scored" for word in taught.values()) == 8
        assert len(stub.seen) == 9


def test_what_a_person_reviews_meanwhile_counts_and_less_is_asked(home: Path, tiny_model: Path) -> None:
    with judged(home, likes(lambda _: 10)) as (store, stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 850, good=True)
        fill(store, pipeline, 850, 1_300)

        def reviews() -> bool:
            """While the first hundred are asked about, somebody brings 100 reviewed samples."""
            if len(stub.seen) >= 50 and not done:
                done.append(True)
                fill(store, pipeline, 5_000, 5_100, good=True)
            return True

        done: list[bool] = []
        assert run(store, pipeline, may_go_on=reviews).picked == 150
        assert len(stub.seen) == 150


# kills, two at once, being switched off


def test_a_killed_run_pays_for_nothing_twice_and_loses_no_verdict(home: Path, tiny_model: Path) -> None:
    def slow(shown: Shown) -> Reply:
        reply = completion(rating(9))
        reply.delay_s = 0.01
        return reply

    with judged(home, slow, **PRICES) as (store, stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 250)
        command = [sys.executable, str(CHILD), str(home), stub.url, pipeline.pipeline_id]
        kills = 0
        for after in (20, 120):
            child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            deadline = time.monotonic() + 60
            while len(stub.seen) < after and child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            assert child.poll() is None, "it ended before it could be killed"
            child.send_signal(signal.SIGKILL)
            child.wait()
            kills += 1
            time.sleep(0.1)
            with store.registry.write() as connection:
                connection.exec_driver_sql("UPDATE leases SET token = NULL")  # its time is over
            assert scoring.leftovers(store) == {pipeline.pipeline_id}
            sweep_work(store)
            assert scoring.leftovers(store) == {pipeline.pipeline_id}
        heard = set()
        for path in scoring_folder(store, pipeline.pipeline_id).glob("*.jsonl"):
            heard |= {row["key"] for row in map(json.loads, path.read_text().splitlines()[1:]) if "said" in row}
        assert heard
        done = run(store, pipeline)
        assert done.standing is not None
        assert done.standing.status == "idle"
        assert Counter(Counter(dict(scores(store)).keys()).values()) == {1: 250}
        assert len(scores(store)) == 250
        asked = Counter(number_of(shown) for shown in stub.seen)
        assert len(asked) == 250
        assert max(asked.values()) <= 1 + kills
        again = sum(asked.values()) - 250  # calls that were under way at a kill, which nobody heard
        assert again <= kills * 8
        spent = store.scorings.get(pipeline.pipeline_id).nanocents
        heard_for = 250 * CALL
        # A call that was under way is counted by a part of the most that it could have used.
        assert heard_for <= spent <= heard_for + kills * 8 * 10 * CALL
        assert not list(scoring_folder(store, pipeline.pipeline_id).iterdir())


def test_a_chunk_that_was_stored_before_the_kill_is_not_stored_again(
    home: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with judged(home, likes(lambda _: 10), **PRICES) as (store, stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 40)

        def killed(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(scoring._Noted, "remove", killed)
            run(store, pipeline)
        spent = store.scorings.get(pipeline.pipeline_id).nanocents
        assert spent == 40 * CALL
        assert run(store, pipeline).scored == 0
        assert store.scorings.get(pipeline.pipeline_id).nanocents == spent
        assert len(scores(store)) == len(stub.seen) == 40


def test_only_one_run_scores_at_a_time_and_one_that_lost_its_lease_stores_nothing(home: Path, tiny_model: Path) -> None:
    with judged(home, likes(lambda _: 10)) as (store, stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 300)
        with store.leases.hold(scoring.LEASE), pytest.raises(LeaseBusy):
            run(open_store(store.settings), pipeline)

        def taken() -> bool:
            if len(stub.seen) >= 30:
                store.leases.revoke(scoring.LEASE)
            return True

        with pytest.raises(LeaseLost):
            run(store, pipeline, may_go_on=taken)
        assert scores(store) == []
        paid = len(stub.seen)
        assert run(store, pipeline).scored == 300
        assert len(stub.seen) == 300  # what the first one had heard was stored by the second
        assert 30 <= paid < 300


def test_two_processes_at_once_ask_about_each_sample_once(home: Path, tiny_model: Path) -> None:
    with judged(home, likes(lambda _: 9), **PRICES) as (store, stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 150)
        command = [sys.executable, str(CHILD), str(home), stub.url, pipeline.pipeline_id]
        children = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        said = [child.communicate(timeout=120)[1] for child in children]
        run(store, pipeline)  # one of them may have come when the other had ended
        assert len(stub.seen) == len(scores(store)) == 150
        assert store.scorings.get(pipeline.pipeline_id).nanocents == 150 * CALL
        assert all(child.returncode == 0 or "LeaseBusy" in text for child, text in zip(children, said, strict=True))


def test_a_note_that_nobody_can_read_is_in_nobodys_way(home: Path, tiny_model: Path) -> None:
    with judged(home, likes(lambda _: 9)) as (store, _stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 3)
        folder = scoring_folder(store, pipeline.pipeline_id)
        folder.mkdir(parents=True)
        (folder / "torn.json").write_text('{"chunk_id": "to')
        assert run(store, pipeline).scored == 3
        assert scoring.leftovers(store) == set()


@pytest.mark.parametrize("how", ["paused", "off", "deleted"])
def test_a_run_ends_when_the_pipeline_is_switched_off(
    home: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(scoring, "LOOK_S", 0.0)
    with judged(home, likes(lambda _: 10), judge_concurrency=2) as (store, stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 300)
        done: list[str] = []

        def off() -> bool:
            if len(stub.seen) >= 10 and not done:
                done.append(how)
                if how == "paused":
                    store.pipelines.pause(pipeline.tag)
                elif how == "off":
                    store.pipelines.edit(pipeline.tag, settings={"auto_scoring": False})
                else:
                    store.pipelines.delete(pipeline.tag)
            return True

        found = run(store, pipeline, may_go_on=off)
        assert 10 <= len(stub.seen) < 20
        assert found.scored == len(scores(store)) == len(stub.seen)


# a judge that is away, refuses, babbles, or costs too much


def test_a_judge_that_is_away_is_left_alone_for_a_while(home: Path, tiny_model: Path) -> None:
    with judged(home, lambda _: Reply(status=401), judge_timeout_s=5) as (store, stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 300)
        run(store, pipeline)
        kind, message = status(store, pipeline)
        assert kind == "held"
        assert "refused the key (LOOP_JUDGE_API_KEY)" in message
        assert "It is asked again at" in message
        asked = len(stub.seen)
        run(store, pipeline)
        assert len(stub.seen) == asked
        state = store.scorings.get(pipeline.pipeline_id)
        assert (state.failures, state.hold and state.hold.code) == (1, "JUDGE_REFUSED")
        run(store, pipeline, clock=lambda: now() + timedelta(minutes=6))
        second = store.scorings.get(pipeline.pipeline_id)
        assert second.failures == 2
        assert second.hold is not None
        assert second.hold.until is not None
        assert second.hold.until - now() > timedelta(minutes=15)
        # Another model, or a pipeline that was saved, is tried at once.
        other = open_store(settings_of(home, stub.url, judge_model="judge-2"))
        assert scoring.plan(other, pipeline, now()).standing.status == "scoring"
        saved = store.pipelines.edit(pipeline.tag, settings={"use_case": "Parcels"})
        assert scoring.plan(store, saved, now()).standing.status == "scoring"


def test_a_judge_that_never_gives_a_number_is_not_asked_about_everything(home: Path, tiny_model: Path) -> None:
    with judged(home, lambda _: completion("I would rather not say.")) as (store, stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 500)
        run(store, pipeline)
        kind, message = status(store, pipeline)
        assert (kind, "gave no score for any of 100 samples (JUDGE_UNREADABLE)" in message) == ("held", True)
        assert len(stub.seen) == 200  # each asked twice
        assert scores(store) == []


def test_a_sample_that_cannot_be_rated_rests_and_the_others_go_on(home: Path, tiny_model: Path) -> None:
    def odd(shown: Shown) -> Reply:
        return completion("…") if number_of(shown) == 7 else completion(rating(10))

    with judged(home, odd) as (store, stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 20)
        done = run(store, pipeline)
        assert (done.scored, done.failed) == (19, 1)
        asked = len(stub.seen)
        assert run(store, pipeline).scored == 0
        assert len(stub.seen) == asked
        later = now() + timedelta(hours=2)
        run(store, pipeline, clock=lambda: later)
        assert len(stub.seen) == asked + 2
        run(store, pipeline, clock=lambda: later + timedelta(days=2))
        assert len(stub.seen) == asked + 4
        run(store, pipeline, clock=lambda: later + timedelta(days=9))
        assert len(stub.seen) == asked + 4  # three tries are enough


def test_the_limit_of_money_is_never_passed_and_said(home: Path, tiny_model: Path) -> None:
    limit = 2_500  # of which 40 % may go to unreviewed samples
    with judged(home, likes(lambda _: 1), **PRICES, scoring_limit_cents=limit, judge_max_tokens=64) as (store, stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 1_000)
        done = run(store, pipeline)
        assert done.nanocents == done.scored * CALL <= limit * NANOCENTS * 40 // 100
        assert done.nanocents > limit * NANOCENTS * 40 // 100 - 100 * CALL
        kind, message = status(store, pipeline)
        assert kind == "held"
        assert "may cost $10.00" in message
        state = store.scorings.get(pipeline.pipeline_id)
        assert (state.failures, state.hold and state.hold.code) == (0, SCORING_LIMIT)
        before = len(stub.seen)
        run(store, pipeline)
        assert len(stub.seen) == before
        dearer = open_store(settings_of(home, stub.url, **PRICES, scoring_limit_cents=5_000))
        assert scoring.plan(dearer, pipeline, now()).standing.status == "scoring"


def test_the_reference_judge_says_that_it_cannot_and_invents_nothing(home: Path, tiny_model: Path) -> None:
    store = open_store(Settings(home=home))
    pipeline = made(store, tiny_model)
    fill(store, pipeline, 0, 50)
    done = run(store, pipeline)
    assert (done.scored, scores(store)) == (0, [])
    kind, message = status(store, pipeline)
    assert kind == "held"
    assert "compares with a right answer" in message
    assert "cannot score any" in message


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        ("scoring_world:only_with_a_right_answer", "rates nothing without a right answer"),
        ("no_such_module:make", "cannot be imported"),
    ],
)
def test_a_judge_of_ones_own_that_cannot_is_said_and_not_opened_again(
    home: Path, tiny_model: Path, judge: str, said: str
) -> None:
    store = open_store(Settings(home=home, judge=judge))
    pipeline = made(store, tiny_model)
    fill(store, pipeline, 0, 5)
    run(store, pipeline)
    kind, message = status(store, pipeline)
    assert (kind, said in message) == ("held", True)
    assert scores(store) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"auto_scoring": False}, "off"),
        ({"conditions": {"feedback": ["good", "corrected"]}}, "idle"),
    ],
)
def test_a_pipeline_that_does_not_want_it_is_left_alone(
    home: Path, tiny_model: Path, settings: dict[str, Any], expected: str
) -> None:
    with judged(home, likes(lambda _: 10)) as (store, stub):
        pipeline = made(store, tiny_model, **settings)
        fill(store, pipeline, 0, 20)
        run(store, pipeline)
        assert status(store, pipeline)[0] == expected
        assert stub.seen == []


def test_two_pipelines_with_the_same_samples_ask_once(home: Path, tiny_model: Path) -> None:
    with judged(home, likes(lambda _: 10)) as (store, stub):
        first = made(store, tiny_model)
        second = made(store, tiny_model, "Second", tags=["support"])
        fill(store, first, 0, 20)
        assert run(store, first).scored == 20
        assert run(store, second).scored == 0
        assert len(stub.seen) == 20
        shown = scoring.described(store, second, scoring.measure(store, second, None, now()).selection, now())
        assert (shown["picked"], shown["below_bar"], shown["unscored"], shown["status"]) == (20, 0, 0, "idle")


# Train now


def test_train_now_is_refused_while_nothing_could_score_the_attempt_and_after_all_other_reasons(
    home: Path, tiny_model: Path
) -> None:
    replies = [Reply(status=402), Reply(status=401), Reply(status=500), completion(rating(9))]
    with judged(home, lambda _: replies[0]) as (store, stub):
        pipeline = made(store, tiny_model)
        fill(store, pipeline, 0, 1_099, good=True)
        with pytest.raises(NotEnoughSamples):
            train_now(store, pipeline)
        assert stub.seen == []
        fill(store, pipeline, 1_099, 1_100, good=True)
        for code in ("SCORING_CAPPED", "AGENT_OFF", "AGENT_COULD_NOT_START"):
            with pytest.raises((Refused, AgentCouldNotStart)) as refused:
                train_now(store, pipeline)
            assert refused.value.code == code
            assert store.attempts.list() == ()
            assert not store.pipelines.get(pipeline.tag).train_now
            replies.pop(0)
        assert train_now(store, pipeline).attempt_no == 1
