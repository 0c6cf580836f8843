"""What a search finds, against reading every message: over JSON as it is stored, in every way that could mislead."""

from __future__ import annotations

import re
from typing import Any

import polars as pl
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loop_dagster.api.searching import holds
from loop_dagster.rules import canonical

#: Letters that escapes are made of, what JSON is made of, and letters whose case is odd.
LETTERS = "nrtbfu01eE \"\\\n\t\x1b\x00{}[]:,'.ßéÉçЖж"
WORDS = [
    *("role", "user", "content", "name", "null", "function", "arguments", "id", "type", "assistant", "tool_calls"),
    *("next", "\next", "\\next", '"role":"user"', '{"zone":"north"}', "call_7", "\\u001b"),
]
texts = st.lists(st.one_of(st.text(LETTERS, max_size=6), st.sampled_from(WORDS)), max_size=4).map("".join)
queries = st.one_of(
    st.text(LETTERS, min_size=2, max_size=5), st.sampled_from(WORDS), st.sampled_from(["er", "ll", "},"])
)


@st.composite
def samples(draw: st.DrawFn) -> dict[str, Any]:
    turns = [{"role": draw(st.sampled_from(["system", "user"])), "content": draw(texts)}]
    if draw(st.booleans()):
        turns.append({"role": "tool", "content": draw(texts), "tool_call_id": draw(texts), "name": draw(texts)})
    answer: dict[str, Any] | None = {"role": "assistant", "content": draw(texts)}
    if draw(st.booleans()):
        arguments = draw(st.one_of(texts, st.dictionaries(texts, texts, max_size=2)))
        call = {"function": {"name": draw(texts) or "look_up", "arguments": arguments}, "id": draw(texts)}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    if draw(st.integers(0, 9)) == 0:
        answer = None
    return {"messages": [canonical.message(turn) for turn in turns], "answer": answer and canonical.answer(answer)}


def written(sample: dict[str, Any]) -> list[str]:
    """Everything in a sample that somebody wrote."""
    found = []
    for turn in [*sample["messages"], *([sample["answer"]] if sample["answer"] else [])]:
        found += [turn["content"] or "", turn.get("name", ""), turn.get("tool_call_id", "")]
        for call in turn.get("tool_calls", ()):
            found += [call["function"]["name"], call["function"]["arguments"], call.get("id", "")]
    return found


def found(texts: list[dict[str, Any]], query: str) -> list[bool]:
    frame = pl.DataFrame(
        {
            "messages": [canonical.dumps(sample["messages"]) for sample in texts],
            "answer": [sample["answer"] and canonical.dumps(sample["answer"]) for sample in texts],
        },
        schema={"messages": pl.String, "answer": pl.String},
    )
    return frame.select(found=holds(query))["found"].to_list()


def sample_of(content: str, **beside: Any) -> dict[str, Any]:
    turn = canonical.message({"role": "user", "content": content, **beside})
    return {"messages": [turn], "answer": canonical.answer("yes")}


@given(st.lists(samples(), min_size=1, max_size=6), queries)
@example([sample_of("\next"), sample_of("next"), sample_of("\\next")], "next")
@example([sample_of("\x1b[1m"), sample_of("01b[")], "1b[1m")
@example([sample_of("say \\"), sample_of('"')], '"')
def test_finds_what_reading_every_message_finds(texts: list[dict[str, Any]], query: str) -> None:
    pattern = re.compile(re.escape(query), re.IGNORECASE)
    assert found(texts, query) == [any(pattern.search(part) for part in written(sample)) for sample in texts]


@pytest.mark.parametrize("query", ["role", "USER", "content", '":"', "},", "null", "ssista", "[{"])
def test_words_that_json_adds_are_not_found(query: str) -> None:
    assert found([sample_of("Where is it?")], query) == [False]
    assert found([sample_of(f"It says {query} here")], query) == [True]


@pytest.mark.parametrize(
    ("query", "content"), [("straße", "STRAẞE"), ("ÉTÉ", "été"), ("привет", "ПРИВЕТ"), ("a.c", "A.C")]
)
def test_case_does_not_matter_in_any_script(query: str, content: str) -> None:
    assert found([sample_of(content), sample_of("abc")], query) == [True, False]
