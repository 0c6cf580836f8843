"""What comes in through the API: sources switched on and off, rows imported in every shape, and what the counts say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bios._client import ApiError
from running_api import Api
from wire_types import check

from loop_dagster.store.intake import lake_lease
from loop_dagster.tables import FEEDBACK

CASES = Path(__file__).parent.parent / "cases"
SECRET = "anna.schmidt@example.com"


def chat(question: str, answer: str = "On its way.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_a_source_is_off_until_somebody_switches_it_on(api: Api) -> None:
    loop = api.client.loop
    assert loop.get_config("web chat")["enabled"] is False
    saved = loop.set_config("web chat", True, retention_days=90, sample_rate=0.5, tags=["Support", "web"])
    assert saved["updated_at"].endswith("Z")
    kept = {name: saved[name] for name in saved if name != "updated_at"}
    assert kept == {
        "deployment_id": "web chat",
        "enabled": True,
        "retention_days": 90,
        "sample_rate": 0.5,
        "tags": ["support", "web"],
    }
    assert loop.set_config("web chat", False)["tags"] == ["support", "web"]
    assert loop.set_config("web chat", True, tags=[])["tags"] == []
    assert loop.get_config("web chat")["retention_days"] == 90
    assert [one["deployment_id"] for one in loop.list_configs()] == ["web chat"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"enabled": True, "retention_days": 0}, "retention_days"),
        ({"enabled": True, "retention_days": 3_651}, "retention_days"),
        ({"enabled": True, "sample_rate": 1.5}, "sample_rate"),
        ({"enabled": True, "tags": ["a b"]}, "Tag"),
        ({"enabled": True, "colour": 1}, "colour"),
        ({"retention_days": 5}, "enabled"),
        ({"enabled": "yes"}, "enabled"),
    ],
)
def test_what_a_source_cannot_be_is_refused(api: Api, body: dict[str, Any], named: str) -> None:
    answered = api.call("PUT", "/api/loop/configs/refused", json=body)
    assert (answered.status_code, answered.json()["error"]["code"]) == (400, "BAD_REQUEST")
    assert named in answered.json()["error"]["message"]
    assert api.client.loop.get_config("refused")["updated_at"] is None


def test_rows_of_every_shape_come_in_and_the_counts_add_up(api: Api, model: dict[str, str]) -> None:
    loop = api.client.loop
    made = loop.create_pipeline(name="Imports", model=model)["pipeline"]
    before = loop.stats()
    check(before, "LoopStats")
    rows = [
        chat("Where is parcel 1?"),
        {"prompt": "Where is parcel 2?", "completion": "Here.", "label": True},
        {"prompt": "Where is parcel 3?", "completion": "There.", "label": False},
        {**chat("Where is parcel 4?"), "correction": "It is lost."},
        {"prompt": "Where is parcel 5?", "chosen": "Near.", "rejected": "Far."},
        {"prompt": "Where is parcel 6?"},
        {"text": "Prose."},
        {"messages": "no list"},
        7,
    ]
    done = loop.import_into_pipeline(made["rule_id"], rows, import_id="first", labels=["extra"])
    assert (done["imported"], done["refused"], done["reviewed"]) == (6, 3, 4)
    assert (done["needs_review"], done["waiting_for_answer"], done["source"]) == (1, 1, "imports")
    assert len(done["trace_ids"]) == 6
    for reason in done["refused_reasons"]:
        check(reason, "LoopImportRefusal")
    again = loop.import_into_pipeline(made["rule_id"], rows, import_id="first", labels=["extra"])
    assert (again["imported"], again["already_present"], again["reviewed"]) == (0, 6, 0)
    after = loop.stats()
    check(after, "LoopStats")
    assert after["traces"] - before["traces"] == 6
    assert after["feedback"] == {"good": 1, "corrected": 2, "bad": 1, "unreviewed": 2}
    assert after["by_verdict"] == {"accepted": 1, "rejected": 1, "edited": 2, "gold": 0, "scored": 0}
    assert (after["ready"], after["by_source"], after["signals"]) == ({"sft": 3}, {"human": 4}, 4)
    pipeline = loop.get_pipeline(made["rule_id"])
    check(pipeline, "Pipeline")
    assert (pipeline["samples_total"], pipeline["samples_recent"]) == (6, 6)
    [listed] = loop.list_pipelines(q="imports")["pipelines"]
    check(listed, "Pipeline")
    assert (listed["samples_total"], listed["samples_recent"]) == (6, 6)


def test_an_import_is_retried_by_its_row_ids_and_pages_by_offset(api: Api) -> None:
    loop = api.client.loop
    rows = [chat(f"Question {number}?") for number in range(4)]
    ids = [f"row-{number}" for number in range(4)]
    assert loop.import_rows("by id", rows[:3], row_ids=ids[:3])["imported"] == 3
    moved = loop.import_rows("by id", list(reversed(rows)), row_ids=list(reversed(ids)))
    assert (moved["imported"], moved["already_present"]) == (1, 3)
    for offset in (0, 2):
        loop.import_rows("by page", rows[offset : offset + 2], import_id="pages", row_offset=offset)
    whole = loop.import_rows("by page", rows, import_id="pages")
    assert (whole["imported"], whole["already_present"]) == (0, 4)


def test_a_number_keeps_its_spelling(api: Api) -> None:
    call = '{"role":"assistant","content":null,"tool_calls":[{"function":{"name":"pay","arguments":{"sum":%s}}}]}'
    row = '{"messages":[{"role":"user","content":"Pay"},' + call + "]}"

    def send(number: str) -> dict[str, Any]:
        body = '{"source":"spelled","import_id":"one","rows":[' + row % number + "]}"
        found: dict[str, Any] = api.call("POST", "/api/loop/import", content=body.encode()).json()
        return found

    assert send("1e2")["imported"] == 1
    assert send("1e2")["already_present"] == 1
    assert send("100.0")["imported"] == 1


def test_secrets_are_gone_before_anything_is_stored(api: Api) -> None:
    rows = [json.loads(line) for line in (CASES / "secrets.jsonl").read_text(encoding="utf-8").splitlines() if line]
    rows.append(chat(f"My address is {SECRET}", f"Noted, {SECRET}"))
    done = api.client.loop.import_rows("secrets", rows)
    assert done["redacted"]["email"] >= 2
    assert SECRET not in json.dumps(done)
    whole = api.store.samples.whole().samples.collect()
    assert SECRET not in whole.write_json()


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"rows": []}, "source"),
        ({"source": "x"}, "rows"),
        ({"source": "x", "rows": {}}, "rows"),
        ({"source": "x", "rows": [chat("Q")], "surprise": 1}, "surprise"),
        ({"source": "x", "rows": [chat("Q")], "row_ids": ["a", "b"]}, "row_ids"),
        ({"source": "x", "rows": [chat("Q")] * 2, "row_ids": ["a", "a"]}, "share an id"),
        ({"source": "x", "rows": [chat("Q")], "row_offset": -1}, "row_offset"),
        ({"source": "x", "rows": [chat("Q")], "import_id": "ü"}, "import_id"),
        ({"source": "x", "rows": [chat("Q")], "labels": ["a b"]}, "Tag"),
        ({"source": "x", "rows": [chat("Q")], "attributes": {"a": ""}}, "attribute"),
        ({"source": "x", "rows": [chat("Q")], "default_feedback": "gold"}, "default_feedback"),
        ({"source": " ", "rows": [chat("Q")]}, "source"),
        ({"source": "x", "rows": [chat("Q")] * 5_001}, "5,000"),
    ],
)
def test_what_no_import_can_be_is_refused_before_anything_is_stored(api: Api, body: dict[str, Any], named: str) -> None:
    before = api.store.samples.count()
    answered = api.call("POST", "/api/loop/import", json=body)
    assert (answered.status_code, answered.json()["error"]["code"]) == (400, "BAD_REQUEST"), answered.text
    assert named in answered.json()["error"]["message"]
    assert api.store.samples.count() == before


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b'{"source":"x","rows":[\xff]}', b'{"source":"x\\u0000","rows":[]}',
     b'{"source":"x","rows":' + b"[" * 50_000, b'{"source":"x","row_offset":' + b"9" * 4_000 + b',"rows":[]}'],
)  # fmt: skip
def test_a_hostile_import_is_refused(api: Api, raw: bytes) -> None:
    answered = api.call("POST", "/api/loop/import", content=raw)
    assert (answered.status_code, answered.json()["error"]["code"]) == (400, "BAD_REQUEST"), answered.text


def test_hostile_rows_are_refused_one_by_one(api: Api) -> None:
    huge = {"messages": [{"role": "user", "content": "x" * 10_000_000}, {"role": "assistant", "content": "y"}]}
    odd: list[Any] = [None, [], "", 1e308, {}, {"messages": []}, {"messages": [{"role": "root", "content": "x"}]}]
    done = api.client.loop.import_rows("hostile", [*odd, huge, chat("Fine \0 is it?")])
    assert done["refused"] + done["imported"] == 9
    assert done["imported"] >= 1


def test_an_import_that_could_not_be_written_says_so_with_every_count(api: Api) -> None:
    loop = api.client.loop
    rows = [{**chat("Kept?"), "label": True}, chat("And this one?")]
    loop.import_rows("torn", [{**chat("Before"), "label": True}])
    table = Path(api.store.lake.path(FEEDBACK))
    table.rename(table.with_name("away"))
    table.write_bytes(b"a file where a folder should be")
    try:
        with pytest.raises(ApiError) as failed:
            loop.import_rows("torn", rows, import_id="torn")
    finally:
        table.unlink()
        table.with_name("away").rename(table)
    assert (failed.value.status, failed.value.code) == (503, "IMPORT_INCOMPLETE")
    assert failed.value.body["import_id"] == "torn"
    assert failed.value.body["not_saved"] + failed.value.body["verdicts_not_saved"] >= 1
    done = loop.import_rows("torn", rows, import_id="torn")
    assert done["imported"] + done["already_present"] == 2
    assert done["reviewed"] == 1


def test_an_import_beside_another_writer_is_told_to_come_again(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loop_dagster.api.routers.imports.WAIT_S", 0.2)
    with lake_lease(api.store, "a test"):
        answered = api.call("POST", "/api/loop/import", json={"source": "busy", "rows": [chat("Q")]})
    assert (answered.status_code, answered.json()["error"]["code"]) == (503, "LEASE_BUSY")
    assert answered.headers["Retry-After"]
    assert api.client.loop.import_rows("busy", [chat("Q")])["imported"] == 1
