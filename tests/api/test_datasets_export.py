"""An export, imported into another installation as it is, gives the same samples, and streams whatever their number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_api import Api, serving

from loop_dagster.settings import Settings
from loop_dagster.store.intake import drain
from loop_dagster.store.open import open_store

CALL = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"price": 1.50, "n": 1e400}'}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "find", "parameters": {"type": "object", "properties": {"n": {"maximum": 1.10}}}},
    }
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str | None, **calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **calls}


ROWS: list[dict[str, Any]] = [
    {"messages": [user('Good\u2028\n"one" 😀'), said("Yes")], "label": True},
    {"messages": [user("Bad"), said("No")], "label": False},
    {"prompt": "Corrected", "completion": "Almost", "correction": "Exactly [redacted:email]"},
    {"prompt": "Gold", "completion": "Something", "ground_truth": said(None, tool_calls=[CALL])},
    {"prompt": "Gold without an answer", "ground_truth": "This"},
    {"prompt": "Nobody answered"},
    {
        "messages": [
            {"role": "system", "content": "Be brief"},
            user("Find it"),
            said(None, tool_calls=[CALL]),
            {"role": "tool", "content": "found", "tool_call_id": "call_1"},
            said("Here", tool_calls=[CALL]),
        ],
        "tools": TOOLS,
    },
    {"messages": [said("Hello"), user(""), said("?")]},
    {"prompt": "Chosen", "chosen": "This one", "rejected": "That one"},
]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Api]:
    with serving(open_store(Settings(home=tmp_path / "elsewhere"))) as running:
        yield running


def asked(messages: list[dict[str, Any]]) -> str:
    return json.dumps(messages, sort_keys=True)


def told(api: Api) -> dict[str, dict[str, Any]]:
    """What a file can say of each sample, by its messages: of all feedback the one that decides."""
    found = {}
    for trace in api.client.loop.list_traces(limit=200)["traces"]:
        whole = api.client.loop.get_trace(trace["id"])
        said = [signal for signal in whole["signals"] if signal["source"] == "human"][-1:]
        found[asked(trace["messages"])] = {
            **{name: trace[name] for name in ("completion", "tool_calls", "tools", "feedback")},
            "labels": sorted(map(json.dumps, trace["labels"])),
            "right": [(one["correction"], one["correction_tool_calls"]) for one in said],
        }
    return found


def test_an_export_comes_back_as_the_same_samples(api: Api, elsewhere: Api) -> None:
    loop = api.client.loop
    first = loop.import_rows("app", ROWS[:5], labels=["billing"], attributes={"team": "north"})
    loop.import_rows("app", ROWS[5:])
    ids = first["trace_ids"]
    loop.label(ids[0], labels=["invoices"], parent="money", attributes={"team": "south", "note": 'a: b, "c" é'})
    loop.unlabel(ids[1], "billing")
    loop.correct(ids[2], "Exactly so")  # the newest of a person decides
    loop.upvote(ids[4])  # about an answer that there is not
    loop.set_config("live", enabled=True, tags=["live"])
    loop.capture(
        deployment_id="live", model="m", messages=[{"role": "user", "content": "Captured"}], completion="By call",
        feedback={"verdict": "good"},
    )  # fmt: skip
    drain(api.store, holder="test")
    loop.gold(ids[3], "Waits in the inbox")
    everything = loop.create_dataset("Everything")

    sent = loop.export_dataset(everything["id"])
    assert (sent["stored_elsewhere"], len(sent["lines"])) == (0, len(ROWS) + 1)
    assert sent["jsonl"].endswith("}\n")
    assert [line.get("prompt") is not None for line in sent["lines"]].count(True) == 2
    assert sent["lines"][0]["label"] is True
    assert sent["lines"][2]["correction"] == "Exactly so"
    assert "1.50" in sent["jsonl"]  # a number keeps its spelling

    taken = elsewhere.client.loop.import_rows("back", sent["lines"])
    assert (taken["imported"], taken["refused"]) == (len(ROWS) + 1, 0)
    before, after = told(api), told(elsewhere)
    unanswered = before[asked([user("Gold without an answer")])]
    assert unanswered["feedback"] == "good"  # about no answer, so the file cannot say it
    unanswered |= {"feedback": None, "right": []}
    assert after == before
    again = elsewhere.client.loop.create_dataset("Everything")
    assert elsewhere.client.loop.export_dataset(again["id"])["lines"] == sent["lines"]


def test_the_oldest_come_first_and_a_limit_ends_it(api: Api) -> None:
    loop = api.client.loop
    made = loop.create_dataset("First ones", origin="imported")
    whole = loop.export_dataset(made["id"])["lines"]
    assert loop.export_dataset(made["id"], limit=2)["lines"] == whole[:2]
    answered = api.call("GET", f"/api/loop/datasets/{made['id']}/export?format=jsonl&limit=2")
    assert answered.headers["content-type"] == "application/x-ndjson; charset=utf-8"
    assert answered.headers["x-loop-stored-elsewhere"] == "0"
    assert answered.text.count("\n") == 2
    for limit in ("0", "-1", "x"):
        assert api.call("GET", f"/api/loop/datasets/{made['id']}/export?limit={limit}").status_code == 400


def test_a_deleted_sample_is_in_no_export(api: Api) -> None:
    loop = api.client.loop
    made = loop.create_dataset("Live one", tags=["live"])
    [trace] = loop.list_traces(dataset=made["id"])["traces"]
    assert len(loop.export_dataset(made["id"])["lines"]) == 1
    loop.delete_trace(trace["id"])
    assert loop.export_dataset(made["id"])["jsonl"] == ""
    assert loop.get_dataset(made["id"])["samples"] == 0
