"""Calls through the gateway: the same bytes in both directions, whose key goes where, and refusals for every client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest
from bios._client import ApiError
from gateway_world import QUESTION, World, until
from stub_upstream import KEY, Reply, chunks, completion, message, message_events

SPELLED = (
    b'{ "model":"gpt-a",\n "temperature": 1e0, "messages" : [{"role":"user","content":"\\u00e4\xc3\xa4"}],"x":null}'
)


def post(world: World, path: str, body: bytes, **options: Any) -> httpx.Response:
    headers = {"Content-Type": "application/json", **options.pop("headers", {})}
    return world.api.call("POST", path, content=body, headers=headers, **options)


@pytest.mark.parametrize("headers", [{}, {"X-Loop-Pipeline": "support"}], ids=["passed", "recorded"])
@pytest.mark.parametrize("zipped", [False, True])
def test_bodies_pass_byte_for_byte(world: World, headers: dict[str, str], zipped: bool) -> None:
    answer = completion("Ja: ä \u2028 <&>")
    world.up.reply = lambda _: Reply(body=answer.body, zipped=zipped, headers={"X-Ratelimit-Remaining": "7"})
    with world.api.http.stream(
        "POST",
        "/v1/chat/completions?beta=1&x=%20",
        content=SPELLED,
        headers={"Authorization": f"Bearer {world.api.key}", "Content-Type": "application/json", **headers},
    ) as answered:
        raw = b"".join(answered.iter_raw())
    sent = world.up.sent[-1]
    assert sent.body == SPELLED
    assert sent.path == "/v1/chat/completions?beta=1&x=%20"
    assert answered.status_code == 200
    assert answered.headers["x-ratelimit-remaining"] == "7"
    assert answered.headers.get("content-encoding") == ("gzip" if zipped else None)
    assert len(raw) == int(answered.headers["content-length"])
    assert zipped or raw == answer.body
    if headers:
        trace = world.trace(answered.headers["x-loop-sample-id"])
        assert (trace["completion"], trace["messages"][0]["content"]) == ("Ja: ä \u2028 <&>", "ää")


@pytest.mark.parametrize("headers", [{}, {"X-Loop-Pipeline": "support"}], ids=["passed", "recorded"])
def test_streams_pass_byte_for_byte_and_as_they_come(world: World, headers: dict[str, str]) -> None:
    events = [b": waiting\n\n", *chunks("One ", "two ", "thr\u00e9e."), b": end\r\n\r\n"]
    world.up.reply = lambda _: Reply(events=events, pause_s=0.05)
    body = json.dumps({"model": "gpt-a", "stream": True, "messages": QUESTION}).encode()
    with world.api.http.stream(
        "POST", "/v1/chat/completions", content=body, headers={"X-API-Key": world.api.key, **headers}
    ) as answered:
        pieces = list(answered.iter_raw())
    assert b"".join(pieces) == b"".join(events)
    assert len(pieces) >= len(events) - 2  # they came one by one, not together at the end
    assert answered.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert ("x-loop-sample-id" in answered.headers) == bool(headers)


def test_each_side_sees_its_own_key_alone(world: World) -> None:
    world.up.reply = lambda _: Reply(
        body=completion().body, headers={"Set-Cookie": "a=b", "X-Loop-Sample-Id": "another's", "X-Request-ID": "theirs"}
    )
    headers = {"Cookie": "session=1", "X-Workspace-ID": "default", "X-Custom": "kept", "X-Loop-Other": "ours"}
    for path, model in (("/v1/chat/completions", "gpt-a"), ("/v1/messages", "claude-a"), ("/v1/messages", "gpt-a")):
        body = json.dumps({"model": model, "messages": QUESTION}).encode()
        answered = post(world, path, body, headers=headers)
        sent = world.up.sent[-1]
        assert answered.status_code == 200
        assert world.api.key not in str(sent.headers)
        names = {name.lower() for name, _ in sent.headers}
        assert not names & {"cookie", "x-workspace-id", "x-loop-other"}
        assert sent.header("x-custom") == "kept"
        shown = "x-api-key" if model == "claude-a" else "authorization"
        assert sent.header(shown) == (KEY if model == "claude-a" else f"Bearer {KEY}")
        assert len(names & {"x-api-key", "authorization"}) == 1
        assert KEY not in str(answered.headers) + answered.text
        assert answered.headers["x-request-id"] == "theirs"
        assert not {"set-cookie", "x-loop-sample-id"} & set(answered.headers)
        assert len(answered.headers.get_list("date")) == 1


def test_the_public_clients_read_answers_and_streams(world: World) -> None:
    world.up.reply = lambda sent: Reply(events=chunks("With", "in")) if b"stream" in sent.body else completion()
    client = world.openai()
    assert client.chat.completions.create(model="gpt-a", messages=QUESTION).choices[0].message.content
    stream = client.chat.completions.create(model="gpt-a", messages=QUESTION, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in stream) == "Within"
    blocks = [{"type": "text", "text": "Within 30 days."}]
    world.up.reply = lambda sent: (
        Reply(events=message_events(*blocks)) if b'"stream"' in sent.body else message(*blocks)
    )
    claude = world.anthropic()
    said = claude.messages.create(model="claude-a", max_tokens=9, messages=QUESTION)
    assert said.content[0].text == "Within 30 days."
    with claude.messages.stream(model="claude-a", max_tokens=9, messages=QUESTION) as events:
        assert events.get_final_text() == "Within 30 days."


@pytest.mark.parametrize("recorded", [False, True])
def test_refusals_of_the_upstream_pass_as_they_are(world: World, recorded: bool) -> None:
    body = b'{"error": {"message": "Slow down.", "type": "requests", "param": null, "code": "rate_limit_exceeded"}}'
    world.up.reply = lambda _: Reply(status=429, body=body, headers={"Retry-After": "17"})
    headers = {"X-Loop-Pipeline": "support, nobody"} if recorded else {}
    before = world.missed()
    with pytest.raises(openai.RateLimitError) as refused:
        world.openai().chat.completions.create(model="gpt-a", messages=QUESTION, extra_headers=headers)
    assert refused.value.response.content == body
    assert refused.value.response.headers["retry-after"] == "17"
    assert "x-loop-sample-id" not in refused.value.response.headers
    assert refused.value.code == "rate_limit_exceeded"
    world.settle()
    assert world.missed() == before  # there was no answer, so none was missed


def test_an_upstream_that_is_down_is_said_so_in_every_form(world: World) -> None:
    with pytest.raises(openai.InternalServerError) as refused:
        world.openai().chat.completions.create(model="down-a", messages=QUESTION)
    assert (refused.value.status_code, refused.value.code) == (502, "UPSTREAM_UNAVAILABLE")
    assert "down-*" in refused.value.message
    assert "127.0.0.1" not in refused.value.message
    with pytest.raises(anthropic.InternalServerError) as other:
        world.anthropic().messages.create(model="down-a", max_tokens=9, messages=QUESTION)
    assert other.value.body["type"] == "error"
    with pytest.raises(ApiError) as third:
        world.api.client.inference.chat_completions(QUESTION, model="down-a", loop={"pipeline": "support"})
    assert (third.value.status, third.value.code) == (502, "UPSTREAM_UNAVAILABLE")


def test_an_unknown_model_is_404_in_every_form(world: World) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        world.openai().chat.completions.create(model="nobody's", messages=QUESTION)
    assert (refused.value.code, refused.value.type) == ("NOT_FOUND", "not_found_error")
    with pytest.raises(anthropic.NotFoundError) as other:
        world.anthropic().messages.create(model="nobody's", max_tokens=9, messages=QUESTION)
    body: Any = other.value.body
    assert (body["type"], body["error"]["type"], body["error"]["code"]) == ("error", "not_found_error", "NOT_FOUND")
    with pytest.raises(ApiError) as third:
        world.api.client.inference.messages(QUESTION, 9, model="nobody's")
    assert (third.value.status, third.value.code) == (404, "NOT_FOUND")


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(b'{"model":"gpt-a","messages":[{"role":"user","content":"half \\ud83d"}]}', id="half an emoji"),
        pytest.param(b'\xef\xbb\xbf{"model":"gpt-a","messages":[]}', id="a byte order mark"),
        pytest.param(b'{"model":"gpt-a","x":' + b"[" * 500 + b"]" * 500 + b"}", id="deep"),
        pytest.param(b'{"model":"gpt-a","x":' + b"9" * 5_000 + b"}", id="a long number"),
    ],
)
def test_what_an_upstream_may_understand_is_its_to_refuse(world: World, odd: bytes) -> None:
    world.up.reply = lambda _: completion()
    assert post(world, "/v1/chat/completions", odd, headers={"X-Loop-Pipeline": "support"}).status_code == 200
    assert world.up.sent[-1].body == odd


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (b"no json", 400, "JSON"),
        (b'{"model":"gpt-a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "deep"),
        (b"[]", 400, "object"),
        (b"{}", 400, "model"),
        (b'{"model": 7}', 400, "model"),
        (b'{"model": "a\\nb"}', 400, "model"),
        (b'{"model":"' + b"a" * 201 + b'"}', 400, "model"),
        (b'{"model":"gpt-a","x":"' + b"a" * 32_000_000 + b'"}', 413, "32,000,000"),
    ],
)
def test_bodies_that_no_upstream_gets(world: World, body: bytes, status: int, named: str) -> None:
    before = len(world.up.sent)
    answered = post(world, "/v1/chat/completions", body)
    assert answered.status_code == status
    assert named in answered.json()["error"]["message"]
    assert answered.json()["type"] == "error"
    assert len(world.up.sent) == before


def test_scopes(world: World) -> None:
    def status(path: str, model: str, *scopes: str) -> int:
        key = world.api.new_key(*scopes)
        body = {"model": model, "messages": QUESTION}
        return world.api.call("POST", path, key=key, json=body).status_code

    world.up.reply = lambda _: completion()
    assert status("/v1/chat/completions", "gpt-a", "serverless") == 200
    assert status("/v1/chat/completions", "gpt-a", "deployments:read", "loop:read", "loop:write") == 403
    assert status("/v1/messages", "claude-a", "deployments:read") == 403
    assert status("/v1/chat/completions", "loop-support", "serverless") == 403
    assert status("/v1/chat/completions", "loop-support", "deployments:read") == 404
    assert status("/v1/messages", "loop-support", "deployments:read") == 400
    with pytest.raises(openai.AuthenticationError):
        world.openai(api_key="wrong").chat.completions.create(model="gpt-a", messages=QUESTION)
    made = world.store.keys.create(scopes=["serverless"])
    world.openai(api_key=made.text).chat.completions.create(model="gpt-a", messages=QUESTION)
    world.store.keys.revoke(made.key.key_id)
    with pytest.raises(openai.AuthenticationError):
        world.openai(api_key=made.text).chat.completions.create(model="gpt-a", messages=QUESTION)


def test_a_key_of_several_workspaces_names_one(world: World) -> None:
    world.up.reply = lambda _: completion()
    key = world.api.new_key(workspaces=("default", "other"))
    body = {"model": "gpt-a", "messages": QUESTION}
    refused = world.api.call("POST", "/v1/chat/completions", key=key, json=body)
    assert (refused.status_code, refused.json()["field"]) == (400, "X-Workspace-ID")
    for workspace, status in (("default", 200), ("other", 200), ("third", 403)):
        headers = {"X-Workspace-ID": workspace, "X-Loop-Pipeline": "support"}
        answered = world.api.call("POST", "/v1/chat/completions", key=key, json=body, headers=headers)
        assert answered.status_code == status
        # The pipeline is one of `default`: elsewhere nobody has its tag.
        assert ("x-loop-sample-id" in answered.headers) == (workspace == "default")
    world.settle()


def test_a_repeated_idempotency_key_asks_the_model_again(world: World) -> None:
    answers = iter(("First.", "Second."))
    world.up.reply = lambda _: completion(next(answers))
    ask = world.api.client.inference.chat_completions
    said = [ask(QUESTION, model="gpt-a", idempotency_key="the-same-key") for _ in range(2)]
    assert [one["choices"][0]["message"]["content"] for one in said] == ["First.", "Second."]
    assert world.up.sent[-1].header("idempotency-key") == "the-same-key"


def test_models_of_upstreams_are_listed_for_every_client(world: World) -> None:
    def reply(sent: Any) -> Reply:
        if sent.header("x-api-key"):
            rows = [{"type": "model", "id": "claude-1", "display_name": "C", "created_at": "2026-01-01T00:00:00Z"}]
            return Reply(body=json.dumps({"data": rows, "has_more": False}).encode())
        rows = [{"id": name, "object": "model", "created": 5, "owned_by": "x"} for name in ("gpt-1", "other")]
        return Reply(body=json.dumps({"object": "list", "data": rows}).encode())

    world.up.reply = reply
    listed = world.api.client.inference.list_models()
    assert {"gpt-1", "gpt-exact"} <= {row["id"] for row in listed["data"]}
    assert "other" not in {row["id"] for row in listed["data"]}
    assert [one["source"] for one in listed["usf_unreachable_sources"]] == ["the upstream of down-*"]
    assert {"gpt-1", "gpt-exact"} <= {row.id for row in world.openai().models.list()}
    assert "gpt-1" in {row.id for row in world.anthropic().models.list()}
    assert world.api.client.inference.retrieve_model("gpt-1")["created"] == 5
    with pytest.raises(openai.NotFoundError):
        world.openai().models.retrieve("loop-support")
    narrow = world.api.new_key("deployments:read")
    assert world.api.call("GET", "/v1/models", key=narrow).json()["data"] == []
    assert world.api.call("GET", "/v1/models", key=world.api.new_key("loop:read")).status_code == 403


def test_when_a_key_was_used_is_noted(world: World) -> None:
    world.up.reply = lambda _: completion()
    made = world.store.keys.create(scopes=["serverless"])
    world.openai(api_key=made.text).chat.completions.create(model="gpt-a", messages=QUESTION)
    until(lambda: next(one for one in world.store.keys.list() if one.key_id == made.key.key_id).last_used_at)
