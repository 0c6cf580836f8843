"""The assets `judgements` and `report` with a model as the judge: what an attempt keeps, shows and spends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
import sqlalchemy as sa
from judge_world import BAD, GOOD, verdict
from stub_judge import KEY, Reply, Shown, StubJudge, completion

from assets.comparison import judgements, report
from loop_dagster.opening import _frozen
from loop_dagster.partitions import ATTEMPTS
from loop_dagster.rules.states import FLOW
from loop_dagster.settings import Settings
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.records import Attempt
from loop_dagster.store.schema import attempts
from loop_dagster.tables import ANSWERS, QUESTIONS
from loop_dagster.tables.base import Table
from resources import StoreResource

NOW = datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC)
SAMPLES = 100


@dataclass
class Place:
    """An installation with an attempt whose models have both answered."""

    store: Store
    instance: dg.DagsterInstance
    run_id: str

    @property
    def attempt(self) -> Attempt:
        return self.store.attempts.get(self.run_id)

    def judge(self) -> dict[str, Any]:
        """Run both assets; what they show, `judgements` and `report` together."""
        done = dg.materialize(
            [judgements, report],
            partition_key=self.attempt.key,
            instance=self.instance,
            resources={"store": StoreResource(home=str(self.store.settings.root))},
            selection=[judgements, report],
        )
        shown: dict[str, Any] = {}
        for event in done.get_asset_materialization_events():
            shown |= {name: value.value for name, value in event.materialization.metadata.items()}
        return shown


def settings_of(home: Path, url: str) -> dict[str, str]:
    return {
        "LOOP_HOME": str(home),
        "LOOP_JUDGE": "openai",
        "LOOP_JUDGE_URL": url,
        "LOOP_JUDGE_MODEL": "judge-1",
        "LOOP_JUDGE_API_KEY": KEY,
        "LOOP_JUDGE_INPUT_CENTS_PER_MILLION": "300.5",
        "LOOP_JUDGE_OUTPUT_CENTS_PER_MILLION": "1500",
    }


def answered(store: Store) -> Attempt:
    """An attempt in `candidate_running` with its questions and answers in the lake."""
    pipeline = store.pipelines.create("Support", model_id="any", now=NOW)
    frozen = {
        "judge": store.settings.judge,
        "judge_model": store.settings.judge_model,
        "judge_prices": {
            "input_cents_per_million": str(store.settings.judge_input_cents_per_million),
            "output_cents_per_million": str(store.settings.judge_output_cents_per_million),
        },
        "scoring_limit_cents": store.settings.scoring_limit_cents,
        "settings": pipeline.settings.to_json(),
    }
    attempt = store.attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen=frozen, now=NOW)
    assert attempt is not None
    for state in FLOW[1 : FLOW.index("candidate_running") + 1]:
        attempt = store.attempts.move(attempt.run_id, state, "On.", now=NOW)
    attempt = store.attempts.note(attempt.run_id, compared_with="original")
    question = '[{{"role":"user","content":"Where are the headquarters of company {}?"}}]'
    ids = [f"s{at:03}" for at in range(SAMPLES)]
    write(
        store,
        attempt,
        QUESTIONS,
        [
            {"sample_id": key, "ordinal": at, "messages": question.format(at), "right_answer": json.dumps(GOOD)}
            for at, key in enumerate(ids)
        ],
    )
    answer = {"finish": "stop", "prompt_tokens": 1, "answer_tokens": 1}
    write(
        store,
        attempt,
        ANSWERS,
        [
            {"sample_id": key, "side": side, "answer": json.dumps(said), **answer}
            for key in ids
            for side, said in (("candidate", GOOD), ("incumbent", BAD))
        ],
    )
    return attempt


def write(store: Store, attempt: Attempt, table: Table, rows: list[dict[str, Any]]) -> None:
    own = {"attempt": attempt.key, "pipeline_id": attempt.pipeline_id, "attempt_no": attempt.attempt_no}
    whole = [{**dict.fromkeys(table.schema), **own, **row} for row in rows]
    with store.leases.hold(f"lake/{store.settings.workspace}", holder="test", wait_s=5):
        store.lake.replace_attempt(table, attempt.key, pl.DataFrame(whole, schema=table.schema))


@pytest.fixture
def place(home: Path, stub: StubJudge, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name, value in settings_of(home, stub.url).items():
        monkeypatch.setenv(name, value)
    store = open_store(Settings())
    attempt = answered(store)
    with dg.instance_for_test() as instance:
        instance.add_dynamic_partitions(str(ATTEMPTS.name), [attempt.key])
        yield Place(store, instance, attempt.run_id)


@pytest.fixture
def replies() -> dict[str, Any]:
    """What the judge of a test says; set `reply`."""
    return {"reply": verdict}


@pytest.fixture
def stub(replies: dict[str, Any]) -> Iterator[StubJudge]:
    def reply(shown: Shown) -> Reply:
        answer: Reply = replies["reply"](shown)
        return answer

    with StubJudge(reply) as stub:
        yield stub


def test_what_judging_used_is_kept_and_shown(place: Place, stub: StubJudge) -> None:
    shown = place.judge()
    calls = 4 * SAMPLES
    assert (len(stub.seen), shown["calls"], shown["calls_for_the_attempt"]) == (calls, calls, calls)
    assert (shown["tokens_read"], shown["tokens_written"]) == (100 * calls, 10 * calls)
    # 40,000 tokens at 300.5 cents and 4,000 at 1,500 cents per million: 12.02 + 6 cents, to the last part of a cent.
    assert shown["cost"] == "$0.18" and shown["cost_limit"] == "$25.00"
    counts = place.attempt.counts
    assert counts["judge_nanocents"] == 18_020_000_000
    assert counts["judge_used"] == [calls, 100 * calls, 10 * calls, 0]
    assert (counts["judge"], counts["judge_ended"], counts["judge_stopped"], counts["not_reached"]) == (
        *("judge-1", None, None, 0),
    )
    assert shown["tokens_counted"] == "as the judge's server counted"
    assert (shown["verdict"], place.attempt.verdict) == ("better", "better")


def test_a_comparison_that_is_made_again_adds_to_what_was_spent(place: Place, stub: StubJudge) -> None:
    place.judge()
    place.store.attempts.move(place.run_id, "checkpoint_ready", "What is live changed.", now=NOW)
    for state in ("candidate_booking", "candidate_running"):
        place.store.attempts.move(place.run_id, state, "On.", now=NOW)
    rows = place.store.lake.scan(ANSWERS).collect().with_columns(pl.col("answer").str.replace("Oslo", "Rome"))
    write(place.store, place.attempt, ANSWERS, rows.to_dicts())
    shown = place.judge()
    # The candidate's own ratings of before still stand for the same answer only with the same pair: all is asked anew.
    assert (shown["calls"], shown["calls_for_the_attempt"], len(stub.seen)) == (400, 800, 800)
    assert place.attempt.counts["judge_nanocents"] == 2 * 18_020_000_000
    again = place.judge()  # a run that was killed after judging
    assert (again["calls"], again["calls_for_the_attempt"]) == (0, 800)
    assert place.attempt.counts["judge_nanocents"] == 2 * 18_020_000_000


def test_a_server_that_counts_nothing_is_counted_by_estimate_and_the_page_says_so(
    place: Place, replies: dict[str, Any]
) -> None:
    def uncounted(shown: Shown) -> Reply:
        body = json.loads(verdict(shown).body)
        del body["usage"]
        return Reply(body=json.dumps(body))

    replies["reply"] = uncounted
    shown = place.judge()
    assert shown["tokens_counted"].startswith("400 of 400 calls estimated")
    assert 400 * 300 < shown["tokens_read"] < 400 * 2_000
    assert place.attempt.counts["judge_used"][3] == 400


def test_a_refused_key_ends_it_inconclusive_on_what_there_is(
    place: Place, replies: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    replies["reply"] = lambda _: Reply(401, f"bad key {KEY}")
    shown = place.judge()
    assert shown["verdict"] == "inconclusive" and shown["not_reached"] == SAMPLES
    assert "refused the key" in shown["ended_early"]
    assert {"no_judge", "holdout_too_small"} <= set(shown["warnings"].replace(",", " ").split())
    reason = place.attempt.reason
    assert reason is not None and reason.startswith("Inconclusive") and "refused the key" in reason
    events = [str(record) for record in place.instance.all_logs(place.instance.get_runs()[0].run_id)]
    assert events
    assert KEY not in repr(shown) + reason + repr(place.attempt) + "".join(events) + "".join(capfd.readouterr())


def test_a_judge_that_babbles_ends_inconclusive(place: Place, replies: dict[str, Any]) -> None:
    replies["reply"] = lambda _: completion("Well, well.")
    shown = place.judge()
    assert (shown["verdict"], place.attempt.verdict) == ("inconclusive", "inconclusive")
    assert "many_failures" in shown["warnings"]


class TestMoney:
    @pytest.fixture(autouse=True)
    def limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOOP_SCORING_LIMIT_CENTS", "15")
        monkeypatch.setenv("LOOP_JUDGE_MAX_TOKENS", "64")

    def test_the_limit_stops_it_and_the_report_says_so(
        self, place: Place, monkeypatch: pytest.MonkeyPatch, stub: StubJudge
    ) -> None:
        monkeypatch.setenv("LOOP_SCORING_LIMIT_CENTS", "10000")  # it was frozen when the attempt opened
        shown = place.judge()
        assert shown["cost_limit"] == "$0.15"
        assert 0 < shown["not_reached"] < SAMPLES
        assert place.attempt.counts["judge_nanocents"] <= 15 * 10**9
        assert shown["verdict"] == "inconclusive"
        reason = place.attempt.reason
        assert reason is not None and f"{shown['not_reached']} samples were not reached" in reason
        assert "$0.15" in reason
        summary = place.attempt.report
        assert summary is not None and summary["rows_not_reached"] == shown["not_reached"]
        assert (summary["rows_failed"], summary["rows_gone"]) == (0, 0)

    def test_what_scoring_unreviewed_samples_took_is_not_there_for_it(self, place: Place) -> None:
        frozen = {**place.attempt.frozen, "sample_scoring": {"nanocents": 5 * 10**9, "scored": 9, "picked": 3}}
        with place.store.registry.write() as connection:
            connection.execute(sa.update(attempts).values(frozen=frozen))
        assert place.judge()["cost_limit"] == "$0.10"
        assert place.attempt.counts["judge_nanocents"] <= 10 * 10**9


def test_an_attempt_freezes_prices_and_limit(home: Path, tiny_model: Path) -> None:
    from loop_dagster.models.base import resolve

    settings = Settings(home=home, judge_input_cents_per_million="12.345", scoring_limit_cents=99)  # type: ignore[arg-type]
    store = open_store(settings)
    base = resolve(str(tiny_model), settings.models_dir)
    pipeline = store.pipelines.create("Support", model_id=str(tiny_model), model_digest=base.digest)
    frozen = _frozen(store, pipeline, base, (), first=True)
    assert frozen["judge_prices"] == {"input_cents_per_million": "12.345", "output_cents_per_million": "0"}
    assert frozen["scoring_limit_cents"] == 99
