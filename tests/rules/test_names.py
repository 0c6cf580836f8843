"""Names of pipelines and datasets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loop_dagster.errors import BadRequest
from loop_dagster.rules.names import MAX_KEY, MAX_NAME, checked_name, name_key


@pytest.mark.parametrize("name", ["", "  \t", "x" * 81])
def test_an_empty_or_long_name_is_refused_with_its_length(name: str) -> None:
    with pytest.raises(BadRequest, match=f"has 1 to 80 characters, got {len(name.strip())}") as found:
        checked_name(name, whose="A pipeline's")
    assert found.value.details["field"] == "name"


@pytest.mark.parametrize(
    ("one", "other"),
    [("Support", "SUPPORT"), ("a  b", " a b "), ("Straße", "STRASSE"), ("Ａｃｍｅ", "acme"), ("ﬁn", "FIN")],
)
def test_names_that_read_the_same_are_the_same(one: str, other: str) -> None:
    assert name_key(one) == name_key(other)


def test_names_that_differ_in_a_mark_differ() -> None:
    assert len({name_key(name) for name in ("resume", "résumé", "resume.", "re sume")}) == 4


@given(st.text(min_size=1, max_size=120))
def test_a_name_that_is_taken_stays_as_it_was_cleaned_and_fits_its_columns(name: str) -> None:
    try:
        clean = checked_name(name, whose="A dataset's")
    except BadRequest:
        return
    assert checked_name(clean, whose="A dataset's") == clean
    assert len(clean) <= MAX_NAME
    assert len(name_key(clean)) <= MAX_KEY
    assert name_key(clean) == name_key(name)
