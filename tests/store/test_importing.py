"""Imports into a real lake: identity, retry, repair, refusals, redaction, kills."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from loop_dagster.errors import BadRequest, LakeConflict, LeaseBusy
from loop_dagster.rules import canonical
from loop_dagster.rules.tags import BadTag, TooManyTags
from loop_dagster.store import rowfiles
from loop_dagster.store.importing import ImportResult, import_file, import_rows
from loop_dagster.store.lake import Lake
from loop_dagster.tables import FEEDBACK, LABELS, SAMPLES, Table

CASES = Path(__file__).parent.parent / "cases"
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
SPAWN = multiprocessing.get_context("spawn")
CONTENT = ["messages", "answer", "tools", "text_key", "prompt_key", "answer_key", "bytes"]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


def file(lake: Lake, name: str, **options: Any) -> ImportResult:
    return import_file(CASES / name, lake, **{"source": "shop", "now": NOW, **options})


def rows(lake: Lake, given: list[Any], **options: Any) -> ImportResult:
    return import_rows(lake, given, **{"source": "shop", "now": NOW, **options})


def stored(lake: Lake, table: Table = SAMPLES) -> pl.DataFrame:
    frame = lake.scan(table).collect()
    return frame.sort("position", "sample_id") if table is SAMPLES else frame.sort(table.key[0])


def chat(question: str, answer: str | None = "Yes.", **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": question}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages, **more}


# the case files


def test_the_mixed_file(lake: Lake) -> None:
    result = file(lake, "mixed_refusals.jsonl", labels=["Shop"])
    assert (result.imported, result.needs_review, result.waiting_for_answer, result.reviewed) == (7, 2, 1, 4)
    assert [(row.line, row.code) for row in result.refused_rows] == [
        (3, "not_json"),
        (5, "prose"),
        (8, "empty_messages"),
    ]
    assert result.refused == 3
    assert all(row["sentence"] for row in result.refused_rows)
    assert result.complete
    verdicts = stored(lake).join(stored(lake, FEEDBACK), on="sample_id", how="left").sort("position")
    by_row = dict(zip(verdicts["position"], verdicts["verdict"], strict=True))
    # positions count every row of the file, from 0: lines 4 and 9 are corrected
    assert by_row == {0: None, 1: None, 3: "edited", 5: "rejected", 6: None, 8: "edited", 9: "gold"}
    right = dict(zip(verdicts["position"], verdicts["right_answer"], strict=True))
    assert right[3] == '{"content":"The duplicate has been refunded.","role":"assistant"}'
    assert right[9] == '{"content":"Visa and Mastercard.","role":"assistant"}'
    assert set(stored(lake, FEEDBACK)["origin"]) == {"import"}
    assert stored(lake, LABELS)["label"].to_list() == ["shop"] * 7
    assert result.as_dict()["refused_why"] == ["not_json", "prose", "empty_messages"]


def test_clean_and_bom_crlf_are_the_same_samples_digest_for_digest(tmp_path: Path) -> None:
    one, two = Lake(str(tmp_path / "one")), Lake(str(tmp_path / "two"))
    assert file(one, "clean.jsonl").imported == file(two, "clean_bom_crlf.jsonl").imported == 3
    assert stored(one).select(*CONTENT, "identity").equals(stored(two).select(*CONTENT, "identity"))
    again = file(one, "clean_bom_crlf.jsonl")
    assert (again.imported, again.already_present) == (0, 3)


def test_content_parts_are_the_same_text_as_plain_strings(tmp_path: Path) -> None:
    one, two = Lake(str(tmp_path / "one")), Lake(str(tmp_path / "two"))
    file(one, "clean.jsonl")
    file(two, "content_parts.jsonl")
    assert stored(one).select(CONTENT).head(2).equals(stored(two).select(CONTENT))


def test_tool_arguments_have_one_form(lake: Lake) -> None:
    file(lake, "tool_arguments.jsonl")
    found = stored(lake).select(CONTENT)
    assert found.height == 2
    assert found.unique().height == 1
    assert '"content":null' in found["messages"][0]
    assert r'"arguments":"{\"order_id\":\"7\"}"' in found["messages"][0]


def test_secrets_are_gone_from_every_file_log_and_result(
    lake: Lake, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    result = file(lake, "secrets.jsonl")
    text = stored(lake)["messages"][0] + str(stored(lake)["answer"][0])
    assert text.count("[redacted:") == 6
    assert "4111 1111 1111 1112" in text
    assert result.redacted == {"email": 1, "card": 1, "ip": 1, "api_key": 1, "aws_key": 1, "ssn": 1}
    seen = json.dumps(result.as_dict()) + caplog.text
    kept = b"".join(path.read_bytes() for path in (tmp_path / "lake").rglob("*") if path.is_file())
    for secret in ("pat@example.org", "4111 1111 1111 1111", "203.0.113.9", "sk-proj", "AKIAIOSFODNN7", "078-05"):
        assert secret not in seen
        assert secret.encode() not in kept


# what is stored


def test_every_column_of_a_sample(lake: Lake) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 1e2}}}]
    line = b'{"messages": [{"role": "user", "content": "1.5\xe2\x82\xac?"}, {"role": "assistant", "content": "No"}],'
    line += (
        b' "tools": [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 1e2}}}], "label": true}'
    )
    result = rows(lake, [line], import_id="imp", model="gpt", labels=["a", "b"], attributes={"Plan": "gold"})
    sample = stored(lake).row(0, named=True)
    assert json.loads(sample["tools"]) == tools
    assert '"maximum":1e2' in sample["tools"]
    assert sample["messages"] == '[{"content":"1.5€?","role":"user"}]'
    assert sample["answer"] == '{"content":"No","role":"assistant"}'
    assert sample["bytes"] == sum(len(sample[name].encode()) for name in ("messages", "answer", "tools"))
    assert sample["text_key"] == canonical.text_key(sample["messages"], sample["tools"])
    assert sample["answer_key"] == canonical.key(sample["answer"])
    assert sample["prompt_key"] == canonical.prompt_key(json.loads(sample["messages"]))
    assert (sample["source"], sample["origin"], sample["import_id"], sample["position"]) == (
        "shop",
        "imported",
        "imp",
        0,
    )
    assert (sample["model"], sample["flag"], sample["conversation_id"]) == ("gpt", None, None)
    assert (sample["created_at"], sample["expires_at"]) == (NOW, NOW + timedelta(days=365))
    assert result.trace_ids == (sample["sample_id"],)
    labels = stored(lake, LABELS).select("label", "value", "parent", "removed").sort("label").rows()
    assert labels == [("a", None, None, False), ("b", None, None, False), ("plan", "gold", None, False)]
    assert stored(lake, FEEDBACK)["verdict"].to_list() == ["accepted"]


def test_rows_keep_their_order_in_ids_and_across_pages(lake: Lake) -> None:
    result = rows(lake, [chat(f"question {number}") for number in range(25)], page_rows=10)
    assert result.imported == 25
    assert list(result.trace_ids) == sorted(result.trace_ids) == stored(lake)["sample_id"].to_list()
    assert [json.loads(text)[0]["content"] for text in stored(lake)["messages"]] == [f"question {n}" for n in range(25)]


def test_default_feedback_reviews_only_answered_rows_without_a_verdict(lake: Lake) -> None:
    result = rows(
        lake,
        [chat("a"), chat("b", None), chat("c", label=False), chat("d", correction="No.")],
        default_feedback="good",
    )
    assert (result.reviewed, result.needs_review, result.waiting_for_answer) == (3, 0, 1)
    assert sorted(stored(lake, FEEDBACK)["verdict"]) == ["accepted", "edited", "rejected"]
    with pytest.raises(BadRequest, match="default_feedback"):
        rows(lake, [chat("a")], default_feedback="bad")


def test_odd_conversations_are_stored_and_flagged_by_row(lake: Lake) -> None:
    two = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
    late = {"messages": [*chat("a")["messages"], {"role": "system", "content": "b"}, *chat("c")["messages"]]}  # type: ignore[misc]
    result = rows(lake, [chat("x"), two, late])
    assert result.imported == 3
    assert result.flagged == 2
    assert [(row.line, row.code) for row in result.flagged_rows] == [(2, "two_user_turns"), (3, "late_system")]
    assert stored(lake)["flag"].to_list() == [None, "two_user_turns", "late_system"]


def test_labels_are_checked_before_anything_is_stored(lake: Lake) -> None:
    for labels, error in ((["not ok"], BadTag), ([f"t{n}" for n in range(33)], TooManyTags)):
        with pytest.raises(error):
            rows(lake, [chat("a")], labels=labels)
    assert lake.version(SAMPLES) is None


@pytest.mark.parametrize(
    "options",
    [{"source": " "}, {"source": "x" * 201}, {"import_id": ""}, {"row_offset": -1}, {"row_ids": []},
     {"row_ids": ["a", "a"]}, {"row_ids": ["a", ""]}],
)  # fmt: skip
def test_wrong_options_are_refused_before_anything(lake: Lake, options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        rows(lake, [chat("a"), chat("b")], **options)
    assert lake.version(SAMPLES) is None


def test_a_missing_file_is_refused(lake: Lake, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"nothing\.jsonl"):
        import_file(tmp_path / "nothing.jsonl", lake, source="shop", now=NOW)


# identity and retry


def test_a_repeated_import_id_is_a_retry_and_a_new_one_is_not(lake: Lake) -> None:
    given = [chat("a", label=True), chat("a", label=True), chat("b")]
    first = rows(lake, given, import_id="one", labels=["x"])
    again = rows(lake, given, import_id="one", labels=["x"])
    assert (first.imported, first.already_present) == (3, 0)
    assert (again.imported, again.already_present, again.reviewed, again.needs_review) == (0, 3, 0, 0)
    assert again.by_shape == {}
    assert again.trace_ids == ()
    assert (lake.row_count(SAMPLES), lake.row_count(FEEDBACK), lake.row_count(LABELS)) == (3, 2, 3)
    assert rows(lake, given).imported == 3
    assert rows(lake, given, import_id="one", source="other").imported == 3


def test_key_order_and_space_do_not_count_and_the_spelling_of_a_number_does(lake: Lake) -> None:
    one = b'{"prompt": "a", "completion": "b", "limit": 1e2}'
    assert rows(lake, [one], import_id="i").imported == 1
    assert rows(lake, [b'{"limit":1e2,\t"completion":"b","prompt":"\\u0061"}'], import_id="i").already_present == 1
    assert rows(lake, [one.replace(b"1e2", b"100.0")], import_id="i").imported == 1
    assert rows(lake, [one], import_id="i", row_offset=1).imported == 1


def test_pages_under_one_import_id_by_offset(lake: Lake) -> None:
    given = [chat(f"q{number}") for number in range(10)]
    assert rows(lake, given[:6], import_id="i").imported == 6
    rest = rows(lake, given[4:], import_id="i", row_offset=4)
    assert (rest.imported, rest.already_present) == (4, 2)
    assert stored(lake)["position"].to_list() == list(range(10))


def test_with_row_ids_the_id_is_the_whole_identity(lake: Lake) -> None:
    assert rows(lake, [chat("a"), chat("b")], row_ids=["1", "2"]).imported == 2
    again = rows(lake, [chat("changed"), chat("c")], row_ids=["2", "3"], import_id="other")
    assert (again.imported, again.already_present) == (1, 1)
    assert rows(lake, [chat("a")], row_ids=["1"], source="other").imported == 1
    texts = [json.loads(text)[0]["content"] for text in stored(lake).filter(pl.col("source") == "shop")["messages"]]
    assert sorted(texts) == ["a", "b", "c"]


def test_rows_as_objects_texts_and_bytes_are_the_same_rows(lake: Lake) -> None:
    row = chat("a", limit=3)
    assert rows(lake, [row], import_id="i").imported == 1
    for form in (json.dumps(row), json.dumps(row, indent=2).encode()):
        assert rows(lake, [form], import_id="i").already_present == 1


def test_importing_a_file_again_or_as_an_array_adds_nothing_twice(lake: Lake, tmp_path: Path) -> None:
    given = [chat(f"q{number}") for number in range(5)]
    lines, array = tmp_path / "a.jsonl", tmp_path / "b.json"
    lines.write_text("\n".join(map(json.dumps, given)))
    array.write_text(json.dumps([*given[:2], "prose", *given[2:]], indent=1))
    assert import_file(lines, lake, source="shop", now=NOW).imported == 5
    lines.rename(tmp_path / "c.jsonl")
    assert import_file(tmp_path / "c.jsonl", lake, source="shop", now=NOW).already_present == 5
    result = import_file(array, lake, source="shop", now=NOW, page_rows=2)
    assert result.imported == 5
    assert [row.code for row in result.refused_rows] == ["prose"]
    assert result.refused_rows[0].line == array.read_text().splitlines().index(' "prose",') + 1


def test_what_waits_elsewhere_counts_as_present(lake: Lake) -> None:
    known = canonical.identity("row_id", "shop", "1")
    result = rows(
        lake,
        [chat("a", label=True), chat("b", label=True)],
        row_ids=["1", "2"],
        labels=["x"],
        waiting=lambda identities: {known: "0195"} if known in identities else {},
    )
    assert (result.imported, result.already_present, result.reviewed) == (1, 1, 1)
    assert (lake.row_count(FEEDBACK), lake.row_count(LABELS)) == (1, 1)


# repair


class BrokenLake(Lake):
    """A real lake on which appends to some tables fail, as a full disk or another writer makes them."""

    broken: frozenset[str] = frozenset()
    error: Exception = LakeConflict("x", "Appending", 10)

    def append(self, table: Table, *arguments: Any, **options: Any) -> int | None:
        if table.name in self.broken:
            raise self.error
        return super().append(table, *arguments, **options)


@pytest.mark.parametrize("error", [LakeConflict("x", "Appending", 10), OSError(28, "No space left on device")])
@pytest.mark.parametrize("broken", ["samples", "labels", "feedback"])
def test_a_retry_repairs_a_write_that_failed(tmp_path: Path, broken: str, error: Exception) -> None:
    lake = BrokenLake(str(tmp_path / "lake"))
    given = [chat("a", label=True), chat("b"), chat("c", correction="No."), {"text": "prose"}]
    lake.broken, lake.error = frozenset([broken]), error
    result = rows(lake, given, import_id="i", labels=["x"], page_rows=2)
    assert not result.complete
    answer = result.as_dict()
    assert answer["error"]["code"] == "IMPORT_INCOMPLETE"
    assert result.refused == 1
    if broken == "samples":
        assert (result.imported, result.not_saved, result.not_saved_rows) == (0, 3, (1, 2, 3))
        assert result.verdicts_not_saved == 0
    else:
        # The first page's samples are stored and its verdict is not; the second page was not tried.
        assert (result.imported, result.not_saved, result.not_saved_rows) == (2, 1, (3,))
        assert (result.verdicts_not_saved, result.verdicts_not_saved_rows) == (1, (1,))
        assert (result.reviewed, result.needs_review) == (0, 1)
    lake.broken = frozenset()
    again = rows(lake, given, import_id="i", labels=["x"], page_rows=2)
    assert again.complete
    assert again.reviewed == 2
    assert again.imported + again.already_present == 3
    assert (lake.row_count(SAMPLES), lake.row_count(FEEDBACK), lake.row_count(LABELS)) == (3, 2, 3)
    assert rows(lake, given, import_id="i", labels=["x"]).reviewed == 0


def test_a_later_import_never_writes_a_second_verdict_nor_brings_back_a_label(lake: Lake) -> None:
    given = [chat("a", label=True)]
    rows(lake, given, row_ids=["1"], labels=["x"])
    sample = stored(lake)["sample_id"][0]
    taken_off = stored(lake, LABELS).with_columns(label_id=pl.lit("z"), removed=pl.lit(value=True))
    lake.append(LABELS, taken_off)
    result = rows(lake, [chat("a", label=False)], row_ids=["1"], labels=["x", "y"])
    assert (result.already_present, result.reviewed) == (1, 0)
    assert stored(lake, FEEDBACK)["verdict"].to_list() == ["accepted"]
    assert sorted(stored(lake, LABELS).select("label", "removed").rows()) == [("x", False), ("x", True), ("y", False)]
    assert set(stored(lake, LABELS)["sample_id"]) == {sample}


def test_feedback_given_here_does_not_keep_an_import_verdict_out(lake: Lake) -> None:
    """Both are stored; which decides is settled when they are read."""
    rows(lake, [chat("a")], row_ids=["1"])
    here = FEEDBACK.frame(
        [
            {
                "feedback_id": "f",
                "sample_id": stored(lake)["sample_id"][0],
                "verdict": "rejected",
                "origin": "here",
                "right_answer": None,
                "right_key": None,
                "right_bytes": None,
                "score": None,
                "reason": None,
                "created_at": NOW,
            }
        ]
    )
    lake.append(FEEDBACK, here)
    assert rows(lake, [chat("a")], row_ids=["1"], default_feedback="good").reviewed == 1
    assert sorted(stored(lake, FEEDBACK).select("origin", "verdict").rows()) == [
        ("here", "rejected"),
        ("import", "accepted"),
    ]


# the lease


def test_each_page_is_written_under_the_lease(lake: Lake) -> None:
    held: list[int | None] = []

    @contextmanager
    def hold() -> Iterator[None]:
        held.append(lake.version(SAMPLES))
        yield
        assert lake.version(SAMPLES) != held[-1]

    rows(lake, [chat(str(number)) for number in range(5)], page_rows=2, hold=hold)
    assert len(held) == 3


def test_a_busy_lease_is_an_error_before_the_first_page_and_a_count_after_it(lake: Lake) -> None:
    taken = 0

    @contextmanager
    def busy_after(pages: int) -> Iterator[None]:
        nonlocal taken
        taken += 1
        if taken > pages:
            raise LeaseBusy("lake/default", "somebody", 9.0)
        yield

    given = [chat(str(number)) for number in range(6)]
    with pytest.raises(LeaseBusy):
        rows(lake, given, import_id="i", page_rows=2, hold=lambda: busy_after(0))
    taken = 0
    result = rows(lake, given, import_id="i", page_rows=2, hold=lambda: busy_after(1))
    assert (result.imported, result.not_saved_rows) == (2, (3, 4, 5, 6))
    assert result.error is not None
    assert result.error["code"] == "LEASE_BUSY"


def test_an_import_that_never_got_the_lease_stores_no_later_page_either(lake: Lake) -> None:
    taken = 0

    @contextmanager
    def busy_at_first() -> Iterator[None]:
        nonlocal taken
        taken += 1
        if taken == 1:
            raise LeaseBusy("lake/default", "somebody", 9.0)
        yield

    with pytest.raises(LeaseBusy):
        rows(lake, [chat(str(number)) for number in range(9)], import_id="i", page_rows=2, hold=busy_at_first)
    assert (taken, lake.row_count(SAMPLES)) == (1, 0)


def test_two_writers_of_one_import_store_each_row_once(tmp_path: Path) -> None:
    lake, lock = Lake(str(tmp_path)), threading.Lock()
    given = [chat(str(number), label=True) for number in range(40)]
    results: list[ImportResult] = []

    def work() -> None:
        results.append(rows(lake, given, import_id="i", labels=["x"], page_rows=7, hold=lambda: lock))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(result.imported for result in results) == 40
    assert sum(result.already_present for result in results) == 40
    assert (lake.row_count(SAMPLES), lake.row_count(FEEDBACK), lake.row_count(LABELS)) == (40, 40, 40)


# files


def test_progress_refusals_and_pages_of_a_file(lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowfiles, "BLOCK_BYTES", 4096)
    path = tmp_path / "rows.jsonl"
    hostile = [
        b"[" * 5000,
        b'{"messages": NaN}',
        b'"\\ud83d"',
        b"\xff\xfe",
        b"{" * 3000,
        b'{"prompt": "\\ud800"}',
        b"null",
    ]
    good = [json.dumps(chat(f"question {number}")).encode() for number in range(300)]
    path.write_bytes(b"\n".join([*good[:150], b"", *hostile, *good[150:]]))
    seen: list[tuple[int, int]] = []
    result = import_file(
        path, lake, source="shop", now=NOW, page_rows=40, on_progress=lambda done, total: seen.append((done, total))
    )
    assert result.imported == 300
    assert [(row.line, row.code) for row in result.refused_rows] == [
        (152, "too_deep"),
        (153, "not_finite"),
        (154, "lone_surrogate"),
        (155, "not_utf8"),
        (156, "not_json"),
        (157, "lone_surrogate"),
        (158, "not_an_object"),
    ]
    assert seen == sorted(seen)
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)
    assert len(seen) == 8


def test_huge_whole_numbers_and_duplicate_keys_are_kept_as_they_read(lake: Lake) -> None:
    digits = "9" * 400
    arguments = f'{{"n": {digits}, "a": 1, "a": 2}}'
    call = [{"id": "c", "function": {"name": "f", "arguments": arguments}}]
    row = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": call}]}
    assert rows(lake, [json.dumps(row)]).imported == 1
    answer = json.loads(stored(lake)["answer"][0])
    assert answer["tool_calls"][0]["function"]["arguments"] == f'{{"a":2,"n":{digits}}}'


# kills


def _import_and_tell(root: str, path: str, started: str) -> None:
    lake = Lake(root)

    def tell(done: int, total: int) -> None:
        Path(started).write_text(f"{done} {total}")

    import_file(
        Path(path),
        lake,
        source="shop",
        now=NOW,
        labels=["x", "y"],
        default_feedback="good",
        page_rows=20,
        on_progress=tell,
    )


@pytest.mark.parametrize("seed", range(5))
def test_an_import_that_is_killed_and_retried_has_every_row_once(tmp_path: Path, seed: int) -> None:
    randomly = random.Random(seed)
    count = 600
    path, started = tmp_path / "rows.jsonl", tmp_path / "started"
    path.write_text("\n".join(json.dumps(chat(f"question {number}")) for number in range(count)))
    lake = Lake(str(tmp_path / "lake"))
    for _ in range(2):
        started.unlink(missing_ok=True)
        child = SPAWN.Process(target=_import_and_tell, args=(lake.root, str(path), str(started)))
        child.start()
        deadline = time.monotonic() + 120
        while not started.exists() and child.is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(randomly.uniform(0, 0.4))
        if child.is_alive():
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
        child.join()
    between = lake.row_count(SAMPLES)
    assert 0 < between <= count
    result = import_file(path, lake, source="shop", now=NOW, labels=["x", "y"], default_feedback="good", page_rows=20)
    assert result.complete
    assert (result.imported, result.already_present) == (count - between, between)
    samples = stored(lake)
    assert samples["position"].to_list() == list(range(count))
    assert samples["sample_id"].n_unique() == samples["identity"].n_unique() == count
    feedback, labels = stored(lake, FEEDBACK), stored(lake, LABELS)
    assert sorted(feedback["sample_id"]) == sorted(samples["sample_id"])
    assert labels.height == labels.select("sample_id", "label").n_unique() == 2 * count
    assert set(labels["sample_id"]) == set(samples["sample_id"])
