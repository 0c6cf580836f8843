from __future__ import annotations

import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loop_dagster.rules.ratings import read_preference, read_rating, read_ratings

DIMENSIONS = ("correctness", "completeness", "style")
GOOD = {"correctness": 7, "completeness": "8/10", "style": "9.5"}


@pytest.mark.parametrize(
    ("value", "rating"),
    [
        (0, 0.0),
        (10, 10.0),
        (7.25, 7.25),
        ("7", 7.0),
        (" 7.5 ", 7.5),
        (".5", 0.5),
        ("10", 10.0),
        ("10/10", 10.0),
        ("8 / 10", 8.0),
        ("8 out of 10", 8.0),
        ("8 OUT OF 10", 8.0),
        ("0", 0.0),
    ],
)
def test_readable_ratings(value: object, rating: float) -> None:
    assert read_rating(value) == rating


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        -0.1,
        10.000001,
        11,
        math.nan,
        math.inf,
        -math.inf,
        10**400,
        "11",
        "100",
        "70/100",
        "8/5",
        "-1",
        "+7",
        "7.",
        "1e1",
        "1_0",
        "７",
        "٧",
        "seven",
        "nan",
        "inf",
        "",
        " ",
        "8/10 because it is right",
        "about 8",
        "8,5",
        "7" + " " * 100 + "/10",
        "0" * 1_000_000,
        [7],
        {"rating": 7},
        b"7",
    ],
)
def test_everything_else_is_unreadable(value: object) -> None:
    assert read_rating(value) is None


@pytest.mark.parametrize(
    "reply",
    [
        json.dumps(GOOD),
        json.dumps({**GOOD, "reasons": "It says 3/10 somewhere."}),
        f"  {json.dumps(GOOD)}\n",
        f"```json\n{json.dumps(GOOD, indent=2)}\n```",
        f"```\r\n{json.dumps(GOOD)}\r\n```",
        f"``` JSON \n{json.dumps(GOOD)}```",
    ],
)
def test_readable_replies(reply: str) -> None:
    assert read_ratings(reply, DIMENSIONS) == {"correctness": 7.0, "completeness": 8.0, "style": 9.5}


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "null",
        "[7, 8, 9]",
        "7",
        json.dumps({"correctness": 7, "completeness": 8}),
        json.dumps({**GOOD, "style": None}),
        json.dumps({**GOOD, "style": 12}),
        json.dumps({"ratings": GOOD}),
        json.dumps(GOOD)[:-2],
        '{"correctness": 7, "completeness": 8, "style": NaN}',
        '{"correctness": 7, "completeness": 8, "style": Infinity}',
        '{"correctness": 7, "completeness": 8, "style": 1e999}',
        '{"correctness": 1, "completeness": 8, "style": 9, "correctness": 10}',
        f"Here you are: {json.dumps(GOOD)}",
        f"```json\n{json.dumps(GOOD)}\n``` That is all.",
        f"```python\n{json.dumps(GOOD)}\n```",
        f"{json.dumps(GOOD)} {json.dumps(GOOD)}",
        "[" * 90_000,
        '{"a":' * 50_000,
        '{"correctness": ' + "9" * 5_000 + ', "completeness": 8, "style": 9}',
        "```" * 30_000,
        "```\n" + " " * 99_000,
        json.dumps({**GOOD, "reasons": "x" * 100_000}),
    ],
)
def test_unreadable_replies(reply: str) -> None:
    assert read_ratings(reply, DIMENSIONS) is None


@given(st.text(max_size=200) | st.from_regex(r"\A[`{}\[\]\":,0-9a-z \n/.]{0,120}\Z"))
def test_no_reply_breaks_the_reader(reply: str) -> None:
    ratings = read_ratings(reply, DIMENSIONS)
    assert ratings is None or all(0 <= rating <= 10 for rating in ratings.values())
    assert read_preference(reply) in (None, "first", "second", "tie")


@given(st.floats(0, 10), st.floats(0, 10), st.integers(0, 10))
def test_numbers_come_back_as_they_were(one: float, two: float, three: int) -> None:
    reply = json.dumps({"correctness": one, "completeness": two, "style": three})
    assert read_ratings(reply, DIMENSIONS) == {"correctness": one, "completeness": two, "style": float(three)}


def test_hostile_replies_are_read_quickly() -> None:
    begin = time.perf_counter()
    for reply in ("```\n" + " \t" * 49_000, "`" * 99_000, '{"' + "\\" * 90_000, "{" * 99_000, "7" * 99_000):
        assert read_ratings(reply, DIMENSIONS) is None
        assert read_preference(reply) is None
    assert time.perf_counter() - begin < 2


@pytest.mark.parametrize(
    ("reply", "preference"),
    [
        ('{"better": "first"}', "first"),
        ('{"better": " Second "}', "second"),
        ('```json\n{"better": "tie"}\n```', "tie"),
        ("first", "first"),
        (' "SECOND"\n', "second"),
        ('{"better": "A"}', None),
        ('{"better": 1}', None),
        ('{"better": ["first"]}', None),
        ('{"better": "first", "better": "second"}', None),
        ('{"winner": "first"}', None),
        ("The first one.", None),
        ("first second", None),
        ("", None),
    ],
)
def test_preferences(reply: str, preference: str | None) -> None:
    assert read_preference(reply) == preference
