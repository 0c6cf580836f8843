"""What rows become, and with which words they are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loop_dagster.rules import canonical, shapes
from loop_dagster.rules.shapes import Parsed, Refusal, parse

CASES = Path(__file__).parent.parent / "cases"
USER = {"role": "user", "content": "Do you ship abroad?"}
NO = {"role": "assistant", "content": "No."}
YES = {"role": "assistant", "content": "Yes."}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": {"id": "7"}}}
STORED_CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"id":"7"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "{}"}


def read(row: object, **options: Any) -> Parsed | Refusal:
    return parse(canonical.loads(json.dumps(row)), **options)


def parsed(row: object, **options: Any) -> Parsed:
    made = read(row, **options)
    assert isinstance(made, Parsed), made
    return made


@pytest.mark.parametrize(
    ("row", "shape", "answer", "verdict", "right"),
    [
        ({"messages": [USER, NO]}, "messages", NO, None, None),
        ({"prompt": USER["content"], "completion": "No."}, "prompt_completion", NO, None, None),
        ({"prompt": [USER], "completion": [NO]}, "prompt_completion", NO, None, None),
        ({"prompt": [USER], "completion": NO}, "prompt_completion", NO, None, None),
        ({"messages": [USER, NO], "label": True}, "labelled", NO, "accepted", None),
        ({"messages": [USER, NO], "label": False}, "labelled", NO, "rejected", None),
        ({"prompt": [USER], "completion": "No.", "label": "False"}, "labelled", NO, "rejected", None),
        ({"messages": [USER, NO], "label": 1}, "labelled", NO, "accepted", None),
        ({"messages": [USER, NO], "label": 0}, "labelled", NO, "rejected", None),
        ({"messages": [USER, NO], "correction": "Yes."}, "corrected", NO, "edited", YES),
        ({"messages": [USER, NO], "correction": YES}, "corrected", NO, "edited", YES),
        ({"messages": [USER, NO], "correction": [YES], "label": False}, "corrected", NO, "edited", YES),
        ({"prompt": [USER], "completion": "No.", "ground_truth": "Yes."}, "gold", NO, "gold", YES),
        ({"messages": [USER, NO], "ground_truth": "Yes.", "correction": "Yes."}, "gold", NO, "gold", YES),
        ({"messages": [USER, NO], "ground_truth": "Yes.", "label": True}, "gold", NO, "gold", YES),
        ({"prompt": USER["content"], "chosen": "Yes.", "rejected": "No."}, "chosen_rejected", NO, "edited", YES),
        ({"prompt": [USER], "chosen": [YES], "rejected": [NO]}, "chosen_rejected", NO, "edited", YES),
        ({"prompt": [USER], "chosen": [USER, YES], "rejected": [USER, NO]}, "chosen_rejected", NO, "edited", YES),
        ({"messages": [USER]}, "question", None, None, None),
        ({"prompt": USER["content"]}, "question", None, None, None),
        ({"prompt": [USER]}, "question", None, None, None),
        ({"prompt": [USER], "completion": None, "label": None}, "question", None, None, None),
        ({"messages": [USER], "ground_truth": "Yes."}, "gold", None, "gold", YES),
        ({"messages": [USER], "correction": "Yes."}, "gold", None, "gold", YES),
    ],
)
def test_every_row_of_the_table(
    row: dict[str, object], shape: str, answer: object, verdict: str | None, right: object
) -> None:
    made = parsed(row)
    assert (made.messages, made.shape, made.answer, made.verdict, made.right) == ([USER], shape, answer, verdict, right)
    assert made.flag is None
    assert made.tools is None


@pytest.mark.parametrize(
    ("row", "verdict", "shape"),
    [
        ({"messages": [USER, NO]}, "accepted", "messages"),
        ({"prompt": "x", "completion": "y"}, "accepted", "prompt_completion"),
        ({"messages": [USER]}, None, "question"),
        ({"messages": [USER, NO], "label": False}, "rejected", "labelled"),
        ({"messages": [USER, NO], "correction": "Yes."}, "edited", "corrected"),
        ({"prompt": "x", "chosen": "y", "rejected": "z"}, "edited", "chosen_rejected"),
    ],
)
def test_default_feedback_marks_only_answered_rows_without_a_verdict(
    row: dict[str, object], verdict: str | None, shape: str
) -> None:
    made = parsed(row, default_feedback="good")
    assert (made.verdict, made.shape) == (verdict, shape)


def test_tools_and_tool_calls_are_kept_and_a_tool_turn_is_a_question() -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"maximum": 100}}}]
    made = parsed({"messages": [USER, CALLING, RESULT, NO], "tools": tools})
    assert canonical.dumps(made.tools) == canonical.dumps(canonical.spelled(tools))
    assert made.messages[1]["tool_calls"] == [STORED_CALL]
    assert made.flag is None
    assert parsed({"messages": [USER, NO], "tools": json.dumps(tools)}).tools == canonical.spelled(tools)
    assert parsed({"messages": [USER, NO], "tools": []}).tools is None
    assert parsed({"messages": [USER, CALLING, RESULT]}).answer is None
    assert parsed({"messages": [USER, CALLING]}).answer == {
        "role": "assistant",
        "content": None,
        "tool_calls": [STORED_CALL],
    }


def test_a_system_text_beside_the_prompt_is_not_lost() -> None:
    made = parsed({"prompt": "Hello", "completion": "Hi", "system": "Be short.", "id": 7})
    assert made.messages == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    own = [{"role": "system", "content": "Be long."}, USER, NO]
    assert parsed({"messages": own, "system": "Be short."}).messages == own[:2]


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (7, "not_an_object"),
        ([USER, NO], "not_an_object"),
        (None, "not_an_object"),
        ("Our shop was founded in a garage.", "prose"),
        ({"text": "Our shop was founded in a garage."}, "prose"),
        ({"question": "x", "answer": "y"}, "unknown_shape"),
        ({}, "unknown_shape"),
        ({"messages": []}, "empty_messages"),
        ({"messages": "hello"}, "bad_messages"),
        ({"messages": [USER, NO], "prompt": "x"}, "ambiguous_shape"),
        ({"messages": [USER], "completion": "x"}, "ambiguous_shape"),
        ({"messages": [USER], "chosen": "x", "rejected": "y"}, "ambiguous_shape"),
        ({"prompt": "x", "completion": "y", "chosen": "x", "rejected": "y"}, "ambiguous_shape"),
        ({"messages": [NO]}, "no_question"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no_question"),
        ({"messages": [{"role": "system", "content": "x"}, NO]}, "no_question"),
        ({"prompt": "  "}, "empty_prompt"),
        ({"prompt": 7}, "empty_prompt"),
        ({"prompt": []}, "empty_prompt"),
        ({"prompt": [USER, NO]}, "prompt_ends_in_answer"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "empty_answer"),
        ({"prompt": "x", "completion": ""}, "empty_answer"),
        ({"prompt": "x", "completion": []}, "empty_answer"),
        ({"prompt": "x", "completion": [NO, YES]}, "bad_answer"),
        ({"prompt": "x", "completion": 7}, "bad_answer"),
        ({"prompt": "x", "completion": USER}, "unknown_role"),
        ({"messages": [USER, NO], "correction": ""}, "empty_correction"),
        ({"messages": [USER, NO], "ground_truth": 7}, "bad_answer"),
        ({"prompt": "x", "chosen": "y"}, "half_a_pair"),
        ({"prompt": "x", "rejected": "y"}, "half_a_pair"),
        ({"chosen": [USER, YES], "rejected": [USER, NO]}, "half_a_pair"),
        ({"prompt": "x", "chosen": "y", "rejected": "y"}, "chosen_is_rejected"),
        ({"prompt": "x", "chosen": "y", "rejected": "z", "label": True}, "contradicting_verdicts"),
        ({"messages": [USER, NO], "label": "billing"}, "bad_label"),
        ({"messages": [USER, NO], "label": 2}, "bad_label"),
        ({"messages": [USER, NO], "label": 1.0}, "bad_label"),
        ({"messages": [USER, NO], "label": "1"}, "bad_label"),
        ({"messages": [USER], "label": True}, "verdict_without_answer"),
        ({"messages": [USER, NO], "label": True, "correction": "x"}, "contradicting_verdicts"),
        ({"messages": [USER, NO], "ground_truth": "x", "correction": "y"}, "contradicting_verdicts"),
        ({"messages": [{"role": "robot", "content": "x"}, NO]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, NO]}, "unsupported_content"),
        ({"messages": [{"role": "user", "content": 7}, NO]}, "bad_content"),
        ({"messages": [{"role": "user"}, NO]}, "no_content"),
        ({"messages": ["x"]}, "bad_message"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "bad_tool_call"),
        ({"messages": [USER, NO], "tools": "{"}, "bad_tools"),
        ({"messages": [USER, NO], "tools": {"a": 1}}, "bad_tools"),
    ],
)
def test_every_refusal_has_a_code_and_a_sentence(row: object, code: str) -> None:
    made = read(row)
    assert isinstance(made, Refusal)
    assert made.code == code
    assert made.sentence.endswith(".")
    assert "garage" not in made.sentence


def test_sentences_are_distinct() -> None:
    assert len(set(shapes.REFUSALS.values())) == len(shapes.REFUSALS)


@pytest.mark.parametrize(
    ("turns", "flag"),
    [
        ("user assistant", None),
        ("system user assistant user assistant", None),
        ("system developer user assistant", None),
        ("user user assistant", "two_user_turns"),
        ("user system assistant", "late_system"),
        ("user assistant developer user assistant", "late_system"),
        ("user system user assistant", "late_system"),
        ("user assistant assistant", "two_assistant_turns"),
        ("system assistant user assistant", "starts_with_assistant"),
        ("user user", "two_user_turns"),
    ],
)
def test_an_odd_order_is_flagged_and_stored(turns: str, flag: str | None) -> None:
    made = parsed({"messages": [{"role": role, "content": "x"} for role in turns.split()]})
    assert made.flag == flag
    assert flag is None or shapes.FLAGS[flag].endswith(".")


@pytest.mark.parametrize(
    ("turns", "flag"),
    [
        ([USER, CALLING, RESULT, NO], None),
        ([USER, CALLING, {"role": "tool", "content": "{}"}, NO], None),
        ([USER, {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "c2"}]},
          {**RESULT, "tool_call_id": "c2"}, RESULT, NO], None),
        ([USER, RESULT, NO], "tool_without_call"),
        ([USER, CALLING, {**RESULT, "tool_call_id": "c9"}, NO], "tool_without_call"),
        ([USER, CALLING, RESULT, RESULT, NO], "tool_without_call"),
        ([USER, CALLING, USER, NO], "call_without_result"),
        ([USER, CALLING], None),
    ],
)  # fmt: skip
def test_odd_tool_turns_are_flagged(turns: list[object], flag: str | None) -> None:
    assert parsed({"messages": turns}).flag == flag


def test_the_mixed_file_becomes_what_it_must() -> None:
    made: list[str] = []
    for line in (CASES / "mixed_refusals.jsonl").read_bytes().splitlines():
        try:
            row = parse(canonical.loads(line))
        except canonical.UnreadableJsonError as error:
            made.append(error.code)
            continue
        made.append(row.code if isinstance(row, Refusal) else f"{row.shape}/{row.verdict}")
    assert made == [
        "messages/None",
        "prompt_completion/None",
        "not_json",
        "chosen_rejected/edited",
        "prose",
        "labelled/rejected",
        "question/None",
        "empty_messages",
        "corrected/edited",
        "gold/gold",
    ]


def test_arguments_as_text_or_object_become_one_row() -> None:
    one, two = (parse(canonical.loads(line)) for line in (CASES / "tool_arguments.jsonl").read_bytes().splitlines())
    assert isinstance(one, Parsed)
    assert one == two
    assert one.messages[1]["content"] is None


NAMES = st.sampled_from(
    [
        "messages",
        "prompt",
        "completion",
        "chosen",
        "rejected",
        "label",
        "correction",
        "ground_truth",
        "tools",
        "system",
        "text",
    ]
)
ROLE = st.sampled_from(["system", "developer", "user", "assistant", "tool", "robot", ""]) | st.none()
CONTENT = (
    st.none()
    | st.text(max_size=4)
    | st.integers()
    | st.lists(st.text(max_size=3) | st.just({"type": "text", "text": "x"}), max_size=2)
)
CALLS = st.lists(st.just(CALL) | st.just({"name": "f"}) | st.integers(), max_size=2)
MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": ROLE, "content": CONTENT, "tool_calls": CALLS, "tool_call_id": st.just("c1")}
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
ROWS = st.dictionaries(NAMES, MESSAGE | st.lists(MESSAGE, max_size=5) | ANYTHING, max_size=4) | ANYTHING


@given(ROWS, st.sampled_from([None, "good"]))
@settings(max_examples=600)
def test_no_row_raises_and_what_is_taken_can_be_stored(row: object, default: str | None) -> None:
    made = read(row, default_feedback=default)
    if isinstance(made, Refusal):
        assert made.sentence.endswith(".")
        return
    assert made.messages
    assert made.messages[-1]["role"] in ("user", "tool", "assistant", "system", "developer")
    assert any(message["role"] in ("user", "tool") for message in made.messages)
    assert (made.right is not None) == (made.verdict in ("edited", "gold"))
    assert made.answer is not None or made.verdict in (None, "gold")
    # Canonical already: doing it again changes nothing.
    assert [canonical.message(message) for message in made.messages] == made.messages
    for message in (made.answer, made.right):
        assert message is None or (canonical.answer(message) == message and message["role"] == "assistant")
    canonical.dumps(made.messages)


PLAIN = st.fixed_dictionaries({"role": ROLE, "content": st.text(max_size=3)})


@given(st.lists(PLAIN, max_size=5), st.sampled_from([None, "good"]))
@settings(max_examples=400)
def test_the_short_way_of_plain_rows_gives_what_the_long_way_gives(messages: list[object], default: str | None) -> None:
    row = canonical.loads(json.dumps({"messages": messages}))
    short = shapes.parse_plain(row, default_feedback=default)
    try:
        long: object = shapes._parse(row, default)
    except (shapes._Refused, canonical.BadMessageError):
        long = None
    assert short is None or short == long
    usual = (
        isinstance(long, Parsed) and long.answer is not None and all(turn["role"] != "tool" for turn in long.messages)
    )
    assert (short is not None) == usual
