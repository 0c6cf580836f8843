"""A captured conversation and an imported one are the same sample."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from loop_dagster.rules import canonical
from loop_dagster.rules.retention import captured_until
from loop_dagster.rules.shapes import Parsed, parse, plain_verdict
from loop_dagster.store import pages
from loop_dagster.store.importing import import_file
from loop_dagster.store.lake import Lake
from loop_dagster.store.pages import Decoded, Input, Options, decode_page, sample_row
from loop_dagster.tables import SAMPLES

CASES = Path(__file__).parent.parent / "cases"
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
SAME = ["messages", "answer", "tools", "text_key", "prompt_key", "answer_key", "bytes", "flag"]


def test_a_captured_row_has_the_texts_and_keys_of_an_imported_one(tmp_path: Path) -> None:
    for name in ("tool_arguments.jsonl", "secrets.jsonl", "clean.jsonl"):
        lake = Lake(str(tmp_path / name))
        import_file(CASES / name, lake, source="shop", now=NOW)
        imported = lake.scan(SAMPLES).collect().sort("position")
        rows: list[dict[str, object]] = []
        for line in (CASES / name).read_bytes().splitlines():
            parsed = parse(canonical.loads(line))
            assert isinstance(parsed, Parsed)
            row, counts = sample_row(
                source="shop",
                identity=canonical.identity("request", "shop", str(len(rows))),
                messages=parsed.messages,
                answer=parsed.answer,
                tools=parsed.tools,
                flag=parsed.flag,
                now=NOW,
                expires_at=captured_until(NOW),
            )
            assert sum(counts.values()) == (6 if name == "secrets.jsonl" else 0)
            rows.append(row)
        assert SAMPLES.frame(rows).select(SAME).equals(imported.select(SAME))


def test_a_decoded_page_shows_nothing_of_its_rows() -> None:
    line = b'{"messages": [{"role": "user", "content": "pat@example.org"}, {"role": "assistant", "content": "x"}]}'
    decoded = decode_page([Input(0, 1, line)], Options("shop", "i", NOW))
    assert isinstance(decoded, Decoded)
    assert "pat@" not in repr(decoded)


CONTENT = st.one_of(
    st.text(max_size=6), st.sampled_from(['a","role":"x', ',{"content":"', "\\", " ", "", 7, None, ["a"], "\ud800"])
)
TURN = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool", "x"]), "content": CONTENT}),
    st.fixed_dictionaries({"role": st.just("user"), "content": CONTENT, "name": st.just("n")}),
    st.sampled_from(["ab", 1, None, ["role", "content"]]),
)
USUAL = st.tuples(st.lists(TURN, max_size=4), CONTENT).map(
    lambda parts: [*parts[0], {"role": "assistant", "content": parts[1]}]
)


@given(st.one_of(USUAL, st.lists(TURN, max_size=3)), st.booleans(), st.sampled_from([None, "good"]))
@settings(max_examples=500)
@example([{"role": "user", "content": "a"}, {"content": 'x,{"content":"y', "role": "assistant"}], True, "good")
def test_the_short_way_of_a_plain_row_gives_the_bytes_of_the_long_way(
    messages: list[object], ascii_only: bool, default: str | None
) -> None:
    try:
        line = json.dumps({"messages": messages}, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    short = pages._plain_row(line, plain_verdict(default))
    long = pages._row(Input(0, 1, line), pages.Options("app", "i", NOW, default_feedback=default))
    assert short is None or short == long
    plain = all(
        isinstance(turn, dict) and set(turn) == {"role", "content"} and isinstance(turn["content"], str)
        for turn in messages
    )
    tools = any(isinstance(turn, dict) and turn["role"] == "tool" for turn in messages)
    takes = isinstance(long, tuple) and long[1].answer is not None and plain and not tools
    assert (short is not None) == takes or (short is None and not any(_is_user(turn) for turn in messages))


def _is_user(turn: object) -> bool:
    return isinstance(turn, dict) and turn["role"] == "user"


def test_a_plain_row_and_nothing_else_goes_the_short_way() -> None:
    plain = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\\u00e9"}]}'
    made = pages._plain_row(plain, None)
    assert made is not None
    assert made[1].messages == b'[{"content":"a","role":"user"}]'
    assert made[1].answer == '{"content":"b\u00e9","role":"assistant"}'.encode()
    for other in (
        plain[:-1] + b', "label": true}',
        plain.replace(b'"a"', b"1e2"),
        plain.replace(b'"a"', b'"a", "n": 1'),
        plain[:-1],
        b"[]",
        b"3",
        b'"text"',
        b'{"messages": []}',
        b'{"messages": {"role": "user"}}',
    ):
        assert pages._plain_row(other, None) is None
