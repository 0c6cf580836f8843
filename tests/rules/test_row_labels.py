"""Labels that a row of a file brings itself: as samples are shown with them, and nothing else of that name."""

from __future__ import annotations

from typing import Any

import pytest

from loop_dagster.rules import canonical
from loop_dagster.rules.shapes import Parsed, Refusal, RowLabel, parse

PAIR = {"prompt": "Question", "completion": "Answer"}


def labels(value: Any) -> Any:
    found = parse(canonical.spelled({**PAIR, "labels": value}))
    return found.labels if isinstance(found, Parsed) else found


def test_tags_groups_and_attributes() -> None:
    shown = [
        {"key": "", "label": " Billing ", "parent": "money"},
        {"label": "vip"},
        {"key": "Team", "label": " North: 1 ", "parent": None},
        {"key": None, "label": "vip", "parent": ""},
        {"key": "vip", "label": "old"},
        {"key": "vip", "label": "gold"},
        {"key": "", "label": "team"},
    ]
    assert labels(shown) == (
        RowLabel("billing", None, "money"),
        RowLabel("vip", None, None),
        RowLabel("team", "North: 1", None),
        RowLabel("vip", "gold", None),
        RowLabel("team", None, None),
    )


@pytest.mark.parametrize(
    "column",
    [
        None,
        [],
        "billing",
        ["billing"],
        [1, 0],
        {"label": "x"},
        [{"label": 1}],
        [{"label": "PER", "start": 0, "end": 4}],
        [{"label": "x"}, "y"],
        [{"key": "team"}],
    ],
)
def test_what_another_file_calls_labels_is_dropped(column: Any) -> None:
    assert labels(column) == ()


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ([{"label": "no spaces"}], "bad_labels"),
        ([{"label": ""}], "bad_labels"),
        ([{"label": "fine", "parent": "not fine"}], "bad_labels"),
        ([{"key": "team", "label": "x" * 501}], "bad_labels"),
        ([{"key": "no spaces", "label": "x"}], "bad_labels"),
        ([{"label": f"t{number}"} for number in range(33)], "too_many_labels"),
        ([{"label": f"t{number}"} for number in range(32)] + [{"key": "t0", "label": "x"}], "too_many_labels"),
    ],
)
def test_labels_that_cannot_be_refuse_the_row(wrong: Any, code: str) -> None:
    found = labels(wrong)
    assert isinstance(found, Refusal)
    assert found.code == code
