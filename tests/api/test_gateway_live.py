"""`loop-<tag>` through the gateway: a real serving engine with tiny models, from nothing live to the second version."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tiny_adapter
from bios.loop_chat import LoopNoVersionError
from gateway_world import QUESTION, World, gateway, until

from loop_dagster.models.base import resolve
from loop_dagster.rules.states import FLOW
from loop_dagster.settings import Settings
from loop_dagster.store.open import open_store

pytestmark = pytest.mark.model

NOW = datetime(2026, 12, 1, 8, tzinfo=UTC)
MODEL = "loop-desk"
TAGGED = {"X-Loop-Pipeline": "desk"}


@dataclass
class Desk:
    """A gateway, a pipeline `Desk` on the tiny model, and two adapters to make live."""

    world: World
    base_digest: str
    adapters: list[str]

    @property
    def engine(self) -> str:
        return f"http://127.0.0.1:{self.world.store.settings.serve_port}"

    def promote(self, adapter: str) -> None:
        store = self.world.store
        live = store.versions.live("desk")
        attempt = store.attempts.open_attempt(
            store.pipelines.get("desk").pipeline_id, trigger="data", frozen={}, now=NOW
        )
        assert attempt is not None
        for state in FLOW[1 : FLOW.index("promoting") + 1]:
            fields = {"adapter_digest": adapter} if state == "checkpoint_ready" else {}
            store.attempts.move(attempt.run_id, state, "On.", now=NOW, **fields)
        store.versions.promote(
            attempt.run_id,
            base_digest=self.base_digest,
            adapters=[adapter],
            expect_live=live.version_no if live else None,
            now=NOW,
        )

    def ask(self, **body: Any) -> httpx.Response:
        whole = {"model": MODEL, "messages": QUESTION, **body}
        return self.world.api.call("POST", "/v1/chat/completions", json=whole, headers=TAGGED, timeout=120)

    @contextmanager
    def serving(self) -> Iterator[None]:
        settings = self.world.store.settings
        log = settings.root / "serving.log"
        environ = {**os.environ, "LOOP_HOME": str(settings.root), "LOOP_SERVE_PORT": str(settings.serve_port)}
        environ |= {"LOOP_MAX_ANSWER_TOKENS": "16", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
        command = [sys.executable, "-m", "loop_dagster.models.serve"]
        with log.open("ab") as file:
            child = subprocess.Popen(command, env=environ, stdout=file, stderr=file)
        try:

            def answers() -> bool:
                assert child.poll() is None, log.read_text()
                try:
                    return httpx.get(f"{self.engine}/healthz", timeout=2, trust_env=False).status_code == 200
                except httpx.TransportError:
                    return False

            until(answers, within=90)
            yield
        finally:
            child.kill()
            child.wait()


@pytest.fixture(scope="module")
def desk(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with gateway(tmp_path_factory.mktemp("desk-home"), serve_port=port, serve_host="0.0.0.0") as world:
        base = resolve(str(tiny_model), world.store.settings.models_dir)
        world.store.pipelines.create("Desk", model_id=str(tiny_model), model_digest=base.digest, now=NOW)
        digests = []
        for seed in (1, 2):
            made = tiny_adapter.adapter(tiny_model, tmp_path_factory.mktemp("made"), seed=seed)
            digests.append(world.store.artifacts.keep(made, still_mine=lambda: None))
        yield Desk(world, base.digest, digests)


def test_from_nothing_live_to_the_second_version(desk: Desk) -> None:
    world = desk.world
    client = world.openai(timeout=120)

    # Nothing is live: 404, whether the engine runs or not.
    with pytest.raises(LoopNoVersionError):
        world.api.client.loop.chat("desk", QUESTION)
    assert desk.ask(model="loop-nobody").status_code == 404

    # Live, and the engine is stopped: 503, never 404.
    desk.promote(desk.adapters[0])
    stopped = desk.ask()
    assert (stopped.status_code, stopped.json()["error"]["code"]) == (503, "LIVE_UNAVAILABLE")
    assert "retry-after" in stopped.headers
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model=MODEL, messages=QUESTION)
    assert MODEL in {row.id for row in client.models.list()}

    with desk.serving():
        answered = desk.ask(temperature=0)
        assert answered.status_code == 200, answered.text
        assert answered.headers["x-loop-version"] == "v1"
        direct = httpx.post(
            f"{desk.engine}/v1/chat/completions",
            json={"model": MODEL, "messages": QUESTION, "temperature": 0},
            timeout=120,
            trust_env=False,
        ).json()
        whole = answered.json()
        for name in ("object", "model", "system_fingerprint", "choices", "usage"):
            assert whole[name] == direct[name]
        said = whole["choices"][0]["message"]["content"]
        sample = answered.headers["x-loop-sample-id"]
        trace = world.trace(sample)
        assert (trace["deployment_id"], trace["model"], trace["completion"]) == (MODEL, MODEL, said)
        assert [one["label"] for one in trace["labels"]] == ["desk"]

        # A stream, as the public client reads it: role, text, finish, usage, end.
        stream = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers=TAGGED,
        )
        streamed = stream.response.headers["x-loop-sample-id"]
        events = list(stream)
        assert events[0].choices[0].delta.role == "assistant"
        assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == said
        assert [event.choices[0].finish_reason for event in events if event.choices][-1] in ("stop", "length")
        assert events[-1].usage is not None
        assert events[-1].usage.total_tokens == whole["usage"]["total_tokens"]
        assert world.trace(streamed)["completion"] == said

        # Limits, stops and offered tools reach the model; what it cannot do is refused in every client's form.
        short = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1, temperature=0)
        assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 1)
        cut = client.chat.completions.create(model=MODEL, messages=QUESTION, stop=[said[:1]], temperature=0)
        assert (cut.choices[0].message.content or "") == ""
        tool = {"type": "function", "function": {"name": "pay", "parameters": {"type": "object", "properties": {}}}}
        with_tools = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[tool], temperature=0)
        assert with_tools.usage.prompt_tokens >= whole["usage"]["prompt_tokens"]
        with pytest.raises(openai.BadRequestError, match="n cannot be asked"):
            client.chat.completions.create(model=MODEL, messages=QUESTION, n=2)
        assert world.api.client.loop.chat("desk", QUESTION, temperature=0).answer == said

        # The next version answers without any restart; the source and its setting stay.
        world.api.client.loop.set_config(MODEL, True, tags=["desk"])
        desk.promote(desk.adapters[1])
        second = world.api.call(
            "POST",
            "/v1/chat/completions",
            json={"model": MODEL, "messages": QUESTION, "temperature": 0},
            timeout=120,
        )
        assert second.json()["system_fingerprint"] == "v2"
        assert world.trace(second.headers["x-loop-sample-id"])["deployment_id"] == MODEL

        # Another workspace has no engine here, and never another's version.
        other = open_store(Settings(home=world.store.settings.home, workspace="other"))
        key = world.api.new_key(workspaces=("other",))
        body = {"model": MODEL, "messages": QUESTION}
        assert world.api.call("POST", "/v1/chat/completions", key=key, json=body).status_code == 404
        other.registry.dispose()

    assert desk.ask().status_code == 503
