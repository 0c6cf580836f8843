"""The serving process: a real one over a real registry, artifacts and tiny models, followed through its life."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
import tiny_adapter
from hypothesis import given, settings
from hypothesis import strategies as st

from loop_dagster.errors import BadRequest, LoopError, NotFound
from loop_dagster.models import serve
from loop_dagster.models.base import resolve
from loop_dagster.models.engine import Request, open_engine
from loop_dagster.models.template import Template
from loop_dagster.models.wire_text import Cutter, request_of
from loop_dagster.rules.states import FLOW
from loop_dagster.settings import Settings
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.versions import Version

NOW = datetime(2026, 12, 1, 8, tzinfo=UTC)
QUESTIONS = [tiny.conversation(fact, at)[0][0]["content"] for at, fact in enumerate(tiny.facts(6))]
#: Keeps the probe from bfloat16, in which a batch may differ from one call alone.
FLOAT32 = {"ONEDNN_MAX_CPU_ISA": "AVX2"}


@dataclass
class Place:
    """An installation with three adapters kept, and what base and adapters answer to QUESTIONS."""

    store: Store
    settings: Settings
    base_digest: str
    adapters: list[str]
    says: dict[str | None, list[str]]

    def promote(self, tag: str, *adapters: str) -> Version:
        pipeline = self.store.pipelines.get(tag)
        live = self.store.versions.live(tag)
        attempt = self.store.attempts.open_attempt(pipeline.pipeline_id, trigger="data", frozen={}, now=NOW)
        assert attempt is not None
        for state in FLOW[1 : FLOW.index("promoting") + 1]:
            fields = {"adapter_digest": adapters[-1]} if state == "checkpoint_ready" else {}
            self.store.attempts.move(attempt.run_id, state, "On.", now=NOW, **fields)
        return self.store.versions.promote(
            attempt.run_id,
            base_digest=self.base_digest,
            adapters=adapters,
            expect_live=live.version_no if live else None,
            now=NOW,
        )


@pytest.fixture(scope="module")
def place(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    os.environ.update(FLOAT32)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    installation = Settings(home=tmp_path_factory.mktemp("home"), serve_port=port, max_answer_tokens=24)
    store = open_store(installation)
    base = resolve(str(tiny_model), installation.models_dir)
    for name in ("Support", "Sales"):
        store.pipelines.create(name, model_id=str(tiny_model), model_digest=base.digest, now=NOW)
    engine = open_engine(base=base.path, base_digest=base.digest, dtype="float32")
    digests = []
    for seed in (1, 2, 3):
        made = tiny_adapter.adapter(tiny_model, tmp_path_factory.mktemp("made"), seed=seed)
        digests.append(store.artifacts.keep(made, still_mine=lambda: None))
        engine.load_adapter(digests[-1], store.artifacts.open(digests[-1]), base_digest=base.digest)
    asked = [
        Request(key=question, messages=[{"role": "user", "content": question}], max_new_tokens=24)
        for question in QUESTIONS
    ]
    says: dict[str | None, list[str]] = {}
    for adapter in (None, *digests):
        answers = engine.answer(asked, adapters=[adapter] if adapter else [])
        says[adapter] = [answer.message["content"] if answer.message else "" for answer in answers]
    engine.close()
    yield Place(store, installation, base.digest, digests, says)
    for name in FLOAT32:
        del os.environ[name]


@pytest.fixture(scope="module")
def process(place: Place) -> Iterator[subprocess.Popen[bytes]]:
    home = place.settings.root
    environ = {**os.environ, "LOOP_HOME": str(home), "LOOP_SERVE_PORT": str(place.settings.serve_port)}
    with (home / "serving.log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "loop_dagster.models.serve"],
            env={**environ, "LOOP_MAX_ANSWER_TOKENS": "24"},
            stdout=log,
            stderr=log,
        )
    try:
        _until(lambda: child.poll() is not None or serve._serving(place.settings) is not None)
        assert child.poll() is None, (home / "serving.log").read_text()
        yield child
    finally:
        child.kill()
        child.wait()


@pytest.fixture(scope="module")
def client(place: Place, process: subprocess.Popen[bytes]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{place.settings.serve_port}", timeout=60, trust_env=False) as client:
        yield client


def _until(true: Callable[[], bool], *, within: float = 60) -> None:
    end = time.monotonic() + within
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


def _ask(client: httpx.Client, question: str, *, model: str = "loop-support", **more: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": question}], **more}
    return client.post("/v1/chat/completions", json=body)


def _text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


def _stream(client: httpx.Client, question: str, **more: Any) -> tuple[list[dict[str, Any]], str]:
    """(chunks, their text)."""
    response = _ask(client, question, stream=True, **more)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    return chunks, "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])


@pytest.mark.model
class TestLife:
    """In the order of a version's life; each test goes on where the one before ended."""

    def test_a_name_with_nothing_live_is_404(self, place: Place, client: httpx.Client) -> None:
        for model in ("loop-support", "loop-unheard-of", "gpt-4o"):
            response = _ask(client, "Hello?", model=model)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "NOT_FOUND")
        assert client.get("/v1/models").json() == {"object": "list", "data": []}
        with pytest.raises(LoopError, match="loop-support") as told:
            serve.ask("support", "Hello?", place.settings)
        assert (told.value.code, told.value.exit_code) == ("NOT_FOUND", NotFound.exit_code)

    def test_a_live_version_answers_as_the_engine_does(self, place: Place, client: httpx.Client) -> None:
        first = place.adapters[0]
        place.promote("support", first)
        response = _ask(client, QUESTIONS[0])
        assert _text(response) == place.says[first][0] != place.says[None][0]
        assert response.headers["x-loop-version"] == "v1"
        whole = response.json()
        assert (whole["object"], whole["model"]) == ("chat.completion", "loop-support")
        assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + whole["usage"]["completion_tokens"]
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["loop-support"]
        asked = serve.ask("support", QUESTIONS[1], place.settings)
        assert (asked.text, asked.version_no) == (place.says[first][1], 1)
        assert f"process at 127.0.0.1:{place.settings.serve_port}" in asked.served_by

    def test_a_stream_says_the_same(self, place: Place, client: httpx.Client) -> None:
        for question, expected in zip(QUESTIONS, place.says[place.adapters[0]], strict=True):
            chunks, text = _stream(client, question, stream_options={"include_usage": True})
            assert text == expected
            assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
            assert chunks[-1]["usage"]["completion_tokens"] > 0 and chunks[-1]["choices"] == []
            assert chunks[-2]["choices"][0]["finish_reason"] in ("stop", "length")
        stop = place.says[place.adapters[0]][0][3:6]
        cut = place.says[place.adapters[0]][0].split(stop)[0]
        assert _text(_ask(client, QUESTIONS[0], stop=stop)) == cut
        assert _stream(client, QUESTIONS[0], stop=[stop])[1].rstrip() == cut.rstrip()

    def test_two_tags_share_one_base(self, place: Place, client: httpx.Client) -> None:
        second = place.adapters[1]
        place.promote("sales", second)
        answers: dict[tuple[str, int], str] = {}

        def ask(model: str, at: int) -> None:
            answers[model, at] = _text(_ask(client, QUESTIONS[at], model=model))

        threads = [
            threading.Thread(target=ask, args=(model, at))
            for at in range(len(QUESTIONS))
            for model in ("loop-support", "loop-sales")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for at in range(len(QUESTIONS)):
            assert answers["loop-support", at] == place.says[place.adapters[0]][at]
            assert answers["loop-sales", at] == place.says[second][at]
        loaded = client.get("/healthz").json()["loaded"]
        assert loaded == {place.base_digest: sorted(place.adapters[:2])}

    def test_a_promotion_is_followed_and_the_old_version_let_go(self, place: Place, client: httpx.Client) -> None:
        first, _, third = place.adapters
        assert serve.prepare(place.settings, base_digest=place.base_digest, adapters=[third])
        assert third in client.get("/healthz").json()["loaded"][place.base_digest]
        assert _text(_ask(client, QUESTIONS[0])) == place.says[first][0]
        seen: list[str] = []
        ended = threading.Event()

        def keep_asking() -> None:
            while not ended.is_set():
                seen.append(_text(_ask(client, QUESTIONS[0])))

        threads = [threading.Thread(target=keep_asking) for _ in range(3)]
        for thread in threads:
            thread.start()
        _until(lambda: len(seen) > 3)
        place.promote("support", third)
        assert _text(_ask(client, QUESTIONS[0])) == place.says[third][0]
        _until(lambda: first not in client.get("/healthz").json()["loaded"][place.base_digest])
        ended.set()
        for thread in threads:
            thread.join()
        assert set(seen) == {place.says[first][0], place.says[third][0]}
        assert seen[-1] == place.says[third][0]

    def test_adapters_of_a_line_answer_together(self, place: Place, client: httpx.Client) -> None:
        _, second, third = place.adapters
        place.promote("support", third, second)
        alone = (place.says[second][0], place.says[third][0], place.says[None][0])
        assert _text(_ask(client, QUESTIONS[0])) not in alone
        place.promote("support", third)

    def test_a_version_that_cannot_load_is_503_with_the_reason(self, place: Place, client: httpx.Client) -> None:
        missing = "f" * 64
        with pytest.raises(LoopError, match="No artifact") as told:
            serve.prepare(place.settings, base_digest=place.base_digest, adapters=[missing])
        assert told.value.code == "LIVE_UNAVAILABLE"
        place.promote("sales", missing)
        for more in ({}, {"stream": True}):
            response = _ask(client, QUESTIONS[0], model="loop-sales", **more)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "LIVE_UNAVAILABLE")
            assert "No artifact" in response.json()["error"]["message"]
        assert _text(_ask(client, QUESTIONS[0])) == place.says[place.adapters[2]][0]

    def test_what_a_call_may_ask(self, client: httpx.Client) -> None:
        two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
        for body in ({"n": 2}, {"messages": []}, {"messages": two}, {"max_tokens": 0}, {"temperature": "hot"}):
            response = client.post("/v1/chat/completions", json={"model": "loop-support", **_BODY, **body})
            assert (response.status_code, response.json()["error"]["code"]) == (400, "BAD_REQUEST"), body
        long = _ask(client, "What is the city of banek? " * 200)
        assert long.status_code == 400 and "tokens" in long.json()["error"]["message"]
        plain = client.post("/internal/prepare", content=b"{}", headers={"content-type": "text/plain"})
        assert plain.status_code == 400
        usage = _ask(client, QUESTIONS[0], max_tokens=3).json()
        assert usage["usage"]["completion_tokens"] == 3 and usage["choices"][0]["finish_reason"] == "length"

    def test_a_term_signal_ends_it_in_order_and_ask_goes_on_alone(
        self, place: Place, client: httpx.Client, process: subprocess.Popen[bytes]
    ) -> None:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert not serve._note(place.settings).exists()
        assert not serve.prepare(place.settings, base_digest=place.base_digest, adapters=[])
        third = place.adapters[2]
        asked = serve.ask("support", QUESTIONS[2], place.settings)
        assert asked.text == place.says[third][2] and "loaded here" in asked.served_by
        both = serve.ask_both("support", QUESTIONS[:3], place.settings)
        assert both == list(zip(place.says[None][:3], place.says[third][:3], strict=True))
        with pytest.raises(NotFound):
            serve.ask("unheard-of", "Hello?", place.settings)

    def test_a_note_of_a_killed_process_is_no_server(self, place: Place) -> None:
        with socket.socket() as other:  # listens, but answers nothing of ours
            other.bind(("127.0.0.1", 0))
            note = {"pid": 1, "address": f"127.0.0.1:{other.getsockname()[1]}"}
            serve._note(place.settings).write_text(json.dumps(note))
            assert serve._serving(place.settings) is None
        serve._note(place.settings).write_text("{torn")
        assert serve._serving(place.settings) is None


_BODY = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_p": 1.5}, "top_p"),
        ({"temperature": float("nan")}, "temperature"),
        ({"seed": "x"}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "role"),
        ({"tools": {}}, "tools"),
    ],
)
def test_a_field_that_cannot_be_followed_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest, match=field):
        request_of({**_BODY, **body}, most_tokens=9)


def test_what_a_body_asks_for() -> None:
    plain, stops = request_of(_BODY, most_tokens=9)
    assert (plain.max_new_tokens, plain.temperature, plain.top_p, plain.seed, stops) == (9, 0.0, 1.0, None, ())
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    asked, stops = request_of(
        {"messages": parts, "max_tokens": 5, "temperature": 1, "stop": "x", "n": 1, "user": "u"}, most_tokens=9
    )
    assert asked.messages == [{"role": "user", "content": "ab"}]
    assert (asked.max_new_tokens, asked.temperature, stops) == (5, 1.0, ("x",))


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> Template:
    return Template.load(tiny_model)


_PIECES = st.sampled_from(
    [
        *(
            "a",
            " ",
            "\n",
            "The city of banek is Oslo.",
            "é",
            "日本",
            "🙂",
            "👩\u200d🚀",
            "<",
            "<tool",
            "</tool_call>",
            "STO",
            "STOP",
        ),
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
        "<tool_call>not json</tool_call>",
    ]
)


@given(pieces=st.lists(_PIECES, max_size=8), stops=st.sampled_from([(), ("STOP",), ("is Oslo", "\n\n")]))
@settings(max_examples=150, deadline=None)
def test_a_stream_gives_out_exactly_the_content(template: Template, pieces: list[str], stops: tuple[str, ...]) -> None:
    tokens = template.tokenizer("".join(pieces), add_special_tokens=False)["input_ids"]
    whole = template.read_answer(template.tokenizer.decode(tokens, skip_special_tokens=True))["content"] or ""
    ends = [at for stop in stops if (at := whole.find(stop)) >= 0]
    content = whole[: min(ends, default=len(whole))]
    cutter = Cutter(template, stops)
    given_out = ""
    for token in tokens:
        given_out += cutter.push(token)
        assert whole.startswith(given_out)
    assert (given_out + cutter.rest(content)).rstrip() == content.rstrip()
