"""Samples through the API: captured, described, found by every filter, and taken out again."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bios._client import ApiError
from report_world import compared, questions
from running_api import Api
from wire_types import check

from loop_dagster.rules.recording import is_kept
from loop_dagster.store.intake import drain
from loop_dagster.store.purging import purge_deleted

SECRET = "anna.schmidt@example.com"


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


@pytest.fixture(scope="module")
def pipeline(api: Api, tiny_model: Any) -> dict[str, Any]:
    """A pipeline, whose own tag is a source that is switched on."""
    made: dict[str, Any] = api.client.loop.create_pipeline(name="Desk", model={"id": str(tiny_model)})["pipeline"]
    return made


def capture(api: Api, text: str, answer: str = "Done.", **more: Any) -> str:
    done = api.client.loop.capture(more.pop("source", "desk"), "any/model", ask(text), answer, **more)
    assert done["captured"] is True, done
    return str(done["trace_id"])


def test_nothing_is_recorded_without_consent(api: Api, pipeline: dict[str, Any]) -> None:
    loop = api.client.loop
    before = loop.list_traces()["total"]
    off = loop.capture("nobody switched it on", "m", ask("Q"), "A")
    assert off["captured"] is False
    assert "switched off" in off["reason"]
    body = {"deployment_id": "desk", "model": "m", "messages": ask("Q"), "completion": "A"}
    said_no = api.call("POST", "/api/loop/traces", json=body, headers={"X-Loop-Capture": "off"})
    assert (said_no.status_code, said_no.json()["captured"]) == (200, False)
    loop.set_config("a share", True, sample_rate=0.5)
    kept = [
        loop.capture("a share", "m", ask(f"Q{turn}"), "A", conversation_id=f"c{number}")["captured"]
        for number in range(20)
        for turn in range(2)
    ]
    assert kept[::2] == kept[1::2] == [is_kept("a share", f"c{number}", 0.5) for number in range(20)]
    assert loop.list_traces()["total"] == before + sum(kept)
    for number in range(20):  # without a name, a conversation is known by how it begins, in any form and with any ids
        first = ask(f"Conversation {number}")
        parts = [first[0], {"role": "user", "content": [{"type": "text", "text": first[1]["content"]}]}]
        turns = [first, parts, [*first, {"role": "assistant", "content": "A"}, {"role": "user", "content": "Then?"}]]
        kept = [
            loop.capture("a share", "m", turn, "A", request_id=f"r{number}-{at}")["captured"]
            for at, turn in enumerate(turns)
        ]
        assert len(set(kept)) == 1


def test_an_id_that_was_made_here_is_nobodys_request_id(api: Api, pipeline: dict[str, Any]) -> None:
    one = capture(api, "The first")
    other = capture(api, "The second", request_id=one)
    assert other != one


@pytest.mark.parametrize("number", ["9" * 4301, "1e999", "-1e400"])
def test_a_number_that_could_not_be_read_again_is_refused(api: Api, pipeline: dict[str, Any], number: str) -> None:
    tools = f'[{{"type":"function","function":{{"name":"f","parameters":{{"maximum":{number}}}}}}}]'
    said = '"messages":[{"role":"user","content":"Q"}],"completion":"A"'
    body = f'{{"deployment_id":"desk","model":"m",{said},"tools":{tools}}}'
    sent: dict[str, Any] = {"content": body, "headers": {"Content-Type": "application/json"}}
    refused = api.call("POST", "/api/loop/traces", **sent)
    assert refused.status_code == 400 and "number" in refused.json()["error"]["message"]
    turns = '[{"role":"user","content":"Q"},{"role":"assistant","content":"A"}]'
    rows = f'{{"source":"desk","rows":[{{"messages":{turns},"tools":{tools}}}]}}'
    answered = api.call("POST", "/api/loop/import", **{**sent, "content": rows}).json()
    assert (answered["imported"], answered["refused_rows"][0]["code"]) == (0, "number_too_large")


def test_a_long_number_that_can_be_read_again_is_kept(api: Api, pipeline: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"maximum": int("9" * 4000)}}}]
    sample = capture(api, "Long?", tools=tools)
    assert api.client.loop.get_trace(sample)["tools"] == tools


def test_question_and_answer_may_hold_the_same_characters(api: Api, pipeline: dict[str, Any]) -> None:
    found = api.client.loop.get_trace(capture(api, "A\0B", "C\0D"))
    assert (found["messages"][-1]["content"], found["completion"]) == ("A\0B", "C\0D")


def test_an_exchange_is_recorded_redacted_and_read_back(api: Api, pipeline: dict[str, Any]) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "mail", "arguments": {"to": SECRET}}}
    sample = capture(
        api,
        f"Write to {SECRET}",
        f"I wrote to {SECRET}",
        tool_calls=[call],
        tools=[{"type": "function", "function": {"name": "mail"}}],
        conversation_id="conversation 1",
        labels=["Mail"],
        metadata={"any": 1},
        latency_ms=12,
    )
    found = api.client.loop.get_trace(sample)
    assert SECRET not in json.dumps(found)
    assert found["messages"][-1]["content"] == "Write to [redacted:email]"
    assert found["completion"] == "I wrote to [redacted:email]"
    assert json.loads(found["tool_calls"][0]["function"]["arguments"]) == {"to": "[redacted:email]"}
    assert [one["label"] for one in found["labels"]] == ["desk", "mail"]
    assert (found["origin"], found["deployment_id"], found["model"]) == ("captured", "desk", "any/model")
    assert (found["feedback"], found["signals"]) == (None, [])
    kept = datetime.fromisoformat(found["expires_at"]) - datetime.fromisoformat(found["created_at"])
    assert kept == timedelta(days=30)


def test_the_same_request_is_the_same_sample_also_from_the_lake(api: Api, pipeline: dict[str, Any]) -> None:
    said = {"request_id": "r1", "feedback": {"verdict": "corrected", "correction": "Better."}}
    first = capture(api, "Once?", **said)
    assert capture(api, "Once?", **said) == first
    drain(api.store, holder="a test")
    assert capture(api, "Another text", **said) == first
    [only] = api.client.loop.list_signals(first)
    assert (only["verdict"], only["correction"], only["source"]) == ("edited", "Better.", "human")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "text"}, "messages"),
        ({"messages": [{"role": "root", "content": "x"}]}, "role"),
        ({"messages": [7]}, "message"),
        ({"completion": " "}, "completion"),
        ({"tool_calls": [{"function": {}}]}, "tool call"),
        ({"tools": [1]}, "tools"),
        ({"model": ""}, "model"),
        ({"labels": ["a b"]}, "Tag"),
        ({"labels": [f"tag{number}" for number in range(40)]}, "32"),
        ({"feedback": {"verdict": "corrected"}}, "correction"),
        ({"feedback": {"verdict": "good", "correction": "x"}}, "correction"),
        ({"feedback": {"verdict": "scored"}}, "verdict"),
        ({"feedback": {"verdict": "good", "stars": 5}}, "stars"),
        ({"prompt_tokens": "many"}, "prompt_tokens"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_what_no_exchange_can_be_is_refused_before_anything_is_stored(
    api: Api, pipeline: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    before = api.store.samples.count()
    body = {"deployment_id": "desk", "model": "m", "messages": ask("Q"), "completion": "A", **change}
    answered = api.call("POST", "/api/loop/traces", json=body)
    assert (answered.status_code, answered.json()["error"]["code"]) == (400, "BAD_REQUEST"), answered.text
    assert named in answered.json()["error"]["message"]
    assert api.store.samples.count() == before


def test_feedback_of_every_word_and_the_newest_decides(api: Api, pipeline: dict[str, Any]) -> None:
    loop = api.client.loop
    sample = capture(api, "How did it do?")
    assert loop.upvote(sample)["verdict"] == "accepted"
    assert loop.downvote(sample, reason=f"Ask {SECRET}")["reason"] == "Ask [redacted:email]"
    assert loop.correct(sample, f"Say {SECRET}")["correction"] == "Say [redacted:email]"
    assert loop.gold(sample, "Say nothing.")["verdict"] == "gold"
    last = loop.signal(sample, "bad", labels=["refunds"], attributes={"language": "es"}, parent="billing")
    assert last["verdict"] == "rejected"
    assert [one["verdict"] for one in loop.list_signals(sample)] == [
        "accepted",
        "rejected",
        "edited",
        "gold",
        "rejected",
    ]
    found = loop.get_trace(sample)
    assert found["feedback"] == "bad"
    assert {(one["key"], one["label"], one["parent"]) for one in found["labels"]} == {
        ("", "desk", None), ("", "refunds", "billing"), ("language", "es", None),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"verdict": "scored"}, "verdict"),
        ({"verdict": "good", "source": "judge"}, "source"),
        ({"verdict": "good", "score": 0.9}, "score"),
        ({"verdict": "edited"}, "correction"),
        ({"verdict": "edited", "correction": " "}, "correction"),
        ({"verdict": "accepted", "correction": "x"}, "correction"),
        ({"verdict": "good", "labels": ["no no"]}, "Tag"),
        ({"verdict": "good", "labels": [], "parent": "group"}, "parent"),
        ({"verdict": "good", "stars": 5}, "stars"),
    ],
)
def test_feedback_that_cannot_be_lands_with_nothing(
    api: Api, pipeline: dict[str, Any], body: dict[str, Any], named: str
) -> None:
    sample = capture(api, "Refused feedback?")
    answered = api.call("POST", f"/api/loop/traces/{sample}/signals", json={"labels": ["would-land"], **body})
    assert (answered.status_code, answered.json()["error"]["code"]) == (400, "BAD_REQUEST")
    assert named in answered.json()["error"]["message"]
    found = api.client.loop.get_trace(sample)
    assert (found["signals"], [one["label"] for one in found["labels"]]) == ([], ["desk"])


def test_feedback_sent_again_is_given_once_and_kept_in_one_place(api: Api, pipeline: dict[str, Any]) -> None:
    sample = capture(api, "Twice?")
    send = {"json": {"verdict": "edited", "correction": "A right answer."}, "headers": {"Idempotency-Key": "s"}}
    told = [api.call("POST", f"/api/loop/traces/{sample}/signals", **send) for _ in range(2)]
    assert told[0].json() == told[1].json()
    assert len(api.client.loop.list_signals(sample)) == 1
    api.client.loop.delete_trace(sample)
    assert api.call("POST", f"/api/loop/traces/{sample}/signals", **send).status_code == 404


def test_tags_keep_and_leave_their_groups_and_go(api: Api, pipeline: dict[str, Any]) -> None:
    loop = api.client.loop
    sample = capture(api, "Tags?")
    assert {one["label"]: one["parent"] for one in loop.label(sample, ["Late", "lost"], parent="parcels")} == {
        "desk": None, "late": "parcels", "lost": "parcels",
    }  # fmt: skip
    assert {one["label"]: one["parent"] for one in loop.label(sample, ["late"])}["late"] == "parcels"
    assert {one["label"]: one["parent"] for one in loop.label(sample, ["late"], parent="")}["late"] is None
    loop.set_attributes(sample, {"category": "billing"})
    assert ("category", "refund") in {
        (one["key"], one["label"]) for one in loop.set_attributes(sample, {"category": "refund"})
    }
    registry = {(one["key"], one["label"]): one for one in loop.list_labels()}
    assert registry[("", "lost")] == {
        "key": "", "label": "lost", "traces": 1, "parent": "parcels", "parents": [{"parent": "parcels", "traces": 1}],
    }  # fmt: skip
    assert registry[("category", "refund")]["traces"] == 1
    assert ("category", "billing") not in registry
    assert [one["label"] for one in loop.unlabel(sample, "late")["labels"]] == ["desk", "lost", "refund"]
    loop.unlabel(sample, "refund", key="category")
    with pytest.raises(ApiError) as gone:
        loop.unlabel(sample, "late")
    assert gone.value.status == 404


def test_every_filter_finds_its_own(api: Api, pipeline: dict[str, Any]) -> None:
    loop = api.client.loop
    loop.set_config("shop", True)
    start = datetime.now(UTC)
    one = capture(api, 'Where is "parcel 77"?\nQuickly', source="shop", conversation_id="k1", labels=["find-me"])
    two = capture(api, "Where is parcel 78?", "Grün", source="shop", labels=["other"])
    three = capture(api, "Where is parcel 79?", source="shop")
    loop.upvote(one)
    loop.correct(two, "Lost.")
    loop.set_attributes(two, {"language": "es", "task": "a:b"})
    loop.label(one, ["find-me"], parent="group")

    def found(**filters: Any) -> list[str]:
        page = loop.list_traces(deployment_id="shop", **filters)
        assert page["total"] == len(page["traces"])
        return [row["trace_id"] for row in page["traces"]]

    assert found() == [three, two, one]
    assert (
        found(conversation_id="k1") == found(label="find-me") == found(label="group") == found(signal="good") == [one]
    )
    assert found(signal="corrected") == found(attributes={"language": "es", "task": "a:b"}) == [two]
    assert found(attributes={"language": "es", "task": "b"}) == found(signal="bad") == []
    assert found(unsignalled=True) == found(judge="unscored") == found(unlabelled=True) == [three]
    assert found(judge="picked") == found(judge="below_bar") == []
    assert found(signalled=True) == [two, one]
    assert found(model="any/model", origin="captured") == [three, two, one]
    assert found(model="none") == found(origin="imported") == []
    assert found(from_time=start.isoformat()) == [three, two, one]
    assert found(to_time=start.isoformat()) == []
    assert found(q='"PARCEL 77"?\nq') == [one]
    assert found(q="grün") == [two]
    assert found(q="content") == []
    assert [row["trace_id"] for row in loop.list_traces(deployment_id="shop", limit=1, offset=1)["traces"]] == [two]
    drain(api.store, holder="a test")
    assert found(label="group") == [one]
    assert found(q="parcel 7") == [three, two, one]


def test_a_pipelines_samples_have_a_state_and_a_reason(api: Api, pipeline: dict[str, Any]) -> None:
    loop = api.client.loop
    good, open_ = capture(api, "A good one?"), capture(api, "An open one?")
    loop.upvote(good)
    rows = {row["trace_id"]: row for row in loop.list_traces(pipeline=pipeline["rule_id"], limit=200)["traces"]}
    for row in rows.values():
        check(row["state"], "LoopSampleState")
    assert rows[good]["state"]["state"] == "waiting"
    assert (rows[open_]["state"]["state"], rows[open_]["state"]["reason"][:6]) == ("left_out", "Nobody")
    answer = loop.get_trace_pipelines(good)
    check(answer, "LoopTracePipelinesResponse")
    assert [(one["rule_id"], one["state"]) for one in answer["pipelines"]] == [(pipeline["rule_id"], "waiting")]
    assert loop.get_pipeline(pipeline["rule_id"])["samples_total"] == len(rows)


def test_an_attempts_samples_are_listed_by_its_split(api: Api) -> None:
    attempt = compared(api.store, questions(3), name="Split", state="awaiting_review")
    assert api.client.loop.list_traces(attempt=attempt.run_id, split="held_back")["total"] == 0  # only their keys exist
    with pytest.raises(ApiError) as unknown:
        api.client.loop.list_traces(attempt="01900000-0000-7000-8000-000000000000")
    assert unknown.value.status == 404


@pytest.mark.parametrize(
    ("query", "status", "named"),
    [
        ("origin=elsewhere", 400, "origin"),
        ("signal=fine", 400, "signal"),
        ("judge=maybe", 400, "judge"),
        ("attempt=x&split=test", 400, "split"),
        ("split=train", 400, "attempt"),
        ("q=x", 400, "q"),
        ("attr=novalue", 400, "attr"),
        ("from=2026-01-01T00:00:00", 400, "from"),
        ("from=0001-01-01T00:00:00%2B14:00", 400, "from"),
        ("to=yesterday", 400, "to"),
        ("dataset=a&pipeline=b", 400, "dataset"),
        ("dataset=a", 404, "dataset"),
        ("pipeline=nothing", 404, "nothing"),
        ("limit=201", 400, "limit"),
        ("lable=x", 400, "lable"),
    ],
)
def test_a_filter_that_is_none_is_refused_by_name(api: Api, query: str, status: int, named: str) -> None:
    answered = api.call("GET", f"/api/loop/traces?{query}")
    assert answered.status_code == status, answered.text
    assert named in answered.json()["error"]["message"]


def test_a_deleted_sample_is_gone_from_every_answer_and_then_from_every_file(
    api: Api, pipeline: dict[str, Any]
) -> None:
    loop = api.client.loop
    text = "An unmistakable conversation about zebras"
    sample = capture(api, text)
    loop.correct(sample, "An unmistakable correction")
    drain(api.store, holder="a test")
    gone = loop.delete_trace(sample)
    check(gone, "LoopTraceDeleteResponse")
    for call in (loop.get_trace, loop.list_signals, loop.get_trace_pipelines, loop.delete_trace, loop.upvote):
        with pytest.raises(ApiError) as missing:
            call(sample)
        assert (missing.value.status, missing.value.code) == (404, "NOT_FOUND")
    assert loop.list_traces(q="zebras")["total"] == 0
    purge_deleted(api.store, holder="a test")
    home = api.store.settings.root
    for path in (path for path in home.rglob("*") if path.is_file()):
        assert b"unmistakable" not in path.read_bytes(), path


def test_another_workspaces_samples_are_not_there(api: Api, pipeline: dict[str, Any]) -> None:
    sample = capture(api, "Ours")
    theirs = api.new_key(workspaces=("theirs",))
    unknown = "01900000-0000-7000-8000-000000000000"
    for method, path, body in (
        ("GET", "/api/loop/traces/{}", None),
        ("GET", "/api/loop/traces/{}/signals", None),
        ("GET", "/api/loop/traces/{}/pipelines", None),
        ("POST", "/api/loop/traces/{}/signals", {"verdict": "good"}),
        ("POST", "/api/loop/traces/{}/labels", {"labels": ["x"]}),
        ("DELETE", "/api/loop/traces/{}/labels/desk", None),
        ("DELETE", "/api/loop/traces/{}", None),
    ):
        told = [api.call(method, path.format(one), key=theirs, json=body) for one in (sample, unknown)]
        assert [one.status_code for one in told] == [404, 404]
        assert told[0].text.replace(sample, "ID") == told[1].text.replace(unknown, "ID")
    assert api.call("GET", "/api/loop/traces", key=theirs).json()["total"] == 0
    assert api.call("GET", "/api/loop/labels", key=theirs).json() == {"labels": []}
    assert api.client.loop.get_trace(sample)["signals"] == []
