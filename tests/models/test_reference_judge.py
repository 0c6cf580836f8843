"""The embedded judge: what it must tell apart, and what must hold whatever it reads."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loop_dagster.models.judge import DIMENSIONS, Case, score
from loop_dagster.models.judge_answers import judge_answers
from loop_dagster.models.reference_judge import NAME, TIE_BAND, ReferenceJudge

JUDGE = ReferenceJudge()


def _message(text: str | None, *calls: tuple[str, Any]) -> dict[str, Any]:
    made = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def _case(right: str | dict[str, Any] | None, question: str = "What is it?") -> Case:
    answer = _message(right) if isinstance(right, str) else right
    return Case(sample_id="s", messages=[{"role": "user", "content": question}], right_answer=answer)


def _score(right: str | dict[str, Any] | None, given_: str | dict[str, Any], question: str = "What is it?") -> float:
    answer = _message(given_) if isinstance(given_, str) else given_
    return score(JUDGE.rate(_case(right, question), answer))


@pytest.mark.parametrize(
    ("right", "same"),
    [
        ("Lyon", "lyon."),
        ("The shop opens at 9.", "the shop   opens at 9"),
        ("12.00", "12"),
        ("1,234.50", "1234.5"),
        ("$20", "20"),
        ("3 March 2024", "2024-03-03"),
        ("on March 3rd, 2024", "on 3 March 2024"),
        ("three days", "3 days"),
        ("It’s **free**.", "It's free"),
        ("東京です。", "東京です"),
        ("…", "…"),
    ],
)
def test_the_same_answer_in_another_spelling_has_all_points(right: str, same: str) -> None:
    assert JUDGE.rate(_case(right), _message(same)) == dict.fromkeys(DIMENSIONS, 10.0)


@pytest.mark.parametrize(
    ("question", "right", "wrong"),
    [
        ("Where are the headquarters?", "The headquarters are in Lyon.", "The headquarters are in Oslo."),
        ("When was it founded?", "It was founded on 3 March 2024.", "It was founded on 4 March 2024."),
        ("How much is it?", "It costs 45 euros.", "It costs 54 euros."),
        ("How much is it?", "1.5", "15"),
        ("How cold is it?", "-5 degrees", "5 degrees"),
        ("How much off?", "$20", "20%"),
        ("Can I return it?", "You can return it within 30 days.", "You cannot return it within 30 days."),
        ("Is it open?", "Yes, it is open on Sundays.", "No, it is not open on Sundays."),
        ("Which is larger, Mars or Venus?", "Venus", "Mars"),
        ("Which part?", "Order part A-102.", "Order part A-103."),
        ("Where is it?", "東京です。", "大阪です。"),
    ],
)
def test_a_wrong_fact_does_not_pass_however_like_the_rest_is(question: str, right: str, wrong: str) -> None:
    assert _score(right, wrong, question) < 0.70
    assert JUDGE.prefer(_case(right, question), _message(wrong), _message(right)) == "second"


@pytest.mark.parametrize(
    ("question", "right", "given_"),
    [
        ("What is the capital of France?", "Paris", "The capital of France is Paris."),
        ("Where are the headquarters of Acme?", "The headquarters of Acme are in Lyon.", "Lyon"),
        ("How much is it?", "It costs 45 euros.", "45 euros."),
        (
            "What is the return policy?",
            "You can return any item within 30 days of delivery. Refunds take five working days.",
            "Items can be returned within 30 days of delivery; refunds take 5 working days.",
        ),
    ],
)
def test_a_right_answer_in_other_words_passes(question: str, right: str, given_: str) -> None:
    assert 0.70 <= _score(right, given_, question) < 1.0


@pytest.mark.parametrize("right", ["Lyon", "It costs 45 euros.", "Yes.", "No, never on Sundays.", "3 March 2024"])
@pytest.mark.parametrize("nothing", ["ZZZ", "", "   ", "?", "zzz zzz zzz zzz", "Hello! How can I help you today?"])
def test_an_answer_about_nothing_gets_about_nothing(right: str, nothing: str) -> None:
    assert _score(right, nothing) < 0.05


def test_a_long_ramble_with_the_right_answer_in_it_loses_to_the_right_answer() -> None:
    right = "The headquarters are in Lyon."
    ramble = (
        "That is a great question! There are many cities, such as Oslo, Rome and Lima, and companies like Nordsee "
        f"have offices in 14 of them. {right} Of course this may change, so please check it again. "
    )
    for times in (1, 3, 10):
        assert _score(right, ramble * times) < 0.5
        assert JUDGE.prefer(_case(right), _message(ramble * times), _message(right)) == "second"
    assert _score(right, right * 3) < 0.9


# --- tool calls ------------------------------------------------------------------------------------------------------

RIGHT_CALLS = _message(None, ("look_up", '{"city":"Lyon","days":3}'), ("notify", '{"to":"anna"}'))


@pytest.mark.parametrize(
    ("given_", "lowest", "highest"),
    [
        (_message(None, ("notify", '{"to":"anna"}'), ("look_up", '{"days":3.0,"city":"Lyon"}')), 1.0, 1.0),
        (_message("I look it up.", ("look_up", {"city": "Lyon", "days": 3}), ("notify", {"to": "anna"})), 1.0, 1.0),
        (_message(None, ("look_up", '{"city":"Lyon","days":3}')), 0.4, 0.69),
        (_message(None, ("look_up", '{"city":"Oslo","days":3}'), ("notify", '{"to":"anna"}')), 0.6, 0.95),
        (_message(None, *[("notify", '{"to":"anna"}')] * 4), 0.0, 0.5),
        (_message(None, ("delete", '{"city":"Lyon","days":3}')), 0.0, 0.0),
        (_message('look_up(city="Lyon", days=3)'), 0.0, 0.0),
        (_message(None, ("look_up", "not json"), ("notify", "[1]")), 0.1, 0.5),
    ],
)
def test_tool_calls(given_: dict[str, Any], lowest: float, highest: float) -> None:
    assert lowest <= _score(RIGHT_CALLS, given_) <= highest


def test_a_call_that_nobody_asked_for_costs_points() -> None:
    assert _score("Lyon", _message("Lyon", ("delete", "{}"))) <= 0.5
    assert (
        _score(RIGHT_CALLS, _message(None, ("look_up", '{"city":"Lyon","days":true}'), ("notify", '{"to":"anna"}'))) < 1
    )


# --- without a right answer ------------------------------------------------------------------------------------------


def test_without_a_right_answer_nothing_passes_or_is_picked() -> None:
    for text in ("Lyon.", "A long and careful answer. " * 3, "The headquarters are in Lyon, on the Rue Neuve 5."):
        assert 0 < _score(None, text) < 0.70
    assert _score(None, "") == 0.0
    assert _score(None, "again and again and " * 30) < _score(None, "Again and again, but once.") / 2
    assert _score(None, _message(None, ("look_up", "{}"))) > 0


# --- whatever it reads -----------------------------------------------------------------------------------------------

_WORDS = "Lyon Oslo Anna 45 46 1,000 -3 12.5 % $ not never yes no the a is in open closed A-102 é 東京 . , ! returns"
WORDS = st.sampled_from(_WORDS.split())
TEXT = st.one_of(st.lists(WORDS, max_size=12).map(" ".join), st.text(max_size=60))


@given(right=TEXT, one=TEXT, other=TEXT)
@settings(max_examples=300, deadline=None)
def test_it_is_deterministic_bounded_and_blind_to_the_order(right: str, one: str, other: str) -> None:
    case = _case(right)
    ratings = JUDGE.rate(case, _message(one))
    assert ratings == ReferenceJudge().rate(case, _message(one))
    assert list(ratings) == list(DIMENSIONS)
    assert all(0 <= value <= 10 and not math.isnan(value) for value in ratings.values())
    forward = JUDGE.prefer(case, _message(one), _message(other))
    backward = JUDGE.prefer(case, _message(other), _message(one))
    assert {forward, backward} in ({"first", "second"}, {"tie"})
    difference = score(ratings) - score(JUDGE.rate(case, _message(other)))
    assert (forward == "tie") == (abs(round(difference, 9)) <= TIE_BAND)


@given(right=TEXT, given_=TEXT)
@settings(max_examples=300, deadline=None)
def test_nothing_beats_the_right_answer(right: str, given_: str) -> None:
    assume(right.strip())
    case = _case(right)
    assert score(JUDGE.rate(case, _message(right))) == 1.0
    assert JUDGE.prefer(case, _message(right), _message(given_)) in ("first", "tie")


_PLAIN = "shop opens lamp costs delivery takes refund colour returns weekend ships carriage paid"
SENTENCE = st.lists(
    st.sampled_from(_PLAIN.split()),
    min_size=4,
    max_size=10,
    unique=True,
)


@given(words=SENTENCE, number=st.integers(2, 999), data=st.data())
@settings(max_examples=200, deadline=None)
def test_each_planted_fault_costs_points(words: list[str], number: int, data: st.DataObject) -> None:
    """A right sentence; then the same with one thing wrong, and with that and another."""
    right = " ".join([*words, str(number), "Lyon"])
    places = data.draw(st.permutations(range(len(words))))
    fewer = " ".join([word for at, word in enumerate(words) if at != places[0]] + [str(number), "Lyon"])
    fewest = " ".join([word for at, word in enumerate(words) if at not in places[:2]] + [str(number), "Lyon"])
    wrong_number = right.replace(str(number), str(number + 1))
    wrong_both = wrong_number.replace("Lyon", "Oslo")
    denied = f"not {right}"
    padded, more_padded = (right + " besides there is something else entirely" * times for times in (1, 4))
    whole = _score(right, right)
    assert whole == 1.0
    assert whole > _score(right, fewer) > _score(right, fewest)
    assert whole > _score(right, wrong_number) > _score(right, wrong_both)
    assert _score(right, denied) < 0.7 and _score(right, wrong_number) < 0.7
    assert whole > _score(right, padded) > _score(right, more_padded)


@given(
    right=st.recursive(
        st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ).map(lambda arguments: _message(None, ("f", json.dumps(arguments))))
)
@settings(max_examples=100, deadline=None)
def test_a_call_equals_itself_whatever_its_arguments(right: dict[str, Any]) -> None:
    assert _score(right, right) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "1" * 50_000 + "a",
        "1." * 25_000,
        "-" * 50_000,
        "1," * 25_000 + "x",
        "é'" * 25_000,
        "a" * 50_000,
        "3 March " * 6_000,
    ],
)
def test_a_page_of_anything_is_read_in_no_time(text: str) -> None:
    began = time.process_time()
    _score("Lyon is 45 km away.", text)
    _score(text, "Lyon is 45 km away.")
    assert time.process_time() - began < 2


def test_it_judges_samples_and_says_what_it_is() -> None:
    import polars as pl

    case = _case("Lyon")
    rows = [
        ("s", "candidate", json.dumps(_message("Lyon")), "stop"),
        ("s", "incumbent", json.dumps(_message("Oslo")), "stop"),
    ]
    judged = judge_answers(
        JUDGE, [case], pl.DataFrame(rows, schema=["sample_id", "side", "answer", "finish"], orient="row")
    )
    assert judged.frame.select("candidate_score", "incumbent_score", "winner").row(0) == (1.0, 0.0, "candidate")
    assert "not a language model" in NAME and judged.usage.calls == 0
