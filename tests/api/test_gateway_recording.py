"""What the gateway records: consent, tags, tool calls, streams put together, ids, and what it counts as missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from bios._client import ApiError
from gateway_world import QUESTION, World, until
from polars.testing import assert_frame_equal
from stub_upstream import Reply, Upstream, chunk, chunks, completion, message, message_events, sse
from wire_types import check

from loop_dagster.store.intake import drain

CASES = Path(__file__).parent.parent / "cases"
TOOLS = [{"type": "function", "function": {"name": "pay", "parameters": {"type": "object"}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "pay", "arguments": '{"sum": 1.50, "to": "a"}'}}
STORED = {"id": "call_1", "type": "function", "function": {"name": "pay", "arguments": '{"sum":1.50,"to":"a"}'}}


def ask(world: World, reply: Reply, *, headers: dict[str, str] | None = None, **body: Any) -> str | None:
    """The sample id that one call got."""
    world.up.reply = lambda _: reply
    path = "/v1/messages" if body.get("model", "").startswith("claude") else "/v1/chat/completions"
    whole = {"model": "gpt-a", "messages": QUESTION, **body}
    answered = world.api.call("POST", path, json=whole, headers=headers or {})
    assert answered.status_code == reply.status
    found: str | None = answered.headers.get("x-loop-sample-id")
    return found


TAGGED = {"X-Loop-Pipeline": "support"}


def labels(trace: dict[str, Any]) -> list[str]:
    return sorted(one["label"] for one in trace["labels"])


def test_nothing_is_recorded_without_consent(world: World) -> None:
    before = world.samples()
    assert ask(world, completion()) is None
    assert ask(world, completion(), headers={**TAGGED, "X-Loop-Capture": "OFF"}) is None
    world.api.client.loop.set_config("gpt-off", True)
    assert ask(world, completion(), model="gpt-off", headers={"X-Loop-Capture": "off"}) is None
    world.api.client.loop.set_config("gpt-off", False)
    assert ask(world, completion(), model="gpt-off") is None
    assert world.samples() == before


def test_the_header_is_consent_and_unknown_tags_are_dropped_and_counted(world: World) -> None:
    sample = ask(
        world,
        completion("Write to anna@example.com."),
        headers={"X-Loop-Pipeline": "Support , nobody,sales,, b a d"},
        messages=[{"role": "system", "content": "Key sk-proj-abcdefghijklmnopqrstuvwxyz0123456789"}, *QUESTION],
    )
    trace = world.trace(sample)
    assert (trace["deployment_id"], trace["model"], trace["origin"]) == ("gpt-a", "gpt-test-1", "captured")
    assert labels(trace) == ["sales", "support"]
    assert trace["completion"] == "Write to [redacted:email]."
    assert "sk-proj" not in json.dumps(trace)
    world.missed_soon("nobody", "no_pipeline")
    assert world.missed()["", "no_pipeline"] == 1  # a word that cannot be a tag is not repeated anywhere


def test_tags_that_no_pipeline_has_are_no_consent(world: World) -> None:
    before = world.samples()
    assert ask(world, completion(), headers={"X-Loop-Pipeline": "misspelt"}) is None
    world.missed_soon("misspelt", "no_pipeline")
    assert world.samples() == before


def test_a_pipeline_shows_what_was_missed(world: World) -> None:
    ask(world, completion(""), headers={"X-Loop-Pipeline": "support, sales, wrong-word"})
    world.missed_soon("wrong-word", "no_pipeline")
    loop = world.api.client.loop
    pipeline = next(one for one in loop.list_pipelines()["pipelines"] if one["own_tag"] == "sales")
    assert pipeline["capture"] is None
    whole = loop.get_pipeline(pipeline["rule_id"])
    check(whole, "Pipeline")
    rows = {(row["tag"], row["reason"]) for row in whole["capture"]["not_recorded"]}
    assert whole["capture"]["days"] == 7
    assert {("sales", "incomplete"), ("wrong-word", "no_pipeline")} <= rows
    assert ("support", "incomplete") not in rows
    stats = loop.stats()
    check(stats, "LoopStats")
    everything = {(row["tag"], row["reason"]) for row in stats["capture"]["not_recorded"]}
    assert {("support", "incomplete"), ("sales", "incomplete"), ("wrong-word", "no_pipeline")} <= everything


def test_a_source_that_is_switched_on_records_with_its_tags(world: World) -> None:
    world.api.client.loop.set_config("gpt-on", True, retention_days=3, tags=["sales", "own words".replace(" ", "-")])
    trace = world.trace(ask(world, completion(), model="gpt-on"))
    assert labels(trace) == ["own-words", "sales"]
    assert trace["expires_at"][:10] > trace["created_at"][:10]
    both = world.trace(ask(world, completion(), model="gpt-on", headers=TAGGED))
    assert labels(both) == ["own-words", "sales", "support"]


def test_the_share_of_a_source_keeps_or_skips_whole_conversations(world: World) -> None:
    world.api.client.loop.set_config("gpt-half", True, sample_rate=0.5)
    kept = 0
    for number in range(24):
        first = [{"role": "user", "content": f"Question {number}"}]
        later = [*first, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "More"}]
        turns = [ask(world, completion(), model="gpt-half", messages=turn) is not None for turn in (first, later)]
        assert turns[0] == turns[1]
        kept += turns[0]
    assert 4 <= kept <= 20
    named = {ask(world, completion(), model="gpt-half", headers={"X-Loop-Conversation": "one"}) is None for _ in "ab"}
    assert len(named) == 1
    # A call that asks for itself is no matter of shares.
    world.api.client.loop.set_config("gpt-half", True, sample_rate=0.0)
    sample = ask(world, completion(), model="gpt-half", headers={**TAGGED, "X-Loop-Conversation": "two"})
    assert world.trace(sample)["conversation_id"] == "two"


def test_a_request_id_that_comes_again_is_the_first_sample(world: World) -> None:
    said = {**TAGGED, "X-Request-ID": "request 1"}
    first = ask(world, completion("First."), headers=said)
    world.trace(first)
    assert ask(world, completion("Second."), headers=said) == first
    drain(world.store, holder="test")
    third = ask(world, completion("Third."), headers=said)
    assert third is not None
    world.settle()
    signal = world.api.client.loop.correct(third, "Right.")
    assert signal["trace_id"] == first
    trace = world.trace(first)
    assert (trace["completion"], trace["feedback"]) == ("First.", "corrected")
    assert world.api.client.loop.get_trace(third)["id"] == first
    other = ask(world, completion("Other."), headers=said, model="gpt-b")
    assert world.trace(other)["completion"] == "Other."  # another source, another sample


def test_tool_calls_in_openais_form(world: World) -> None:
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "call_0"}]},
        {"role": "tool", "tool_call_id": "call_0", "content": "paid"},
    ]
    whole = world.trace(ask(world, completion(None, calls=[CALL]), headers=TAGGED, messages=messages, tools=TOOLS))
    assert (whole["completion"], whole["tool_calls"], whole["tools"]) == ("", [STORED], TOOLS)
    pieces = [
        {"role": "assistant", "content": None, "tool_calls": [{"index": 0, **CALL, "function": {"name": "pay"}}]},
        *[
            {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
            for piece in ('{"sum": 1', '.50, "t', 'o": "a"}')
        ],
        {
            "tool_calls": [
                {"index": 1, "id": "call_2", "type": "function", "function": {"name": "end", "arguments": ""}}
            ]
        },
    ]
    stream = Reply(events=sse(*[chunk(piece) for piece in pieces], chunk({}, "tool_calls")))
    streamed = world.trace(ask(world, stream, headers=TAGGED, messages=messages, tools=TOOLS, stream=True))
    assert streamed["tool_calls"] == [
        STORED,
        {"id": "call_2", "type": "function", "function": {"name": "end", "arguments": "{}"}},
    ]
    assert streamed["messages"] == whole["messages"]


def test_tool_use_in_anthropics_form_is_stored_like_openais(world: World) -> None:
    body = {
        "model": "claude-a",
        "max_tokens": 9,
        "system": [
            {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief."},
        ],
        "tools": [
            {"name": "pay", "description": "Pays", "input_schema": {"type": "object"}},
            {"type": "web_search", "name": "w"},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Pay"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "Now."},
                    {"type": "tool_use", "id": "call_0", "name": "pay", "input": {"sum": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_0", "content": [{"type": "text", "text": "paid"}]},
                    {"type": "text", "text": "Again"},
                ],
            },
        ],
    }
    blocks = [
        {"type": "thinking", "text": "hm"},
        {"type": "text", "text": "Paying."},
        {"type": "tool_use", "id": "call_1", "name": "pay", "input": {"sum": 1.5, "to": "a"}},
    ]
    whole = world.trace(ask(world, message(*blocks), headers=TAGGED, **body))
    assert [turn["role"] for turn in whole["messages"]] == ["system", "user", "assistant", "tool", "user"]
    assert whole["messages"][0]["content"] == "Be brief."
    assert whole["messages"][2]["tool_calls"][0]["function"] == {"name": "pay", "arguments": '{"sum":1}'}
    assert whole["messages"][3] == {"role": "tool", "content": "paid", "tool_call_id": "call_0"}
    assert whole["tools"] == [
        {"type": "function", "function": {"name": "pay", "description": "Pays", "parameters": {"type": "object"}}}
    ]
    assert whole["model"] == "claude-test-1"
    stored = {"id": "call_1", "type": "function", "function": {"name": "pay", "arguments": '{"sum":1.5,"to":"a"}'}}
    assert (whole["completion"], whole["tool_calls"]) == ("Paying.", [stored])
    streamed = world.trace(ask(world, Reply(events=message_events(*blocks[1:])), headers=TAGGED, stream=True, **body))
    for name in ("messages", "completion", "tool_calls", "tools", "model"):
        assert streamed[name] == whole[name]


@pytest.mark.parametrize("file", ["clean.jsonl", "content_parts.jsonl", "tool_arguments.jsonl", "secrets.jsonl"])
def test_a_call_becomes_the_sample_that_an_import_of_it_becomes(world: World, file: str) -> None:
    columns = ["messages", "answer", "tools", "text_key", "prompt_key", "answer_key", "bytes", "flag"]
    rows = [json.loads(line) for line in (CASES / file).read_text().splitlines() if line.strip()]
    rows = [row for row in rows if row.get("messages", [{}])[-1].get("role") == "assistant"]
    assert rows
    world.api.client.loop.import_rows(file, rows, import_id=file)
    for row in rows:
        *asked, said = row["messages"]
        reply = completion(said.get("content"), calls=said.get("tool_calls"))
        offered = {"tools": row["tools"]} if row.get("tools") else {}
        world.trace(ask(world, reply, headers=TAGGED, messages=asked, model=f"gpt-{file}", **offered))
    stored = world.store.samples.whole().samples.select("source", *columns).collect()
    by_call = stored.filter(pl.col("source") == f"gpt-{file}").drop("source").sort(columns)
    by_import = stored.filter(pl.col("source") == file).drop("source").sort(columns)
    assert by_call.height == len(rows)
    assert_frame_equal(by_call, by_import)


def test_of_several_choices_the_first_is_the_sample(world: World) -> None:
    body = json.loads(completion("One.").body)
    other = {**body["choices"][0], "index": 1, "message": {"role": "assistant", "content": "Two."}}
    two = Reply(body=json.dumps({**body, "choices": [other, *body["choices"]]}).encode())
    assert world.trace(ask(world, two, headers=TAGGED, n=2))["completion"] == "One."
    mixed = [chunk({"content": "Tw"}, index=1), chunk({"content": "One."}), chunk({"content": "o."}, "stop", index=1)]
    ended = Reply(events=sse(*mixed, chunk({}, "stop")))
    assert world.trace(ask(world, ended, headers=TAGGED, stream=True, n=2))["completion"] == "One."


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(Reply(events=chunks("Half", finish=None, done=False), cut=True), id="cut off"),
        pytest.param(Reply(events=chunks("Half", done=False), cut=True), id="cut off after its last word"),
        pytest.param(Reply(events=chunks("Half", finish=None, done=False)), id="ended without an end"),
        pytest.param(Reply(events=[*chunks("Half"), b'data: {"error":{"message":"x"}}\n\n']), id="error"),
        pytest.param(Reply(events=chunks()), id="an empty stream"),
        pytest.param(completion("  "), id="no text"),
        pytest.param(Reply(body=b"<html>"), id="no JSON"),
        pytest.param(Reply(events=[b"data: {\n\n"]), id="no events"),
    ],
)  # fmt: skip
def test_what_is_no_whole_answer_is_counted_as_incomplete(world: World, reply: Reply) -> None:
    count = world.missed().get(("sales", "incomplete"), 0)
    before = world.samples()
    world.up.reply = lambda _: reply
    body = {"model": "gpt-a", "messages": QUESTION, "stream": reply.events is not None}
    try:
        world.api.call("POST", "/v1/chat/completions", json=body, headers={"X-Loop-Pipeline": "sales"})
    except Exception as error:  # the client sees the cut
        assert reply.cut, error
    else:
        assert not reply.cut
    world.missed_soon("sales", "incomplete", count + 1)
    assert world.samples() == before


def test_a_message_stream_without_its_end_is_incomplete(world: World) -> None:
    count = world.missed().get(("sales", "incomplete"), 0)
    events = message_events({"type": "text", "text": "Half of it"}, stopped=False)
    ask(world, Reply(events=events), headers={"X-Loop-Pipeline": "sales"}, model="claude-a", stream=True)
    world.missed_soon("sales", "incomplete", count + 1)


def test_what_a_sample_cannot_hold_is_not_stored_in_part(world: World) -> None:
    count = world.missed().get(("sales", "incomplete"), 0)
    picture = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:…"}}]
    sample = ask(
        world, completion(), headers={"X-Loop-Pipeline": "sales"}, messages=[{"role": "user", "content": picture}]
    )
    assert sample is None
    world.missed_soon("sales", "incomplete", count + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_over_one_mebibyte_is_too_large(world: World, stream: bool) -> None:
    count = world.missed().get(("support", "too_large"), 0)
    piece = "ä" * 40_000
    texts = [piece] * 14
    large = Reply(events=chunks(*texts)) if stream else completion("".join(texts))
    ask(world, large, headers=TAGGED, stream=stream)
    world.missed_soon("support", "too_large", count + 1)
    fits = Reply(events=chunks(*texts[:12])) if stream else completion("".join(texts[:12]))
    assert len(world.trace(ask(world, fits, headers=TAGGED, stream=stream))["completion"]) == 480_000


def test_the_public_client_records_asks_and_judges_in_one_go(world: World) -> None:
    client = world.api.client
    world.up.reply = lambda sent: Reply(events=chunks("A", "B")) if b'"stream": true' in sent.body else completion()
    whole = client.inference.chat_completions(QUESTION, model="gpt-a", loop={"pipeline": ["support", "sales"]})
    assert labels(world.trace(whole.loop_sample_id)) == ["sales", "support"]
    heard: list[Any] = []
    order: list[str] = []
    loop = {"pipeline": "support", "on_sample_id": lambda found: (heard.append(found), order.append("id"))}
    for _event in client.inference.stream_chat_completions(QUESTION, model="gpt-a", loop=loop):
        order.append("event")
    assert order[:2] == ["id", "event"]
    assert world.trace(heard[0])["completion"] == "AB"
    blocks = [{"type": "text", "text": "Hello."}]
    world.up.reply = lambda sent: Reply(events=message_events(*blocks)) if b"stream" in sent.body else message(*blocks)
    said = client.inference.messages(QUESTION, 9, model="claude-a", loop={"pipeline": "support"})
    assert world.trace(said.loop_sample_id)["completion"] == "Hello."
    list(client.inference.stream_messages(QUESTION, 9, model="claude-a", loop=loop))
    assert world.trace(heard[1])["completion"] == "Hello."
    world.up.reply = lambda _: completion("Within 30 days.")
    reply = client.loop.chat("Support", QUESTION, model="gpt-a")
    assert reply.answer == "Within 30 days."
    assert reply.correct("Within 14 days.")["correction"] == "Within 14 days."
    assert world.trace(reply.sample_id)["feedback"] == "corrected"


def test_feedback_on_a_stream_that_still_runs_is_told_to_come_again(world: World) -> None:
    up: Upstream = world.up
    up.reply = lambda _: Reply(events=chunks("One", "two", "three"), pause_s=0.2)
    body = {"model": "gpt-a", "messages": QUESTION, "stream": True}
    headers = {"X-API-Key": world.api.key, **TAGGED}
    with world.api.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answered:
        sample = answered.headers["x-loop-sample-id"]
        early = world.api.call("POST", f"/api/loop/traces/{sample}/signals", json={"verdict": "good"})
        assert (early.status_code, early.json()["error"]["code"]) == (409, "SAMPLE_NOT_YET_RECORDED")
        assert int(early.headers["retry-after"]) >= 1
        read = world.api.call("GET", f"/api/loop/traces/{sample}/signals")
        assert (read.status_code, read.json()["error"]["code"]) == (409, "SAMPLE_NOT_YET_RECORDED")
        kept = world.api.call("DELETE", f"/api/loop/traces/{sample}")
        assert (kept.status_code, kept.json()["error"]["code"]) == (409, "SAMPLE_NOT_YET_RECORDED")
        assert int(kept.headers["retry-after"]) >= 1
        list(answered.iter_raw())
    assert world.api.client.loop.upvote(sample)["verdict"] == "accepted"
    made_up = "01a229ba-676e-7d5d-86f2-8dbb49d9547f"
    with pytest.raises(ApiError) as refused:
        world.api.client.loop.upvote(made_up)
    assert (refused.value.status, refused.value.code) == (404, "NOT_FOUND")
    world.api.client.loop.delete_trace(sample)
    gone = world.api.call("POST", f"/api/loop/traces/{sample}/signals", json={"verdict": "good"})
    assert gone.status_code == 404


def test_a_caller_that_leaves_ends_the_call_to_the_upstream(world: World) -> None:
    count = world.missed().get(("support", "incomplete"), 0)
    before = world.samples()
    world.up.reply = lambda _: Reply(events=chunks(*["word "] * 200), pause_s=0.05)
    body = {"model": "gpt-a", "messages": QUESTION, "stream": True}
    headers = {"X-API-Key": world.api.key, **TAGGED}
    broken = len(world.up.broken)
    with world.api.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answered:
        next(answered.iter_raw())
    until(lambda: len(world.up.broken) > broken)
    world.missed_soon("support", "incomplete", count + 1)
    assert world.samples() == before


def test_a_caller_that_leaves_before_any_answer(world: World) -> None:
    count = world.missed().get(("support", "incomplete"), 0)
    world.up.reply = lambda _: Reply(body=completion().body, delay_s=2)
    body = {"model": "gpt-a", "messages": QUESTION}
    with pytest.raises(Exception, match="timed out"):
        world.api.call("POST", "/v1/chat/completions", json=body, headers=TAGGED, timeout=0.3)
    world.missed_soon("support", "incomplete", count + 1)
    world.settle()


def test_a_caller_that_leaves_with_the_last_event_has_it_all(world: World) -> None:
    events = [*chunks("All ", "of it."), b": and then nothing\n\n"]
    world.up.reply = lambda _: Reply(events=events, pause_s=0.3)
    heard: list[Any] = []
    loop = {"pipeline": "support", "on_sample_id": heard.append}
    list(world.api.client.inference.stream_chat_completions(QUESTION, model="gpt-a", loop=loop))
    assert world.trace(heard[0])["completion"] == "All of it."


def test_an_id_that_stands_for_an_earlier_sample_labels_and_deletes_that_one(world: World) -> None:
    world.up.reply = lambda _: completion()
    loop = world.api.client.loop
    first = world.trace(ask(world, completion(), headers={**TAGGED, "X-Request-ID": "twice"}))["trace_id"]
    drain(world.store, holder="test")
    again = ask(world, completion(), headers={**TAGGED, "X-Request-ID": "twice"})
    world.settle()
    assert again is not None
    assert again != first
    loop.label(again, labels=["seen"])
    assert "seen" in labels(loop.get_trace(first))
    world.api.call("DELETE", f"/api/loop/traces/{again}/labels/seen").raise_for_status()
    assert "seen" not in labels(loop.get_trace(first))
    assert loop.delete_trace(again)["deleted"] is True
    for gone in (first, again):
        assert world.api.call("GET", f"/api/loop/traces/{gone}").status_code == 404
        assert world.api.call("POST", f"/api/loop/traces/{gone}/signals", json={"verdict": "good"}).status_code == 404
