"""The embedded judge: compares an answer with the right one by what it says, without any model or network.

Belongs here: reading an answer into facts and words, and the ratings made of them. Does not belong here: asking,
counting and failing (`judge.py`).

What it can do: tell a right short answer (a name, a number, a date, a label, a tool call, a sentence or two of facts)
from a wrong, partial, padded or missing one; the same every time, whatever the order.
What it cannot: it knows no synonyms and no world. A right answer in other words is rated low, a fluent wrong one that
shares the words but not the facts as well. It reads English month names, number words and negations; other languages
are compared by words, numbers and names alone. Without a right answer it sees only the form: correctness and
completeness are then 5 of 10 for anything that is not broken, so that nothing passes (0.70) or is picked (0.8) unread.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from loop_dagster.models.judge import Case, Message, Preference, Ratings, Usage, score

NAME = "reference (compares with the right answer; not a language model)"

#: Two answers whose scores differ by no more are a tie, so that a comma does not win a sample.
TIE_BAND = 0.02

#: Weight of a token: what the answer is about counts most, the glue least.
FACT, WORD, GLUE = 3.0, 1.0, 0.15

_GLUE_TEXT = (
    "a an the this that these those is are was were be been being am do does did has have had will would can could "
    "should may might must of in on at to for from by with as and or but so if then than it its i you he she they we "
    "me my your his her their our us them there here what which who whom when where how please sure hello hi thanks "
    "thank answer question"
)
_GLUE = frozenset(_GLUE_TEXT.split())
_NEGATIONS = frozenset(
    ("not", "no", "never", "none", "nobody", "nothing", "neither", "nor", "without", "cannot", "false", "incorrect")
)
_YES, _NO = frozenset(("yes", "true")), frozenset(("no", "false"))
_UNITS = frozenset("$€£¥%")
_NUMBER_WORDS = {
    word: str(number)
    for number, word in enumerate(
        ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"), start=2
    )
}
_MONTHS = {
    name: number
    for number, names in enumerate(
        (
            *("january jan", "february feb", "march mar", "april apr", "may", "june jun", "july jul", "august aug"),
            *("september sep sept", "october oct", "november nov", "december dec"),
        ),
        start=1,
    )
    for name in names.split()
}
_MONTH = "|".join(sorted(_MONTHS, key=len, reverse=True))
_DAY_MONTH = re.compile(rf"\b(\d{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?({_MONTH})\b\.?,?\s+(\d{{4}})\b", re.IGNORECASE)
_MONTH_DAY = re.compile(rf"\b({_MONTH})\b\.?\s+(\d{{1,2}})(?:st|nd|rd|th)?,?\s+(\d{{4}})\b", re.IGNORECASE)
# Scripts written without spaces are compared character by character.
_UNSPACED = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\u0e00-\u0e7f"
_TOKEN = re.compile(
    r"\d{4}-\d{2}-\d{2}"  # a date
    # A number standing alone. Nothing in it is given back: a page of digits must not be tried in every partition.
    r"|(?<![\w.])[-−]?\d++(?:,\d{3})++(?:\.\d++)?(?!\w)|(?<![\w.])[-−]?(?:\d++(?:\.\d++)?|\.\d++)(?![\w.]*\w)"
    r"|[$€£¥%]"
    rf"|[{_UNSPACED}]"
    rf"|[^\W{_UNSPACED}]+(?:['’.\-][^\W{_UNSPACED}]+)*",  # a word, with what joins its parts
)


@dataclass(frozen=True, slots=True)
class _Text:
    """An answer read: its tokens in order, and which of them are facts (numbers, dates, names)."""

    text: str
    tokens: tuple[str, ...]
    numbers: frozenset[str]
    names: frozenset[str]
    units: frozenset[str]
    negations: int

    @property
    def facts(self) -> frozenset[str]:
        return self.numbers | self.names


class ReferenceJudge:
    """See the module's docstring. Ratings are multiples of 0.1."""

    name = NAME
    concurrency = 1
    usage = Usage()
    needs_right_answer = True  # without one it sees the form alone, which says nothing of an unreviewed answer

    def rate(self, case: Case, answer: Message) -> Ratings:
        """Correctness, completeness and style of `answer`, 0 to 10 each, against the right answer if there is one."""
        form = _form(_text_of(answer), bool(answer.get("tool_calls")))
        right = case.right_answer
        if right is None:
            ratings = (0.5 * form, 0.5 * form, form)
        elif right.get("tool_calls"):
            ratings = _rate_calls(_calls_of(right), _calls_of(answer))
        else:
            prompt = read(" ".join(_text_of(message) for message in case.messages))
            ratings = _rate_text(read(_text_of(right)), read(_text_of(answer)), prompt, form)
            if answer.get("tool_calls"):  # a call that nobody asked for is not the right answer, whatever its text
                ratings = (ratings[0] / 2, ratings[1] / 2, ratings[2] / 2)
        names = ("correctness", "completeness", "style")
        return {name: round(10 * max(0.0, value), 1) for name, value in zip(names, ratings, strict=True)}

    def prefer(self, case: Case, first: Message, second: Message) -> Preference:
        """The better rated one, a tie within `TIE_BAND`: swapping the two swaps the preference."""
        difference = round(score(self.rate(case, first)) - score(self.rate(case, second)), 9)
        if abs(difference) <= TIE_BAND:
            return "tie"
        return "first" if difference > 0 else "second"


# --- text ------------------------------------------------------------------------------------------------------------


def read(text: str) -> _Text:
    """Tokens of a text with numbers, dates and number words in one spelling; names are words with a capital.

    A capital at the start of a sentence says nothing in a longer text; in one of up to five words it may be a name.
    """
    text = unicodedata.normalize("NFKC", text).replace("’", "'")
    text = _DAY_MONTH.sub(lambda m: _iso(m[3], m[2], m[1]), text)
    text = _MONTH_DAY.sub(lambda m: _iso(m[3], m[1], m[2]), text)
    found = [(match[0], match.start()) for match in _TOKEN.finditer(text)]
    tokens, numbers, names = [], set(), set()
    for raw, start in found:
        token = _fold(raw)
        tokens.append(token)
        if any(character.isdigit() for character in token):
            numbers.add(token)
        elif _is_name(raw, token) and (len(found) <= 5 or not _starts_sentence(text, start)):
            names.add(token)
    units = frozenset(token for token in tokens if token in _UNITS)
    negations = sum(token in _NEGATIONS or token.endswith("n't") for token in tokens)
    return _Text(text.strip(), tuple(tokens), frozenset(numbers), frozenset(names), units, negations)


def _iso(year: str, month: str, day: str) -> str:
    return f"{year}-{_MONTHS[month.lower()]:02}-{int(day):02}"


def _fold(raw: str) -> str:
    token = raw.casefold().replace("−", "-").removesuffix("'s")
    token = _NUMBER_WORDS.get(token, token)
    bare = token.replace(",", "")
    if re.fullmatch(r"-?(\d++(?:\.\d*+)?|\.\d++)", bare):
        whole, dot, part = bare.partition(".")
        part = part.rstrip("0")
        sign = "-" if whole.startswith("-") else ""
        return sign + (whole.lstrip("-").lstrip("0") or "0") + (f".{part}" if dot and part else "")
    return token


def _is_name(raw: str, token: str) -> bool:
    return raw[:1].isupper() and token not in _GLUE and token not in _NEGATIONS | _YES | _NO


def _starts_sentence(text: str, start: int) -> bool:
    before = text[:start].rstrip(" \t\"'(*_#>-")
    return not before or before[-1] in ".!?:\n"


def _weights(tokens: Iterable[str], facts: frozenset[str], asked: frozenset[str]) -> dict[str, float]:
    """Summed weight of each token; a multiset, so that saying a thing twice does not count for two things."""
    total: dict[str, float] = {}
    for token in tokens:
        weight = FACT if token in facts else GLUE if token in _GLUE or token in asked else WORD
        total[token] = total.get(token, 0.0) + weight
    return total


def _rate_text(right: _Text, given: _Text, prompt: _Text, form: float) -> tuple[float, float, float]:
    """(correctness, completeness, style), each 0 to 1."""
    if _same(right, given):
        return 1.0, 1.0, 1.0
    if not given.tokens or not right.tokens:
        return 0.0, 0.0, 0.0
    asked = _repeated(right, prompt)
    facts = (right.facts | given.facts) - asked
    wanted, said = _weights(right.tokens, facts, asked), _weights(given.tokens, facts, asked)
    shared = math.fsum(min(weight, said.get(token, 0.0)) for token, weight in wanted.items())
    recall, precision = shared / sum(wanted.values()), shared / sum(said.values())
    overlap, order, truth = _mean_of(precision, recall), _order(right.tokens, given.tokens), _truth(right, given, asked)
    correctness = min(0.95, truth * overlap * (0.65 + 0.35 * order))
    needed = right.facts - asked
    missing = len(needed - frozenset(given.tokens)) / len(needed) if needed else 0.0
    completeness = recall * (1 - 0.7 * missing) * (0.3 + 0.7 * truth) * (0.75 + 0.25 * order)
    shape = form * _length_fit(len(right.tokens), len(given.tokens))
    return correctness, completeness, shape * min(1.0, 0.2 + correctness) * min(1.0, 4 * overlap * truth)


def _repeated(right: _Text, prompt: _Text) -> frozenset[str]:
    """The prompt's tokens, which an answer may repeat or leave out without saying more or less.

    Empty when the right answer itself only picks from the prompt ("Which is larger, Mars or Venus?" "Venus.").
    """
    asked = frozenset(prompt.tokens)
    return asked if frozenset(right.tokens) - _GLUE - asked else frozenset()


def _same(right: _Text, given: _Text) -> bool:
    """The same words and numbers; a currency or percent sign on one side only does not count."""
    if not right.tokens or not given.tokens:
        return right.text == given.text
    if right.tokens == given.tokens:
        return True
    if right.units and given.units:
        return False
    bare = [tuple(token for token in side.tokens if token not in side.units) for side in (right, given)]
    return bare[0] == bare[1]


def _truth(right: _Text, given: _Text, asked: frozenset[str]) -> float:
    """How far the answer's facts stand with the right one's, 1 for all: what differs weighs more than any wording."""
    wanted, said = right.facts - asked, frozenset(given.tokens)
    foreign = given.facts - frozenset(right.tokens) - asked
    truth = 1.0
    if wanted:
        held = len(wanted & said)
        agreed = _mean_of(held / (held + len(foreign)) if held else 0.0, held / len(wanted))
        truth *= 0.15 + 0.85 * agreed
    elif foreign:
        truth *= max(0.4, 1 - 0.2 * len(foreign))
    if right.negations % 2 != given.negations % 2:
        truth *= 0.25
    for yes, no in ((_YES, _NO), (_NO, _YES)):
        if yes & frozenset(right.tokens) and not no & frozenset(right.tokens) and not yes & said:
            truth *= 0.25 if no & said else 0.7
    if right.units and given.units and not right.units & given.units:
        truth *= 0.25
    return truth


def _order(right: Sequence[str], given: Sequence[str]) -> float:
    """Whether what both say comes in the same order: share of neighbours that agree; 1 where there is no order."""
    both = frozenset(right) & frozenset(given)
    pairs = Counter(pairwise(token for token in right if token in both))
    if not pairs:
        return 1.0
    shared = pairs & Counter(pairwise(token for token in given if token in both))
    return sum(shared.values()) / sum(pairs.values())


def _mean_of(precision: float, recall: float) -> float:
    """Their harmonic mean (F1)."""
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _length_fit(right: int, given: int) -> float:
    """1 up to twice or half as long, then falling: 0.5 at eight times."""
    apart = abs(math.log2(given / right))
    return 1.0 if apart <= 1 else max(0.1, 1 - 0.25 * (apart - 1))


def _form(text: str, has_calls: bool) -> float:
    """Form alone, 0 to 1: there is something, it does not repeat itself, it is made of words."""
    stripped = text.strip()
    if not stripped:
        return 1.0 if has_calls else 0.0
    words = stripped.casefold().split()
    form = 1.0
    if len(words) >= 8:  # four-word runs that come again: the loop that a broken model falls into
        runs = Counter(zip(words, words[1:], words[2:], words[3:], strict=False))
        form *= len(runs) / sum(runs.values())
    if re.search(r"(.)\1{5,}", re.sub(r"[\s\-=_.*#|]+", " ", stripped)):
        form *= 0.5
    letters = sum(character.isalnum() for character in stripped)
    if letters * 2 < len(re.sub(r"\s", "", stripped)):
        form *= 0.5
    return form


# --- tool calls ------------------------------------------------------------------------------------------------------


def _rate_calls(wanted: Sequence[tuple[str, Any]], given: Sequence[tuple[str, Any]]) -> tuple[float, float, float]:
    """Calls in any order, text ignored. A call matches as far as its name and arguments do; each is matched once."""
    left = list(given)
    agreed = 0.0
    for call in wanted:
        best = max(left, key=lambda other: _call_match(call, other), default=None)
        if best is not None and (match := _call_match(call, best)) > 0:
            agreed += match
            left.remove(best)
    most = max(len(wanted), len(given))
    correctness = agreed / most
    texts = Counter(json.dumps(call, sort_keys=True) for call in given)
    tidy = len(texts) / sum(texts.values()) if texts else 0.0
    return correctness, agreed / len(wanted), tidy * min(1.0, 2 * correctness)


def _call_match(wanted: tuple[str, Any], given: tuple[str, Any]) -> float:
    """0 for another function; 0.3 for the function and up to 0.7 for its arguments, by key and value."""
    if wanted[0] != given[0]:
        return 0.0
    mine, theirs = wanted[1], given[1]
    if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
        return 1.0 if _equal(mine, theirs) else 0.3
    keys = mine.keys() | theirs.keys()
    if not keys:
        return 1.0
    right = sum(key in mine and key in theirs and _equal(mine[key], theirs[key]) for key in keys)
    return 0.3 + 0.7 * right / len(keys)


def _equal(mine: Any, theirs: Any) -> bool:
    """JSON equality: 2 equals 2.0, true does not equal 1."""
    if isinstance(mine, bool) or isinstance(theirs, bool):
        return mine is theirs
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        return mine.keys() == theirs.keys() and all(_equal(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list) and isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(_equal, mine, theirs))
    return bool(mine == theirs)


def _calls_of(message: Message) -> list[tuple[str, Any]]:
    """(function, arguments) of each call; arguments that are not JSON stay the text they are."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        calls.append((str(function.get("name")), arguments))
    return calls


def _text_of(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
