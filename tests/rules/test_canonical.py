"""Canonical JSON, messages and keys."""

from __future__ import annotations

import json
import math
import re
import unicodedata

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loop_dagster.rules import canonical
from loop_dagster.rules.canonical import BadMessageError, Number, UnreadableJsonError

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize(
    "spelling",
    ["1e2", "100", "100.0", "1E+2", "-0", "-0.0", "1.10", "0.1e-7", "123456789012345678901234567890", "9" * 4000],
)
def test_a_number_keeps_its_spelling(spelling: str) -> None:
    assert canonical.dumps(canonical.loads(f'{{"n": {spelling}, "t": "{spelling}"}}')) == (
        f'{{"n":{spelling},"t":"{spelling}"}}'
    )


def test_key_order_and_white_space_do_not_count_and_the_last_of_equal_keys_does() -> None:
    one = canonical.loads('{"b": [1, 2.50], "a": "é\\u00e9"}')
    two = canonical.loads(b'\xef\xbb\xbf\n{"a":"\xc3\xa9\xc3\xa9",\t"b":[1,2.50]}\r\n')
    assert canonical.dumps(one) == canonical.dumps(two) == '{"a":"éé","b":[1,2.50]}'
    assert canonical.dumps(canonical.loads('{"a": 1, "b": 2, "a": 3}')) == '{"a":3,"b":2}'


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "not_json"),
        ("", "not_json"),
        ("{} {}", "not_json"),
        ("{'a': 1}", "not_json"),
        ('"a\tb"', "not_json"),
        ("[01]", "not_json"),
        ("[NaN]", "not_finite"),
        ("[-Infinity]", "not_finite"),
        ('{"a": Infinity}', "not_finite"),
        ("9" * 4001, "number_too_large"),
        ("[-1e309]", "number_too_large"),
        ("[" + "9" * 309 + ".0]", "number_too_large"),
        ('{"a": 0.' + "1" * 4000 + "}", "number_too_large"),
        ('"\\ud83d"', "lone_surrogate"),
        ('{"\\udc00": 1}', "lone_surrogate"),
        ('"\\uD83D\\uD83D"', "lone_surrogate"),
        ("\ud83d", "lone_surrogate"),
        (b"\xff", "not_utf8"),
        (b'"\xed\xa0\x80"', "not_utf8"),
        ("[" * 101 + "]" * 101, "too_deep"),
        ('{"a":' * 5_000 + "1" + "}" * 5_000, "too_deep"),
        ("[" * 200_000, "too_deep"),
    ],
)
def test_what_is_no_text_or_no_json_is_refused_with_a_code(text: str | bytes, code: str) -> None:
    with pytest.raises(UnreadableJsonError) as caught:
        canonical.loads(text)
    assert caught.value.code == code
    assert caught.value.sentence.endswith(".")


def test_depth_is_counted_and_not_brackets() -> None:
    assert len(canonical.loads("[" + ",".join(["[]"] * 500) + "]")) == 500
    assert canonical.loads("[" * 100 + "]" * 100) is not None
    assert canonical.loads('"\\ud83d\\ude00"') == "😀"


@given(VALUES)
def test_loading_and_dumping_are_inverse(value: object) -> None:
    spelled = canonical.spelled(value)
    text = canonical.dumps(spelled)
    assert canonical.loads(text) == spelled
    assert canonical.dumps(canonical.loads(text)) == text
    assert canonical.dumps(canonical.loads(json.dumps(value))) == text
    assert canonical.dumps(canonical.loads(json.dumps(value, indent=3, ensure_ascii=False).encode())) == text


@given(VALUES)
def test_the_form_is_that_of_the_standard_library(value: object) -> None:
    assert canonical.dumps(canonical.spelled(value)) == json.dumps(
        value, ensure_ascii=False, sort_keys=True, separators=(",", ":")
    )


@given(st.text() | st.binary())
@settings(max_examples=300)
def test_nothing_but_the_one_error_is_raised_and_what_is_read_can_be_written(text: str | bytes) -> None:
    try:
        value = canonical.loads(text)
    except UnreadableJsonError:
        return
    canonical.dumps(value)


@pytest.mark.parametrize(
    "value",
    [math.nan, [math.inf], {1: 2}, object(), {"a": {2, 3}}, "\ud800", {"\ud800": 1}, 1 << 20_000],
    ids=lambda value: type(value).__name__,
)
def test_python_values_without_a_json_form_are_refused(value: object) -> None:
    with pytest.raises(UnreadableJsonError):
        canonical.spelled(value)


def test_deep_python_values_are_refused_and_a_number_is_not_text() -> None:
    deep: object = 1
    for _ in range(3_000):
        deep = [deep]
    with pytest.raises(UnreadableJsonError):
        canonical.spelled(deep)
    assert canonical.spelled((1, 2.0, True, None, 10**30)) == ["1", "2.0", True, None, str(10**30)]
    assert canonical.dumps(canonical.spelled((1, 10**30, "1"))) == f'[1,{10**30},"1"]'


# messages


def test_parts_join_to_the_same_message_as_plain_text() -> None:
    plain = canonical.message({"role": "user", "content": "Where is parcel 1?"})
    for parts in (
        [{"type": "text", "text": "Where is parcel 1?"}],
        [{"type": "text", "text": "Where is "}, {"type": "input_text", "text": "parcel 1?"}],
        ["Where is ", {"text": "parcel 1?"}],
    ):
        assert canonical.message({"role": "user", "content": parts}) == plain


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "unsupported_content"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "bad_content"),
        ({"role": "user", "content": [{"type": "text", "text": Number("1")}]}, "bad_content"),
        ({"role": "user", "content": {"text": "x"}}, "bad_content"),
        ({"role": "user", "content": Number("7")}, "bad_content"),
        ({"role": "user", "content": None}, "no_content"),
        ({"role": "user"}, "no_content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "no_content"),
        ({"role": "robot", "content": "x"}, "unknown_role"),
        ({"role": ["user"], "content": "x"}, "unknown_role"),
        ({"role": None, "content": "x"}, "unknown_role"),
        ({"content": "x"}, "unknown_role"),
        ("x", "bad_message"),
        ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}, "bad_tool_call"),
        ({"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}, "bad_tool_call"),
        ({"role": "assistant", "content": None, "tool_calls": ["f"]}, "bad_tool_call"),
        ({"role": "assistant", "content": None, "tool_calls": {"f": 1}}, "bad_tool_call"),
        ({"role": "assistant", "content": "", "tool_calls": [{"id": Number("1"), "name": "f"}]}, "bad_tool_call"),
        ({"role": "tool", "content": "x", "tool_call_id": Number("1")}, "bad_tool_call"),
    ],
)
def test_a_message_without_a_form_is_refused_with_a_code(message: object, code: str) -> None:
    with pytest.raises(BadMessageError) as caught:
        canonical.message(message)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("given_arguments", "stored"),
    [
        ('{"order_id": "7"}', '{"order_id":"7"}'),
        ({"order_id": "7"}, '{"order_id":"7"}'),
        ('{"b": 1e2, "a": "\\u0040"}', '{"a":"@","b":1e2}'),
        (None, "{}"),
        ("", ""),
        ("not json {", "not json {"),
        ("[1, 2]", "[1,2]"),
        ("NaN", "NaN"),
    ],
)
def test_tool_arguments_have_one_form(given_arguments: object, stored: str) -> None:
    for call in (
        {"id": "c1", "type": "function", "function": {"name": "find", "arguments": given_arguments}},
        {"id": "c1", "name": "find", "arguments": given_arguments},
    ):
        assert canonical.tool_call(call) == {
            "id": "c1",
            "type": "function",
            "function": {"name": "find", "arguments": stored},
        }


def test_what_a_message_keeps() -> None:
    full = {
        "role": "tool",
        "content": "{}",
        "tool_call_id": "c1",
        "name": "find",
        "weight": Number("1"),
        "tool_calls": None,
    }
    assert canonical.message(full) == {"role": "tool", "content": "{}", "tool_call_id": "c1", "name": "find"}
    assert canonical.message({"role": "user", "content": "x", "tool_call_id": "c1"}) == {"role": "user", "content": "x"}
    call = {"function": {"name": "f", "arguments": "{}"}}
    assert canonical.answer({"role": "assistant", "tool_calls": [call], "name": "bot", "refusal": None}) == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    assert canonical.answer("yes") == canonical.answer({"content": "yes"}) == {"role": "assistant", "content": "yes"}
    with pytest.raises(BadMessageError):
        canonical.answer({"role": "user", "content": "yes"})
    with pytest.raises(BadMessageError):
        canonical.answer(Number("1"))


# keys


def test_keys_are_signed_and_do_not_change() -> None:
    assert canonical.key("") == 0x2D06800538D394C2
    assert canonical.key("loop") == canonical.key("loop")
    assert all(-(1 << 63) <= canonical.key(str(number)) < 1 << 63 for number in range(100))
    assert any(canonical.key(str(number)) < 0 for number in range(100))
    assert canonical.text_key("[]", None) == canonical.text_key("[]", "") != canonical.text_key("[]", "[]")


def test_identities_never_meet_across_kinds_or_cuts() -> None:
    made = [
        canonical.identity("request", "shop", "r1"),
        canonical.identity("row_id", "shop", "r1"),
        canonical.identity("row_id", "sho", "pr1"),
        canonical.identity("position", "shop", "imp", "1", "{}"),
        canonical.identity("position", "shop", "imp", "11", "{}"),
        canonical.identity("position", "shop", "imp1", "1", "{}"),
    ]
    assert len(set(made)) == len(made)
    assert all(len(one) == 32 for one in made)
    assert made[0] == canonical.identity("request", "shop", b"r1")


@given(TEXT, TEXT, st.integers(0, 10**9), TEXT)
def test_identities_of_many_positions_are_those_of_one(source: str, import_id: str, position: int, text: str) -> None:
    one = canonical.identity("position", source, import_id, str(position), text)
    assert canonical.positions(source, import_id)(position, text.encode()) == one


def fold(text: str) -> str:
    return str(canonical.fold_prompt(pl.Series([canonical.prompt_text([{"role": "user", "content": text}])]))[0])


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("What is it?", "what is it ?"),
        ("What is it", "WHAT  IS\nIT…!"),
        ("Don't `run` this", "dont run this"),
        ("1.5 euros", "1,5 euros"),
        ("12:30", "12 30"),
        ("1.2.3.4", "1 2-3 / 4"),
        ("ﬁne", "fine"),
        ("Ｗｈａｔ", "what"),
        ("Ünïcode — ÇA", "ünïcode ça"),
        ("a.1", "a 1"),
    ],
)
def test_twins_fold_to_one(one: str, two: str) -> None:
    assert fold(one) == fold(two)
    assert canonical.prompt_key([{"role": "user", "content": one}]) == canonical.prompt_key(
        [{"role": "user", "content": two}]
    )


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("1.5", "15"),
        ("1 2 3", "12 3"),
        ("1 2 3", "1 23"),
        ("what is it", "what is this"),
        ("???", "!!!"),
        ("", "?"),
        ("$5", "5"),
        ("a+b", "ab"),
    ],
)
def test_different_prompts_stay_apart(one: str, two: str) -> None:
    assert fold(one) != fold(two)


def test_role_turns_and_tool_calls_count() -> None:
    def text(*messages: object) -> int:
        return canonical.prompt_key([canonical.message(item) for item in messages])

    user, system = {"role": "user", "content": "hello"}, {"role": "system", "content": "hello"}
    assert text(user) != text(system)
    assert text(user) != text(system, user)
    assert text({"role": "user", "content": "user"}) == text({"role": "user", "content": "User?"})
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    other = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 2}'}}]}
    assert text(user, call) != text(user, other)


@given(st.lists(TEXT, min_size=1, max_size=6))
def test_one_row_folds_as_in_a_column(texts: list[str]) -> None:
    column = canonical.fold_prompt(pl.Series("p", [f"user\x1d{text}" for text in texts]))
    assert column.name == "p"
    assert column.to_list() == [fold(text) for text in texts]


def test_what_is_taken_for_stable_is_what_normalising_leaves_alone() -> None:
    stable = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    found = pl.Series(stable).str.contains(f"^[{canonical._STABLE}]$")
    for sign in pl.Series(stable).filter(found):
        assert unicodedata.normalize("NFKC", sign) == sign
        assert unicodedata.combining(sign) == 0
        # Nothing stable composes with something before it.
        assert all(unicodedata.is_normalized("NFKC", base + sign) for base in "aeE가か")


def test_the_ascii_part_of_what_is_folded_is_the_whole_ascii_part() -> None:
    signs = [chr(code) for code in range(128)]
    folded = [sign for sign in signs if unicodedata.category(sign).startswith("P") or sign in "` \t\n\v\f\r"]
    assert sorted(canonical._FOLDED_ASCII.decode()) == sorted(folded)
    kept = pl.Series(signs).filter(pl.Series(signs).str.contains(f"[{canonical._FOLDED}]"))
    assert sorted(kept) == sorted(folded)


@given(st.lists(TEXT.filter(lambda text: not set(text) & {"\x1d", "\x1e"}), min_size=1, max_size=4))
@settings(max_examples=300)
def test_folding_is_what_the_rule_says(texts: list[str]) -> None:
    """The rule once more, sign by sign."""
    for text, folded in zip(
        texts, canonical.fold_prompt(pl.Series([f"user\x1d{text}" for text in texts])), strict=True
    ):
        lowered = str(pl.Series([unicodedata.normalize("NFKC", text)]).str.to_lowercase()[0])
        out: list[str] = []
        gap = False
        for sign in lowered:
            if re.match(
                r"[`\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]", sign
            ) or unicodedata.category(sign).startswith("P"):
                gap = True
                continue
            if gap and out and unicodedata.category(out[-1]) == "Nd" and unicodedata.category(sign) == "Nd":
                out.append("\x1f")
            out.append(sign)
            gap = False
        if unicodedata.unidata_version >= "16" or all(unicodedata.category(sign) != "Cn" for sign in text):
            assert folded == "user\x1d" + ("".join(out) or lowered)


@given(TEXT, st.sampled_from([" ", "\n", "!", "?", ".", "…", "`", "—", "«", "\u00a0"]))
def test_case_and_marks_between_letters_never_count(text: str, mark: str) -> None:
    marked = mark.join(["ab", "cd"]) + mark
    assert fold(text + "x" + marked.upper()) == fold(text + "xabcd")
