"""A judge's server as there are many: what each knows, how it fails, what it says that it used. Over real HTTP."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
import traceback
from typing import Any

import pytest
from judge_world import BAD, GOOD, both_of, case_of, judge_of, verdict
from stub_judge import KEY, Reply, Shown, completion, rating

from loop_dagster.errors import (
    BadRequest,
    JudgeRefused,
    JudgeRejected,
    JudgeUnavailable,
    JudgeUnreadable,
    LoopError,
)
from loop_dagster.models.judge import DIMENSIONS, Usage
from loop_dagster.models.judge_answers import judge_answers
from loop_dagster.models.judge_openai import MAX_TOKENS, OpenAIJudge

SEVENS = dict.fromkeys(DIMENSIONS, 7.0)


def error_of(status: int, /, **fields: Any) -> Reply:
    return Reply(status, json.dumps({"error": fields}))


# --- forms of a reply ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        completion([{"type": "text", "text": rating(7)}]),
        completion([{"type": "text", "text": rating(7)[:20]}, {"type": "text", "text": rating(7)[20:]}]),
        completion([{"type": "output_text", "text": rating(7)}]),
        completion(
            [
                {"type": "thinking", "thinking": [{"type": "text", "text": rating(1)}]},
                {"type": "reasoning", "text": rating(2)},
                {"type": "text", "text": rating(7)},
            ]
        ),
        completion(rating(7), reasoning_content=rating(1), refusal=None, tool_calls=[]),
        completion(rating(7), finish=None),
        completion(rating(7), finish="eos"),
        completion(rating(7), usage=None),
        completion(rating(7), usage="none"),
        completion(f"<think>Between 1/10 and 9/10.</think>\n\n```json\n{rating(7)}\n```"),
        completion(f"It is right, mostly.\n\n{rating('7 out of 10')}"),
    ],
)
def test_what_servers_answer_with(reply: Reply) -> None:
    with judge_of(lambda _: reply) as (judge, stub):
        assert judge.rate(case_of(), GOOD) == SEVENS
    assert len(stub.seen) == 1


@pytest.mark.parametrize(
    "reply",
    [
        completion(""),
        completion("  \n"),
        completion(None, refusal="I cannot help with that."),
        completion(None, tool_calls=[{"type": "function", "function": {"name": "r", "arguments": rating(7)}}]),
        completion(None, reasoning_content=rating(7)),
        completion([]),
        completion([{"type": "reasoning", "text": rating(7)}]),
        completion([rating(7)]),
        completion({"text": rating(7)}),
        completion(rating(7), finish="length"),
        completion(rating(7), finish="content_filter"),
        completion(rating(7), finish="error"),
        Reply(body=json.dumps({"choices": [{"text": rating(7)}]})),
        Reply(body=json.dumps({"choices": [rating(7)]})),
        Reply(body=json.dumps({"choices": {"message": {"content": rating(7)}}})),
        Reply(body=json.dumps({"output_text": rating(7)})),
        Reply(body=rating(7)),
        Reply(body=json.dumps(rating(7))),
        Reply(body="[]"),
        Reply(body=json.dumps({"error": {"message": "overloaded"}})),
        Reply(body=json.dumps({"error": "overloaded"})),
    ],
)
def test_what_holds_no_verdict(reply: Reply) -> None:
    with judge_of(lambda _: reply, concurrency=1) as (judge, stub):
        with pytest.raises(JudgeUnreadable):
            judge.rate(case_of(), GOOD)
        [row] = judge_answers(judge, [case_of()], both_of([case_of()])).frame.to_dicts()
    assert (row["status"], row["error_code"], row["winner"]) == ("failed", "JUDGE_UNREADABLE", None)
    assert len(stub.seen) == 3


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        ({"code": 429, "message": "slow down"}, JudgeUnavailable),
        ({"code": "502", "message": "provider down"}, JudgeUnavailable),
        ({"code": 401, "message": "no auth"}, JudgeRefused),
        ({"code": 402, "message": "more credits"}, JudgeRefused),
        ({"code": 400, "message": "odd"}, JudgeRejected),
        ({"code": 7, "message": "odd"}, JudgeUnreadable),
        ({"code": None}, JudgeUnreadable),
    ],
)
def test_an_error_under_status_200(error: dict[str, Any], raised: type[LoopError]) -> None:
    with judge_of(lambda _: error_of(200, **error), tries=2) as (judge, stub):
        with pytest.raises(raised):
            judge.rate(case_of(), GOOD)
        assert len(stub.seen) == (2 if raised is JudgeUnavailable else 1)


@pytest.mark.parametrize(
    ("reply", "raised"),
    [
        (error_of(403, code="403", message="Your input was flagged by moderation"), JudgeRejected),
        (error_of(400, code="content_filter", message="filtered"), JudgeRejected),
        (Reply(413), JudgeRejected),
        (error_of(400, status="INVALID_ARGUMENT", message="API key not valid. Please pass one."), JudgeRefused),
        (Reply(400, json.dumps([{"error": {"code": 400, "message": "API key not valid."}}])), JudgeRefused),
        (error_of(400, code="model_not_found"), JudgeRefused),
        (error_of(400, message="Your credit balance is too low to use this."), JudgeRefused),
        (error_of(429, type="insufficient_quota"), JudgeRefused),
        (error_of(403, message="Country not supported"), JudgeRefused),
        (Reply(404, "<html>not here</html>"), JudgeRefused),
        (Reply(301, "", {"Location": "https://elsewhere.example/v1"}), JudgeRefused),
        (Reply(308, "", {"Location": "/v2"}), JudgeRefused),
        (Reply(405), JudgeRefused),
    ],
)
def test_what_concerns_one_sample_and_what_concerns_all(reply: Reply, raised: type[LoopError]) -> None:
    """A redirection is never followed: the key would go with it."""
    with judge_of(lambda _: reply, tries=2) as (judge, stub):
        with pytest.raises(raised):
            judge.rate(case_of(), GOOD)
        seen = len(stub.seen)
        assert seen <= 2  # without structured output once, where that could help
        with pytest.raises(raised):
            judge.rate(case_of(), BAD)
        assert (len(stub.seen) > seen) is (raised is JudgeRejected)


def test_words_of_a_sample_in_an_error_end_nothing() -> None:
    """A server may echo what it was sent; only what it says itself may end a comparison."""
    echoed = "prompt: 'Your credit balance is too low. API key not valid. insufficient_quota model_not_found'"
    with (
        judge_of(lambda _: error_of(400, message=echoed)) as (judge, _),
        pytest.raises(JudgeRejected),
    ):
        judge.rate(case_of(), GOOD)


# --- what a server does not know -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "message", "unknown", "instead"),
    [
        (400, "response_format cannot be asked of this engine; leave it out.", {"response_format"}, set()),
        (422, "Extra inputs are not permitted", {"response_format"}, set()),
        (404, "No endpoints found that support structured outputs", {"response_format"}, set()),
        (404, "Some parameters are not supported by any provider", {"response_format"}, set()),
        (500, "failed to parse grammar", {"response_format"}, set()),
        (501, "json_schema is not implemented", {"response_format"}, set()),
        (400, "use 'max_completion_tokens' instead of 'max_tokens'", {"max_tokens"}, {"max_completion_tokens"}),
        (400, "Only the default (1) value of temperature is supported", {"temperature"}, set()),
    ],
)
def test_objections(status: int, message: str, unknown: set[str], instead: set[str]) -> None:
    def reply(shown: Shown) -> Reply:
        return error_of(status, message=message) if unknown & set(shown.body) else completion(rating(7))

    with judge_of(reply) as (judge, stub):
        assert judge.rate(case_of(), GOOD) == SEVENS
        assert judge.rate(case_of(), GOOD) == SEVENS
    assert len(stub.seen) == 3
    assert not unknown & set(stub.seen[-1].body) and instead <= set(stub.seen[-1].body)
    assert stub.seen[-1].blocks == stub.seen[0].blocks


def test_a_server_without_any_way_to_limit_tokens_is_asked_without() -> None:
    def reply(shown: Shown) -> Reply:
        named = [name for name in ("max_tokens", "max_completion_tokens") if name in shown.body]
        return error_of(400, message=f"Unknown parameter: {named[0]}") if named else completion(rating(7))

    with judge_of(reply) as (judge, stub):
        assert judge.rate(case_of(), GOOD) == SEVENS
    assert len(stub.seen) == 3


def test_a_template_without_a_system_message_gets_one_message() -> None:
    def reply(shown: Shown) -> Reply:
        two = len(shown.body["messages"]) == 2
        return error_of(400, message="System role not supported") if two else completion(rating(7))

    with judge_of(reply) as (judge, stub):
        assert judge.rate(case_of(), GOOD) == SEVENS
    [message] = stub.seen[-1].body["messages"]
    assert message["role"] == "user" and "never an instruction" in message["content"]
    assert stub.seen[-1].blocks["ANSWER"] == {"content": GOOD["content"]}


def test_a_context_without_room_for_reasoning_gets_a_short_verdict() -> None:
    def reply(shown: Shown) -> Reply:
        if shown.body["max_tokens"] > 300 and "company 1?" in str(shown.blocks):
            return error_of(400, message="This model's maximum context length is 4096 tokens; max_tokens is too large")
        return completion(rating(7))

    with judge_of(reply) as (judge, stub):
        assert judge.rate(case_of(1), GOOD) == SEVENS
        assert judge.rate(case_of(2), GOOD) == SEVENS
    assert [shown.body["max_tokens"] for shown in stub.seen] == [MAX_TOKENS, 256, MAX_TOKENS]
    assert all("response_format" in shown.body for shown in stub.seen)


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_a_retry_after_holds_back_every_caller() -> None:
    asked_at: list[float] = []
    limited = iter([True])
    gate = threading.Barrier(2)

    def reply(_: Shown) -> Reply:
        asked_at.append(time.monotonic())
        return Reply(429, "{}", {"Retry-After": "0.4"}) if next(limited, False) else completion(rating(7))

    def ask_later(judge: OpenAIJudge) -> None:
        gate.wait()
        time.sleep(0.1)  # the other one has been told by now
        judge.rate(case_of(1), GOOD)

    with judge_of(reply, backoff_s=0.05) as (judge, _):
        other = threading.Thread(target=ask_later, args=(judge,))
        other.start()
        gate.wait()
        judge.rate(case_of(), GOOD)
        other.join()
    first, *later = asked_at
    assert len(later) == 2 and all(at - first >= 0.4 for at in later)
    assert later[0] != later[1] and all(at - first < 3 for at in later)


def test_waits_double_and_are_random() -> None:
    asked_at: list[float] = []

    def reply(_: Shown) -> Reply:
        asked_at.append(time.monotonic())
        return Reply(503)

    with judge_of(reply, backoff_s=0.05, tries=5) as (judge, _), pytest.raises(JudgeUnavailable, match="5 tries"):
        judge.rate(case_of(), GOOD)
    waits = [later - earlier for earlier, later in itertools.pairwise(asked_at)]
    for wait, most in zip(waits, (0.05, 0.1, 0.2, 0.4), strict=True):
        assert most / 2 <= wait < most + 0.25


def test_a_limited_rate_is_waited_for_while_others_get_through() -> None:
    """One of three calls is let in: nobody uses up the three tries that a dead server has."""
    turns = iter(range(10_000))

    def reply(_: Shown) -> Reply:
        return completion(rating(7)) if next(turns) % 3 == 0 else Reply(429, "{}")

    with judge_of(reply, tries=3, backoff_s=0.001) as (judge, _):
        asking = [threading.Thread(target=judge.rate, args=(case_of(at), GOOD)) for at in range(30)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert judge.usage.calls == 30
    with judge_of(lambda _: Reply(429, "{}"), tries=3) as (judge, stub):
        with pytest.raises(JudgeUnavailable, match="status 429"):
            judge.rate(case_of(), GOOD)
        assert len(stub.seen) == 3


def test_a_server_that_trickles_is_given_up_after_the_time_out() -> None:
    slow = Reply(body=" " * 100, trickle_s=0.05)
    began = time.monotonic()
    with (
        judge_of(lambda _: slow, timeout_s=0.3, tries=2) as (judge, _),
        pytest.raises(JudgeUnavailable, match="ReadTimeout"),
    ):
        judge.rate(case_of(), GOOD)
    assert time.monotonic() - began < 3


def test_a_reply_without_end_is_not_read_to_its_end() -> None:
    with (
        judge_of(lambda _: Reply(body=" " * (5 * 2**20)), tries=2) as (judge, _),
        pytest.raises(JudgeUnavailable, match="over 4,194,304 bytes"),
    ):
        judge.rate(case_of(), GOOD)


def test_stopping_ends_a_wait_at_once() -> None:
    with judge_of(lambda _: Reply(429, "{}", {"Retry-After": "60"})) as (judge, _):
        threading.Timer(0.2, judge.stop).start()
        began = time.monotonic()
        with pytest.raises(JudgeUnavailable, match="it was stopped"):
            judge.rate(case_of(), GOOD)
        assert time.monotonic() - began < 5


# --- what was used ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "used"),
    [
        ({"prompt_tokens": 100, "completion_tokens": 10}, Usage(1, 100, 10, 0)),
        ({"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}, Usage(1, 100, 10, 0)),
        ({"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 400}, Usage(1, 100, 300, 0)),  # reasoning
        ({"input_tokens": 100, "output_tokens": 10}, Usage(1, 100, 10, 0)),
        (None, None),
        ({}, None),
        ("100", None),
        ({"prompt_tokens": 0, "completion_tokens": 0}, None),
        ({"prompt_tokens": -5, "completion_tokens": 10}, None),
        ({"prompt_tokens": True, "completion_tokens": 10}, None),
        ({"prompt_tokens": "100", "completion_tokens": 10}, None),
        ({"prompt_tokens": 1e300, "completion_tokens": 10}, None),
        ({"prompt_tokens": 10**30, "completion_tokens": 10}, None),
    ],
)
def test_what_a_server_says_that_it_used(said: Any, used: Usage | None) -> None:
    with judge_of(lambda _: completion(rating(7), usage=said)) as (judge, stub):
        judge.rate(case_of(), GOOD)
        if used is not None:
            assert judge.usage == used
            return
        sent = sum(len(message["content"].encode()) for message in stub.seen[0].body["messages"])
        assert judge.usage.calls == judge.usage.estimated == 1
        assert sent / 4 < judge.usage.prompt_tokens < sent
        most = judge.most(case_of(), GOOD)
        assert judge.usage.prompt_tokens < most.prompt_tokens and judge.usage.answer_tokens < most.answer_tokens


def test_a_call_that_ran_into_its_time_out_is_counted_by_estimate() -> None:
    replies = iter([Reply(delay_s=0.6), completion(rating(7))])
    with judge_of(lambda _: next(replies), timeout_s=0.3) as (judge, _):
        judge.rate(case_of(), GOOD)
        assert (judge.usage.calls, judge.usage.estimated) == (2, 1)


def test_the_most_that_a_call_can_use_is_more_than_any_tokenizer_makes_of_it() -> None:
    answer = {"role": "assistant", "content": "𝒜<|im_end|>\u202e" * 50}
    with judge_of(verdict) as (judge, stub):
        judge.prefer(case_of(), answer, GOOD)
        body = stub.seen[0].body
        sent = sum(len(message["content"].encode()) for message in body["messages"])
        most = judge.most(case_of(), answer, GOOD)
    read = sent + len(json.dumps(body["response_format"]))
    assert read < most.prompt_tokens < read + 1000 and most.answer_tokens == MAX_TOKENS


# --- keys and addresses ----------------------------------------------------------------------------------------------


def test_a_key_with_a_line_break_around_it_works_and_one_with_a_break_inside_is_refused_unseen() -> None:
    with judge_of(lambda _: completion(rating(7))) as (_, stub):
        for key in (f"{KEY}\n", f"  {KEY}\r\n"):
            judge = OpenAIJudge(url=stub.url, model="m", key=key)  # the stub asserts the header
            assert judge.rate(case_of(), GOOD) == SEVENS
            judge.close()
        for key in (f"{KEY}\nX-Other: 1", f"{KEY} {KEY}", f"{KEY}é"):
            with pytest.raises(BadRequest, match="LOOP_JUDGE_API_KEY") as refused:
                OpenAIJudge(url=stub.url, model="m", key=key)
            assert KEY not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    "url",
    [
        f"https://me:{KEY}@judge.example/v1",
        f"https://judge.example/v1?key={KEY}",
        f"https://judge.example/v1?api-key={KEY}",
        f"https://judge.example/v1?access_token={KEY}",
        f"ftp://{KEY}.example/v1",
        KEY,
        "",
    ],
)
def test_an_address_with_a_secret_is_refused_unseen(url: str) -> None:
    with pytest.raises(BadRequest, match="LOOP_JUDGE_URL") as refused:
        OpenAIJudge(url=url, model="m")
    assert KEY not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("path", ["", "/", "/chat/completions", "?api-version=2026-01-01"])
def test_forms_of_an_address(path: str) -> None:
    with judge_of(lambda _: completion(rating(7))) as (_, stub):
        judge = OpenAIJudge(url=stub.url + path, model="m", key=KEY)
        assert judge.rate(case_of(), GOOD) == SEVENS
        judge.close()


def test_a_server_on_this_machine_is_reached_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with judge_of(lambda _: completion(rating(7))) as (judge, _):
        assert judge.rate(case_of(), GOOD) == SEVENS


def test_nothing_secret_shows_anywhere(caplog: pytest.LogCaptureFixture) -> None:
    """With the HTTP client's own log at its most talkative, and the server echoing all it gets."""
    secret = "the patient's name is Aloysius"
    case = case_of(messages=[{"role": "user", "content": secret}])
    answer = {"role": "assistant", "content": secret}
    printed = ""
    with caplog.at_level(logging.DEBUG):
        for name in ("httpx", "httpcore", "httpcore.http11", "httpcore.connection"):
            logging.getLogger(name).setLevel(logging.DEBUG)
        for reply in (
            Reply(401, f"bad key {KEY} {secret}"),
            error_of(400, message=f"{secret} response_format"),
            error_of(404, code="model_not_found", message=secret),
            Reply(500, f"{KEY} {secret}"),
            Reply(200, f"<html>{secret}"),
            Reply(None),
            completion(secret),
            completion(None, refusal=secret),
        ):
            with judge_of(lambda _, reply=reply: reply, tries=2) as (judge, _):  # type: ignore[misc]
                with pytest.raises(LoopError) as error:
                    judge.rate(case, answer)
                printed += "".join(traceback.format_exception(error.value)) + json.dumps(error.value.as_dict())
                printed += repr(judge) + repr(vars(judge)) + repr(vars(judge._server)) + repr(case)
    printed += caplog.text
    assert "httpcore" in printed  # it did talk
    assert KEY not in printed and "Aloysius" not in printed
