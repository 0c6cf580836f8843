"""Readers of answers: the same result however the bytes were cut, and never an exception, whatever comes."""

from __future__ import annotations

import json
import zlib
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_upstream import chunk, chunks, completion, message, message_events, sse

from loop_dagster.api.gateway.answers import MOST_ANSWER, Said, reader_for
from loop_dagster.api.gateway.asked import BadMessageError, read_asked
from loop_dagster.api.gateway.upstreams import Shape, Target, Upstreams, to_caller, to_upstream
from loop_dagster.settings import Settings
from loop_dagster.settings import Upstream as Named

STREAM = "text/event-stream; charset=utf-8"
CALL = {"type": "tool_use", "id": "t", "name": "pay", "input": {"to": "Zoë\n", "sum": 2}}
TEXT = {"type": "text", "text": 'Ja: ä "quoted"\n\n'}


def read(shape: Shape, pieces: list[bytes], *, kind: str = STREAM, encoding: str = "", ended: bool = True) -> Any:
    reader = reader_for(shape, kind, encoding)
    for piece in pieces:
        reader.feed(piece)
    if ended:
        reader.end()
    return reader.result()


def cut(whole: bytes, places: list[int]) -> list[bytes]:
    at = sorted({0, len(whole), *(place % (len(whole) + 1) for place in places)})
    return [whole[start:end] for start, end in pairwise(at)]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@given(places=st.lists(st.integers(0, 10_000), max_size=40))
def test_cuts_change_nothing(line_end: bytes, places: list[int]) -> None:
    calls = [
        chunk({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "pay", "arguments": '{"to":"Zo'}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": 'ë"}'}}]}),
    ]
    openai = b"".join([b": hello\n\n", *sse(chunk({"content": "Jä "}), chunk({"content": "💡"}), *calls, done=False)])
    openai += b"".join(chunks())
    anthropic = b"".join([b": hello\n\n", *message_events(TEXT, CALL)])
    for shape, whole in (("openai", openai), ("anthropic", anthropic)):
        stream = whole.replace(b"\n", line_end)
        found = read(shape, cut(stream, places))
        assert isinstance(found, Said), (shape, found)
        assert found.message == read(shape, [whole]).message
    assert found.message["content"] == TEXT["text"]
    assert json.loads(found.message["tool_calls"][0]["function"]["arguments"]) == CALL["input"]


@given(places=st.lists(st.integers(0, 10_000), max_size=10), kind=st.sampled_from(["json", "stream"]))
def test_what_was_zipped_is_read(places: list[int], kind: str) -> None:
    whole = completion("Gut.").body if kind == "json" else b"".join(chunks("G", "ut."))
    pack = zlib.compressobj(wbits=31)
    zipped = pack.compress(whole) + pack.flush()
    content_type = "application/json" if kind == "json" else STREAM
    found = read("openai", cut(zipped, places), kind=content_type, encoding="gzip")
    assert found.message["content"] == "Gut."
    assert read("openai", [whole], kind=content_type, encoding="br") == "incomplete"
    assert read("openai", [b"no gzip"], kind=content_type, encoding="gzip") == "incomplete"


_OPENAI = ("choices", "delta", "content", "tool_calls", "function", "name", "arguments", "index", "finish_reason")
_ANTHROPIC = ("message", "type", "text", "id", "error", "model", "content_block", "partial_json", "input")
_KEYS = st.sampled_from([*_OPENAI, *_ANTHROPIC])
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(
    events=st.lists(_JSON | st.dictionaries(_KEYS, _JSON), max_size=5), shape=st.sampled_from(["openai", "anthropic"])
)
def test_nothing_that_an_upstream_says_raises(events: list[Any], shape: Shape) -> None:
    for kind in ("message_start", "content_block_start", "content_block_delta", "message_delta", None):
        dressed = [{**event, "type": kind} if kind and isinstance(event, dict) else event for event in events]
        found = read(shape, sse(*dressed))
        assert isinstance(found, Said) or found in ("incomplete", "too_large")
        for event in dressed:
            whole = read(shape, [orjson.dumps(event)], kind="application/json")
            assert isinstance(whole, Said) or whole in ("incomplete", "too_large")


@given(
    raw=st.binary(max_size=60), shape=st.sampled_from(["openai", "anthropic"]), kind=st.sampled_from([STREAM, "", "x"])
)
def test_no_bytes_raise(raw: bytes, shape: Shape, kind: str) -> None:
    found = read(shape, [raw, b"\n", b"data: " + raw + b"\n\n"], kind=kind)
    assert found in ("incomplete", "too_large")


def test_an_answer_that_is_not_over_is_none() -> None:
    assert read("openai", [completion().body], kind="application/json", ended=False) == "incomplete"
    assert read("openai", chunks("Half", finish=None, done=False), ended=True) == "incomplete"
    assert isinstance(read("openai", chunks("Whole", done=False), ended=False), Said)  # the finish says it
    assert isinstance(read("openai", chunks("Whole", finish=None), ended=False), Said)  # [DONE] does
    reader = reader_for("openai", STREAM, "")
    for piece in chunks("Broken off after its last word", done=False):
        reader.feed(piece)
    reader.cut()
    assert reader.result() == "incomplete"  # the caller met an error
    assert read("anthropic", message_events(TEXT, stopped=False)) == "incomplete"
    error = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n'
    assert read("anthropic", [*message_events(TEXT), error]) == "incomplete"


def test_the_limit_is_of_the_answer_and_not_of_what_is_around_it() -> None:
    most = "a" * (MOST_ANSWER - 60)
    around = json.loads(completion(most).body) | {"logprobs": "x" * 2_000_000}
    assert isinstance(read("openai", [json.dumps(around).encode()], kind="application/json"), Said)
    assert read("openai", [completion(most + "a" * 60).body], kind="application/json") == "too_large"
    assert read("openai", chunks(*["a" * 1_000] * 1_100)) == "too_large"
    call = {"name": "f", "arguments": json.dumps({"x": "a" * MOST_ANSWER})}
    assert read("openai", sse(chunk({"tool_calls": [{"index": 0, "function": call}]}, "tool_calls"))) == "too_large"
    assert read("openai", [b" " * 17_000_000], kind="application/json") == "too_large"
    bomb = zlib.compressobj(wbits=31)
    packed = bomb.compress(b" " * 40_000_000) + bomb.flush()
    assert read("openai", [packed], kind="application/json", encoding="gzip") == "too_large"
    assert read("openai", [packed], encoding="gzip") == "incomplete"


def test_servers_that_do_it_a_little_differently() -> None:
    unnumbered = [
        chunk({"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]}),
        chunk({"tool_calls": [{"function": {"arguments": "}"}}]}),
        chunk({"tool_calls": [{"id": "b", "function": {"name": "g", "arguments": "{}"}}]}, "tool_calls"),
    ]
    calls = read("openai", sse(*unnumbered)).message["tool_calls"]
    assert [(one["id"], one["function"]["name"]) for one in calls] == [("a", "f"), ("b", "g")]
    parts = chunk({"content": [{"type": "text", "text": "Part"}, {"type": "thinking"}]}, "stop")
    assert read("openai", sse(parts)).message["content"] == "Part"
    old = chunk({"function_call": {"name": "f", "arguments": "{}"}}, "function_call")
    assert read("openai", sse(old)).message["tool_calls"][0]["function"]["name"] == "f"
    refused = chunk({"refusal": "No."}, "stop")
    assert read("openai", sse(refused)).message["content"] == "No."
    no_blank_line = b"".join(chunks("Whole"))[:-2]
    assert read("openai", [no_blank_line]).message["content"] == "Whole"
    legacy = json.loads(completion(None).body)
    legacy["choices"][0]["message"]["function_call"] = {"name": "f", "arguments": "{}"}
    whole = read("openai", [json.dumps(legacy).encode()], kind="application/json")
    assert whole.message["tool_calls"][0]["function"]["name"] == "f"
    thinking = message({"type": "thinking", "thinking": "…"}, TEXT)
    assert read("anthropic", [thinking.body], kind="application/json").message["content"] == TEXT["text"]


def test_numbers_keep_their_spelling() -> None:
    raw = message(CALL).body.replace(b'"sum": 2', b'"sum": 2.50')
    [call] = read("anthropic", [raw], kind="application/json").message["tool_calls"]
    assert '"sum":2.50' in call["function"]["arguments"]
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"function":{"maximum":1e2}}]}'
    asked = read_asked(body, "openai")
    assert asked.tools == [{"function": {"maximum": "1e2"}}]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": "no"},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
        {"messages": [7]},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"input_schema": {}}, 7], "system": {"a": 1}},
    ],
)
@pytest.mark.parametrize("shape", ["openai", "anthropic"])
def test_what_no_sample_can_hold_is_refused(body: dict[str, Any], shape: Shape) -> None:
    if shape == "openai" and "tools" in body:
        body = {**body, "messages": [{}]}
    with pytest.raises(BadMessageError):
        read_asked(json.dumps(body).encode(), shape)


def upstreams(**named: Named) -> Upstreams:
    return Upstreams(Settings(upstreams={name.replace("_", "*"): one for name, one in named.items()}))


def test_the_exact_name_then_the_first_pattern_answers() -> None:
    one, two = (Named(url=f"http://127.0.0.1:{port}") for port in (1, 2))
    found = upstreams(gpt_=one, gpt=two, _=two)
    assert found.of("gpt-5").base == one.url
    assert found.of("gpt").base == two.url
    assert found.of("GPT-5").base == two.url
    assert upstreams(gpt=one).of("gpt-5") is None
    assert found.names() == ["gpt"]
    assert len(found.servers()) == 2
    assert "127.0.0.1" not in repr(found.of("gpt"))


@pytest.mark.parametrize(
    "named",
    [
        {"a": {"url": "api.openai.com/v1", "api_key": "sk-hidden"}},
        {"a": {"url": "https://user:sk-hidden@api.example.com"}},
        {"a": {"url": "https://api.example.com?key=sk-hidden"}},
        {"a": {"url": "https://x", "kind": "sk-hidden"}},
        {"a": {"url": "https://x", "key": "sk-hidden"}},
        {"loop-a": {"url": "https://x", "api_key": "sk-hidden"}},
        {" ": {"url": "https://x", "api_key": "sk-hidden"}},
        {"a": "sk-hidden"},
    ],
)
def test_upstreams_that_cannot_be_are_refused_without_their_key(named: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="upstreams") as refused:
        Settings(upstreams=named)
    assert "sk-hidden" not in str(refused.value)
    monkeypatch.setenv("LOOP_UPSTREAMS", json.dumps(named)[:-1])
    with pytest.raises(ValueError, match="upstreams") as unreadable:
        Settings()
    assert "sk-hidden" not in str(unreadable.value)


def test_headers_of_one_connection_stay_there() -> None:
    target = Target("http://h/v1", "sk-k", "openai", "x")
    given = [
        (b"connection", b"close, X-Mine"),
        (b"x-mine", b"1"),
        (b"te", b"trailers"),
        (b"upgrade", b"h2c"),
        (b"content-type", b"application/json"),
        (b"accept", b"*/*"),
        (b"proxy-authorization", b"secret"),
        (b"accept-encoding", b"br, GZIP"),
    ]
    assert dict(to_upstream(given, target, "openai")) == {
        b"content-type": b"application/json",
        b"accept": b"*/*",
        b"accept-encoding": b"gzip",
        b"authorization": b"Bearer sk-k",
    }
    back = [
        (b"Transfer-Encoding", b"chunked"),
        (b"X-Loop-Version", b"v1"),
        (b"Content-Type", b"a"),
        (b"Keep-Alive", b"5"),
    ]
    assert to_caller(back, live=False) == [(b"content-type", b"a")]
    assert to_caller(back, live=True) == [(b"x-loop-version", b"v1"), (b"content-type", b"a")]
