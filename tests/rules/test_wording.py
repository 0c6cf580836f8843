"""What a person is told about a value is said in the project's words, for every kind of error that there is."""

from __future__ import annotations

import typing

import pytest
from pydantic_core import ErrorDetails
from pydantic_core.core_schema import ErrorType

from loop_dagster.errors import BadRequest
from loop_dagster.rules.conditions import DatasetConditions
from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.rules.wording import sentence_of

LIMITS = dict.fromkeys(("gt", "ge", "lt", "le", "min_length", "max_length"), 3) | {"expected": "'a' or 'b'"}
LIBRARY = ("Input", "Tuple", "List", "Dictionary", "String", "Value", "Field", "should", "valid", "validation")


@pytest.mark.parametrize("kind", sorted(typing.get_args(ErrorType)))
def test_no_kind_of_error_speaks_as_the_library(kind: str) -> None:
    told = sentence_of({"type": kind, "loc": ("tags", 3), "msg": "Value error, ours", "ctx": LIMITS})
    assert told.startswith("tags.3")
    assert told.endswith(".")
    assert not any(word in told for word in LIBRARY), told


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        ({"type": "too_long", "loc": ("tags",), "msg": "", "ctx": {"max_length": 31}},
         "tags must have at most 31 entries."),
        ({"type": "int_from_float", "loc": (), "msg": "", "ctx": {}}, "It must be a whole number."),
        ({"type": "datetime_from_date_parsing", "loc": ("to",), "msg": "", "ctx": {"error": "x"}},
         "to must be a time with its zone, as in 2026-01-31T00:00:00Z."),
        ({"type": "value_error", "loc": ("a", "b"), "msg": "Value error, one, two", "ctx": {}}, "a.b: one, two."),
    ],
)  # fmt: skip
def test_a_sentence_says_what_is_needed(error: ErrorDetails, sentence: str) -> None:
    assert sentence_of(error, "It") == sentence


def test_settings_and_conditions_use_these_words() -> None:
    with pytest.raises(BadRequest, match=r"^tags must have at most 31 entries\. Nothing was saved\."):
        PipelineSettings.from_json({"tags": [f"t{number}" for number in range(40)]})
    with pytest.raises(BadRequest, match=r"^tags must be a list\. match must be 'any' or 'all'\. Nothing"):
        DatasetConditions.from_json({"tags": "x", "match": "most"})
