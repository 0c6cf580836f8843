"""Judging many samples: blind to the last call, nothing judged twice, the limit of money never passed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from judge_world import BAD, GOOD, both_of, case_of, judge_of, verdict
from stub_judge import Reply, Shown, StubJudge, completion, rating

from loop_dagster.errors import JudgeUnavailable
from loop_dagster.models.judge import DIMENSIONS, Case, Judge, Message, Preference, Ratings, Usage
from loop_dagster.models.judge_answers import Budget, judge_answers
from loop_dagster.models.reference_judge import ReferenceJudge
from loop_dagster.rules.decision import decide
from loop_dagster.rules.money import NANOCENTS, Prices

#: 10 cents a thousand tokens read, 20 a thousand written: the stub's calls (100 and 10) cost 1.2 cents each.
PRICES = Prices(input_cents_per_million=Decimal(10_000), output_cents_per_million=Decimal(20_000))
CALL = PRICES.cost(input_tokens=100, output_tokens=10)


def budget_of(cents: int) -> Budget:
    return Budget(prices=PRICES, limit=cents * NANOCENTS)


def calls_of(stub: StubJudge) -> Counter[str]:
    """How often each call of each sample was asked."""
    return Counter(json.dumps([shown.blocks["CONVERSATION"], shown.answers]) for shown in stub.seen)


# --- order -----------------------------------------------------------------------------------------------------------


class Remembers:
    """A judge that sees which of a sample's calls comes first, and likes what is shown there."""

    name = "remembers"
    concurrency = 1
    usage = Usage()

    def __init__(self) -> None:
        self.first: dict[str, Any] = {}

    def rate(self, case: Case, answer: Message) -> Ratings:
        liked = self.first.setdefault(case.sample_id, answer["content"]) == answer["content"]
        return dict.fromkeys(DIMENSIONS, 9.0 if liked else 3.0)

    def prefer(self, case: Case, first: Message, second: Message) -> Preference:
        liked = self.first.setdefault(case.sample_id, first["content"])
        return "first" if liked == first["content"] else "second"


def test_the_order_of_calls_does_not_tell_whose_an_answer_is() -> None:
    cases = [case_of(at) for at in range(400)]
    judged = judge_answers(Remembers(), cases, both_of(cases)).frame
    wins = judged["winner"].value_counts(sort=True).to_dicts()
    assert {row["winner"] for row in wins} == {"candidate", "incumbent"}
    assert abs(wins[0]["count"] - 200) < 60
    assert decide(judged, gone=0).verdict == "not_better"
    assert judge_answers(Remembers(), cases, both_of(cases)).frame.equals(judged)  # and it is the same each time


@pytest.mark.parametrize("picks", ["first", "second"])
@pytest.mark.parametrize("concurrency", [1, 32])
def test_a_judge_that_looks_at_the_place_alone_makes_no_win_and_no_loss(picks: str, concurrency: int) -> None:
    cases = [case_of(at) for at in range(100)]

    def reply(shown: Shown) -> Reply:
        return completion(json.dumps({"better": picks})) if shown.asks_preference else completion(rating(9))

    with judge_of(reply, concurrency=concurrency) as (judge, _):
        judged = judge_answers(judge, cases, both_of(cases))
    decision = decide(judged.frame, gone=0)
    assert (decision.wins, decision.losses, decision.ties) == (0, 0, 100)
    assert decision.verdict == "not_better"


@pytest.mark.parametrize("liked_first", [True, False])
def test_a_judge_that_is_down_for_one_order_makes_failed_rows_and_never_losses(liked_first: bool) -> None:
    cases = [case_of(at) for at in range(100)]

    def reply(shown: Shown) -> Reply:
        down = shown.asks_preference and ("Lyon" in shown.answers[0]) is liked_first
        return Reply(503) if down else verdict(shown, likes=lambda text: 10 * ("Oslo" in text))

    with judge_of(reply, concurrency=32, tries=2) as (judge, _):
        judged = judge_answers(judge, cases, both_of(cases))
    assert (judged.frame.height, judged.ended) == (100, None)  # a server that answers other calls is not given up
    assert set(judged.frame["status"]) == {"failed"} and set(judged.frame["error_code"]) == {"JUDGE_UNAVAILABLE"}
    assert set(judged.frame["winner"]) == set(judged.frame["candidate_score"]) == {None}
    decision = decide(judged.frame, gone=0, ended_early=judged.ended, not_reached=judged.not_reached)
    assert (decision.verdict, decision.wins, decision.losses) == ("inconclusive", 0, 0)


def test_all_calls_of_a_sample_are_under_way_at_once() -> None:
    cases = [case_of(at) for at in range(10)]

    def reply(shown: Shown) -> Reply:
        answer = verdict(shown)
        return Reply(answer.status, answer.body, delay_s=0.3)

    with judge_of(reply, concurrency=32) as (judge, stub):
        assert judge_answers(judge, cases, both_of(cases)).frame.height == 10
        assert 10 < stub.most_at_once <= 32


def test_a_cancelled_step_is_left_within_seconds_though_the_judge_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loop_dagster.models.judge_calls.LOOK_S", 0.1)
    monkeypatch.setattr("loop_dagster.models.judge_calls.GRACE_S", 0.2)
    mine = threading.Event()
    mine.set()
    cases = [case_of(at) for at in range(20)]
    with judge_of(lambda _: Reply(503, delay_s=6.0), timeout_s=60.0) as (judge, _):
        threading.Timer(0.3, mine.clear).start()
        began = time.monotonic()
        judged = judge_answers(judge, cases, both_of(cases), may_go_on=mine.is_set)
        assert time.monotonic() - began < 5
        assert judged.ended is not None and "cancelled" in judged.ended
        assert judged.not_reached == 20
        with pytest.raises(JudgeUnavailable, match="stopped"):
            judge.rate(cases[0], GOOD)  # nobody asks again for a step that is over


# --- going on --------------------------------------------------------------------------------------------------------


def test_a_killed_process_is_gone_on_from_and_no_call_is_asked_twice(tmp_path: Path) -> None:
    """SIGKILL at random moments. What was under way is asked again and counted; nothing else is."""
    rng = random.Random(23)
    samples, journal = 60, tmp_path / "judged.jsonl"
    cases = [case_of(at) for at in range(samples)]
    kills = 0

    def reply(shown: Shown) -> Reply:
        answer = verdict(shown)
        return Reply(answer.status, answer.body, delay_s=0.03)

    with judge_of(reply) as (judge, stub):
        for _ in range(4):
            command = [sys.executable, str(Path(__file__).with_name("judging_child.py")), stub.url, str(journal), "60"]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
                assert child.stdout is not None
                child.stdout.readline()
                time.sleep(rng.uniform(0.02, 0.12))
                kills += child.poll() is None
                child.send_signal(signal.SIGKILL)
        time.sleep(0.2)  # the server still answers what the last one asked
        asked = len(stub.seen)
        assert kills >= 3 and 0 < asked < samples * 4
        judged = judge_answers(judge, cases, both_of(cases), journal=journal)
        assert (judged.frame.height, judged.ended) == (samples, None)
        assert set(judged.frame["winner"]) == {"candidate"}
        again = calls_of(stub)
        assert len(again) == samples * 4
        assert sum(again.values()) - samples * 4 <= kills * 8  # what was under way when it was killed
        assert judged.usage.calls == len(stub.seen) - asked < samples * 4
        # Every call that the server answered is counted, also where nobody heard the answer.
        assert len(stub.seen) <= judged.total.calls <= len(stub.seen) + kills * 8
        assert judged.total.estimated >= 1
        whole = judge_answers(judge, cases, both_of(cases), journal=journal)
        assert whole.frame.equals(judged.frame) and whole.usage == Usage() and whole.total == judged.total


def test_what_was_half_judged_is_gone_on_with_call_by_call(tmp_path: Path) -> None:
    cases = [case_of(at) for at in range(10)]
    calls = iter(range(10_000))
    journal = tmp_path / "judged.jsonl"
    with judge_of(lambda shown: Reply(401) if next(calls) == 18 else verdict(shown), concurrency=1) as (judge, stub):
        part = judge_answers(judge, cases, both_of(cases), journal=journal)
        assert (part.frame.height, part.not_reached, part.usage.calls) == (4, 6, 18)
    with judge_of(verdict) as (judge, stub):
        whole = judge_answers(judge, cases, both_of(cases), journal=journal)
        assert (whole.frame.height, whole.ended) == (10, None)
        assert len(stub.seen) == 40 - 18
        assert whole.total.calls == 40


def test_a_torn_line_is_asked_again_alone(tmp_path: Path) -> None:
    cases = [case_of(at) for at in range(5)]
    journal = tmp_path / "judged.jsonl"
    with judge_of(verdict) as (judge, stub):
        whole = judge_answers(judge, cases, both_of(cases), journal=journal)
        lines = journal.read_bytes().split(b"\n")
        told = [at for at, line in enumerate(lines) if b'"said"' in line]
        lines[told[3]] = lines[told[3]][:20]
        lines[1] = b"\x00" * len(lines[1])  # what was used before
        journal.write_bytes(b"\n".join(lines)[:-9])
        again = judge_answers(judge, cases, both_of(cases), journal=journal)
        assert again.frame.equals(whole.frame)
        assert len(stub.seen) == 20 + 2


def test_other_answers_to_the_same_questions_are_judged_anew_and_what_was_spent_stays_spent(tmp_path: Path) -> None:
    """What is live changed, and the attempt is compared again from the same work folder."""
    cases = [case_of(at) for at in range(6)]
    journal = tmp_path / "judged.jsonl"
    with judge_of(verdict) as (judge, stub):
        first = judge_answers(judge, cases, both_of(cases), journal=journal)
        other = judge_answers(judge, cases, both_of(cases, incumbent=GOOD, candidate=BAD), journal=journal)
        assert set(first.frame["winner"]) == {"candidate"} and set(other.frame["winner"]) == {"incumbent"}
        assert (len(stub.seen), other.usage.calls, other.total.calls) == (48, 24, 48)


def test_an_unreadable_sample_is_not_asked_again_and_an_unreachable_judge_is(tmp_path: Path) -> None:
    cases = [case_of(at) for at in range(3)]
    journal = tmp_path / "judged.jsonl"

    def reply(shown: Shown) -> Reply:
        asked = str(shown.blocks)
        return (
            completion("babble") if "company 0?" in asked else Reply(503) if "company 1?" in asked else verdict(shown)
        )

    with judge_of(reply, tries=2, concurrency=1) as (judge, stub):
        part = judge_answers(judge, cases, both_of(cases), journal=journal)
        assert part.frame["error_code"].to_list() == ["JUDGE_UNREADABLE", "JUDGE_UNAVAILABLE", None]
        assert len(stub.seen) == 2 + 2 + 4
    with judge_of(verdict) as (judge, stub):
        whole = judge_answers(judge, cases, both_of(cases), journal=journal)
        assert whole.frame["error_code"].to_list() == ["JUDGE_UNREADABLE", None, None]
        assert {str(shown.blocks["CONVERSATION"]) for shown in stub.seen} == {str(list(cases[1].messages))}


# --- money -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 8, 32])
@pytest.mark.parametrize("cents", [0, 10, 100, 250, 400])
def test_the_limit_is_never_passed_and_what_was_not_reached_is_neither_failed_nor_gone(
    cents: int, concurrency: int
) -> None:
    cases = [case_of(at) for at in range(100)]
    with judge_of(verdict, concurrency=concurrency, max_tokens=64) as (judge, stub):
        judged = judge_answers(judge, cases, both_of(cases), budget=budget_of(cents))
    spent = PRICES.cost(input_tokens=judged.total.prompt_tokens, output_tokens=judged.total.answer_tokens)
    assert spent == len(stub.seen) * CALL <= cents * NANOCENTS
    assert judged.frame.height + judged.not_reached == 100 and judged.ended is None
    assert set(judged.frame["status"]) <= {"scored"}
    assert len(stub.seen) == 4 * judged.frame.height  # no sample is begun that could not be ended
    most = sum(PRICES.cost(input_tokens=2 * m.prompt_tokens, output_tokens=2 * m.answer_tokens) for m in _most(judge))
    if judged.not_reached:
        assert judged.stopped is not None and "$" in judged.stopped
        assert spent + most + 4 * CALL > cents * NANOCENTS  # and it goes as far as it may
    else:
        assert judged.stopped is None
    ids = judged.frame["sample_id"].to_list()
    assert ids == [case.sample_id for case in cases[: len(ids)]]  # the first ones, in the order in which they are asked
    decision = decide(judged.frame, gone=0, stopped=judged.stopped, not_reached=judged.not_reached)
    assert (decision.rows_failed, decision.rows_gone, decision.rows_not_reached) == (0, 0, judged.not_reached)
    if judged.not_reached:
        assert decision.verdict == "inconclusive" and decision.missed_bar == "rows_scored"
        assert f"{judged.not_reached} samples were not reached" in decision.sentence


def _most(judge: Any) -> list[Usage]:
    case = case_of()
    both = [judge.most(case, GOOD), judge.most(case, BAD)]
    return [*both, judge.most(case, GOOD, BAD), judge.most(case, BAD, GOOD)]


def test_enough_scored_samples_decide_though_the_money_did_not_reach_all() -> None:
    cases = [case_of(at) for at in range(300)]
    with judge_of(verdict, concurrency=32, max_tokens=64) as (judge, _):
        judged = judge_answers(judge, cases, both_of(cases), budget=budget_of(800))
    assert 100 < judged.frame.height < 300
    decision = decide(judged.frame, gone=0, stopped=judged.stopped, not_reached=judged.not_reached)
    assert decision.verdict == "better"
    assert decision.sentence.startswith("Better") and "were not reached" in decision.sentence
    assert "$8.00" in decision.sentence


def test_a_second_test_has_what_is_left_of_the_money(tmp_path: Path) -> None:
    cases = [case_of(at) for at in range(100)]
    with judge_of(verdict, max_tokens=64) as (judge, _):
        first = judge_answers(judge, cases, both_of(cases), budget=budget_of(250), journal=tmp_path / "one")
        assert 0 < first.frame.height < 100
        none = judge_answers(judge, cases, both_of(cases, GOOD, GOOD), budget=budget_of(250), used_before=first.total)
        assert none.frame.height == 0 and none.stopped is not None and none.total == first.total
        # A restart of the first goes on counting where its journal stands, whatever the attempt says by then.
        more = judge_answers(
            judge, cases, both_of(cases), budget=budget_of(500), used_before=first.total, journal=tmp_path / "one"
        )
        assert more.frame.height > first.frame.height
        assert more.total == first.total + more.usage


def test_unreadable_replies_cost_what_they_cost() -> None:
    cases = [case_of(at) for at in range(100)]
    with judge_of(lambda _: completion("babble"), max_tokens=64) as (judge, stub):
        judged = judge_answers(judge, cases, both_of(cases), budget=budget_of(200))
    assert judged.total.calls == len(stub.seen) and len(stub.seen) * CALL <= 200 * NANOCENTS
    assert judged.not_reached > 0 and set(judged.frame["error_code"]) == {"JUDGE_UNREADABLE"}


def test_a_judge_at_no_price_has_no_limit() -> None:
    cases = [case_of(at) for at in range(20)]
    with judge_of(verdict) as (judge, _):
        judged = judge_answers(judge, cases, both_of(cases), budget=Budget(prices=Prices(), limit=0))
    assert (judged.frame.height, judged.stopped) == (20, None)


class Metered:
    """Somebody's own judge: it counts, and cannot say beforehand what a call uses."""

    name = "metered"
    concurrency = 4

    def __init__(self) -> None:
        self.usage = Usage()
        self._count = threading.Lock()
        self._inner = ReferenceJudge()

    def _use(self) -> None:
        with self._count:
            self.usage += Usage(1, 100, 10)

    def rate(self, case: Case, answer: Message) -> Ratings:
        self._use()
        return self._inner.rate(case, answer)

    def prefer(self, case: Case, first: Message, second: Message) -> Preference:
        self._use()
        return self._inner.prefer(case, first, second)


def test_a_judge_that_cannot_say_what_a_call_uses_stops_once_the_limit_is_reached() -> None:
    judge: Judge = Metered()
    cases = [case_of(at) for at in range(100)]
    judged = judge_answers(judge, cases, both_of(cases), budget=budget_of(100))
    spent = judged.total.calls * CALL
    assert spent + 4 * CALL >= 100 * NANOCENTS and spent <= 100 * NANOCENTS + 8 * CALL
    assert judged.stopped is not None and judged.not_reached > 0
