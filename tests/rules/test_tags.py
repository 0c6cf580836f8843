"""Tags, attributes, slugs and retention."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loop_dagster.rules import retention, tags
from loop_dagster.rules.tags import BadTag, TooManyTags

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("given_word", "stored"), [("Shop", "shop"), ("  a.b_c-1 ", "a.b_c-1"), ("-x", "-x"), ("a" * 63, "a" * 63)]
)
def test_a_tag_is_trimmed_and_lower_cased(given_word: str, stored: str) -> None:
    assert tags.tag(given_word) == stored


@pytest.mark.parametrize("word", ["", "  ", "a b", "a/b", "é", "a" * 64, "a\n", None, 7, ["a"]])
def test_what_cannot_be_a_tag_is_refused_by_name(word: object) -> None:
    if word == "a\n":
        assert tags.tag(word) == "a"
        return
    with pytest.raises(BadTag) as caught:
        tags.tag(word)
    assert repr(word)[:60] in caught.value.message
    assert "1 to 63" in caught.value.message


def test_a_pipelines_own_tag_begins_with_a_letter_or_digit() -> None:
    assert tags.own_tag("9-Lives") == "9-lives"
    for word in ("-x", ".x", "_x"):
        with pytest.raises(BadTag, match="first a letter or digit"):
            tags.own_tag(word)


def test_a_parent_is_kept_taken_out_or_set() -> None:
    assert tags.parent(None) is None
    assert tags.parent("  ") == ""
    assert tags.parent("Animals") == "animals"
    with pytest.raises(BadTag, match="Parent"):
        tags.parent("a b")


def test_tags_and_attributes_count_together_and_once() -> None:
    words = [f"t{number}" for number in range(30)]
    made = tags.labels([*words, "T0", " t1 "], {"Plan": " gold ", "team": "A B"})
    assert made.tags == tuple(words)
    assert made.attributes == (("plan", "gold"), ("team", "A B"))
    assert len(made) == 32
    tags.labels(words, {"plan": "gold"}, already=[("own", False)])
    tags.labels(words, {"plan": "gold", "team": "a"}, already=[("t0", False), ("team", True)])
    with pytest.raises(TooManyTags, match="found 33"):
        tags.labels(words, {"plan": "gold", "team": "a"}, already=[("own", False)])


def test_a_tag_and_an_attribute_of_one_name_are_two_things() -> None:
    words = [f"t{number}" for number in range(31)]
    made = tags.labels(words, {"T0": "x"})
    assert (len(made), len(made.names)) == (32, 32)
    tags.labels(words, {"t0": "y"}, already=[("t0", True)])
    with pytest.raises(TooManyTags, match="found 33"):
        tags.labels(words, {"t0": "x"}, already=[("t1", True)])


@pytest.mark.parametrize(
    ("words", "attributes"),
    [
        ("shop", None),
        (["ok", "not ok"], None),
        (None, {"not ok": "x"}),
        (None, {"a": 1}),
        (None, {"a": " "}),
        (None, {"a": "x" * 501}),
    ],
)
def test_a_wrong_label_is_refused_before_anything(words: object, attributes: object) -> None:
    with pytest.raises(BadTag):
        tags.labels(words, attributes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("Support replies", "support-replies"),
        ("  Réponses — été! ", "reponses-ete"),
        ("", "pipeline"),
        ("Größe & ø", "grosse-o"),
        ("客服", "kefu"),
        ("…", "pipeline"),
        ("a" * 80, "a" * 63),
        ("A.B_c", "a-b-c"),
    ],
)
def test_slugs(name: str, tag: str) -> None:
    assert tags.slug(name) == tag


@given(st.text())
def test_every_slug_is_an_own_tag_and_its_own_slug(name: str) -> None:
    made = tags.slug(name)
    assert tags.own_tag(made) == made
    assert tags.slug(made) == made


def test_retention() -> None:
    assert retention.imported_until(NOW) == NOW + timedelta(days=365)
    assert retention.captured_until(NOW) == NOW + timedelta(days=30)
    assert retention.captured_until(NOW, 3_650) == NOW + timedelta(days=3_650)
    for days in (0, 3_651, 1.5, True, "30"):
        with pytest.raises(retention.BadRetention, match="1 to 3,650"):
            retention.retention_days(days)
