"""What one row of a file becomes: the import table of rules.md.

Belongs here: one decoded row in, a `Parsed` sample with its verdict or a `Refusal` out, and what is odd about a
conversation that is taken all the same. Does not belong here: reading files, redaction, identity, storing.

Where the table is silent (ours):
* A key whose value is null counts as absent. Unknown keys are dropped, but a top-level `system` text is put first.
* `label` is true or false; as files really carry it also "true"/"false" in any case and the numbers 1 and 0.
* A question with `ground_truth` or `correction` is gold: there is no answer of a model that could be wrong.
* `label: false` beside a correction says the same thing twice; `label: true` contradicts it and is refused.
* `labels` as samples are shown with them, a list of objects with `label` and maybe `key` and `parent`, are tags and
  attributes of that row alone. Anything else of that name is another file's column and is dropped like any unknown key.
* A role that is none of canonical.ROLES is refused, since no chat template could place it; an odd order of known roles
  is stored and flagged, so that it can be found and never stops an attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from loop_dagster.errors import BadRequest
from loop_dagster.rules import canonical, tags
from loop_dagster.rules.canonical import BadMessageError, Json, Message, Number, UnreadableJsonError

Shape: TypeAlias = Literal[
    "messages", "prompt_completion", "labelled", "corrected", "gold", "chosen_rejected", "question"
]
Verdict: TypeAlias = Literal["accepted", "rejected", "edited", "gold"]
Flag: TypeAlias = Literal[
    "late_system",
    "two_user_turns",
    "two_assistant_turns",
    "starts_with_assistant",
    "tool_without_call",
    "call_without_result",
]

#: What each flag says to a person.
FLAGS: Final[Mapping[Flag, str]] = {
    "late_system": "A system or developer message comes after the first turn.",
    "two_user_turns": "Two user turns follow each other.",
    "two_assistant_turns": "Two assistant turns follow each other.",
    "starts_with_assistant": "The conversation begins with an assistant turn.",
    "tool_without_call": "A tool message answers no tool call before it.",
    "call_without_result": "A tool call has no result before the next turn.",
}

#: Code and sentence of each refusal that is decided here; canonical.py brings its own.
REFUSALS: Final[Mapping[str, str]] = {
    "not_an_object": "The row is not a JSON object with a conversation.",
    "prose": "The row is prose without a conversation: there is no question and no answer in it.",
    "unknown_shape": "The row has none of `messages`, `prompt`, or `prompt` with `chosen` and `rejected`.",
    "ambiguous_shape": "The row says its conversation twice, as `messages` and as `prompt`, `completion` or `chosen`.",
    "empty_messages": "`messages` is empty.",
    "bad_messages": "`messages` is not a list of messages.",
    "no_question": "The conversation has no turn of a user or a tool to answer.",
    "empty_prompt": "`prompt` is empty or is neither text nor a list of messages.",
    "prompt_ends_in_answer": "`prompt` ends in an assistant turn, so it is no question.",
    "empty_answer": "The answer is empty.",
    "bad_answer": "The answer, or a correction of it, is neither text nor one assistant message.",
    "empty_correction": "The correction, `ground_truth` or chosen answer is empty.",
    "half_a_pair": "The row has one of `chosen` and `rejected` without the other, or without a `prompt`.",
    "chosen_is_rejected": "`chosen` and `rejected` are the same.",
    "bad_label": "`label` is neither true nor false.",
    "verdict_without_answer": "The row has a `label` and no answer that it could be about.",
    "contradicting_verdicts": "The row's verdicts contradict each other.",
    "bad_labels": "One of the row's `labels` cannot be a tag or an attribute.",
    "too_many_labels": f"The row has more than {tags.MAX_ON_SAMPLE} tags and attributes, those of the call among them.",
}

DEFAULT_FEEDBACK: Final = ("good",)


class RowLabel(NamedTuple):
    """A tag (without a value) or an attribute of one row; `parent` groups a tag."""

    label: str
    value: str | None
    parent: str | None

    @property
    def name(self) -> tags.Name:
        return self.label, self.value is not None


class Parsed(NamedTuple):
    """A row that becomes a sample. All messages are canonical; nothing is redacted yet.

    `messages` is the prompt, `answer` None where the row waits for one, `right` the right answer of an edited or gold
    verdict, `verdict` None where the row waits for review.
    """

    messages: list[Message]
    answer: Message | None
    tools: list[Json] | None
    verdict: Verdict | None
    right: Message | None
    shape: Shape
    flag: Flag | None
    labels: tuple[RowLabel, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that is left out. `sentence` is for a person and never quotes the row."""

    code: str
    sentence: str


def parse_plain(row: object, *, default_feedback: str | None = None) -> Parsed | None:
    """`parse` of the most common row at a fifth of its cost, None for any other.

    That is an object with nothing but `messages`, each with nothing but a known role and a text, the last an answer.
    It holds no number, so it may come from a parser that does not keep their spelling. The messages are not copied.
    """
    if type(row) is not dict or len(row) != 1 or type(row.get("messages")) is not list:
        return None
    messages = row["messages"]
    roles = []
    for item in messages:
        if type(item) is not dict or len(item) != 2 or type(item.get("content")) is not str:
            return None
        roles.append(item.get("role"))
    order = tuple(roles)
    if not all(type(role) is str for role in order):
        return None
    usual, odd = plain_order(order)
    answer = messages[-1] if usual else None
    if answer is None or not answer["content"].strip():
        return None
    return Parsed(messages[:-1], answer, None, plain_verdict(default_feedback), None, "messages", odd)


def plain_verdict(default_feedback: str | None) -> Verdict | None:
    """The verdict of a plain row (`parse_plain`), which says nothing about its answer."""
    return "accepted" if default_feedback == "good" else None


@lru_cache(maxsize=4_096)
def plain_order(roles: tuple[str, ...]) -> tuple[bool, Flag | None]:
    """Whether messages with these roles can be a plain row (`parse_plain`), and what is odd about their order."""
    usual = canonical.ROLES.issuperset(roles) and "tool" not in roles and "user" in roles[:-1]
    return usual and roles[-1] == "assistant", _odd_order(roles)


class _Refused(Exception):  # never leaves this module
    def __init__(self, code: str) -> None:
        self.code = code


def parse(row: Json, *, default_feedback: str | None = None) -> Parsed | Refusal:
    """What a decoded row (canonical.loads or canonical.spelled) becomes; never raises for what a file holds."""
    plain = parse_plain(row, default_feedback=default_feedback)
    if plain is not None:
        return plain
    try:
        return _parse(row, default_feedback)
    except _Refused as refused:
        return Refusal(refused.code, REFUSALS[refused.code])
    except (BadMessageError, UnreadableJsonError) as error:
        return Refusal(error.code, error.sentence)


def _parse(row: Json, default_feedback: str | None) -> Parsed:
    if not isinstance(row, dict):
        raise _Refused("prose" if isinstance(row, str) and not isinstance(row, Number) else "not_an_object")
    given = {name: value for name, value in row.items() if value is not None}
    tools = _tools(given.get("tools"))
    shape: Shape
    pair = [name for name in ("chosen", "rejected") if name in given]
    if "messages" in given:
        if "prompt" in given or "completion" in given or pair:
            raise _Refused("ambiguous_shape")
        messages, answer = _split(_messages(given["messages"]))
        shape = "messages"
    elif "prompt" in given:
        messages = _prompt(given["prompt"])
        if pair:
            messages = _with_system(messages, given.get("system"))
            return _preference(messages, given, tools)
        answer = _answer(given["completion"], messages, "empty_answer") if "completion" in given else None
        shape = "prompt_completion"
    elif pair:
        raise _Refused("half_a_pair")
    else:
        raise _Refused("prose" if isinstance(given.get("text"), str) else "unknown_shape")
    messages = _with_system(messages, given.get("system"))
    verdict, right = _verdict(given, messages, answer)
    if answer is None:
        shape = "gold" if verdict == "gold" else "question"
    elif verdict is not None:
        shape = _VERDICT_SHAPES[verdict]
    elif default_feedback == "good":
        verdict = "accepted"
    return Parsed(
        messages, answer, tools, verdict, right, shape, flag(messages, answer), _row_labels(given.get("labels"))
    )


_VERDICT_SHAPES: Final[Mapping[Verdict, Shape]] = {
    "accepted": "labelled",
    "rejected": "labelled",
    "edited": "corrected",
    "gold": "gold",
}


def _messages(value: Json) -> list[Message]:
    if not isinstance(value, list):
        raise _Refused("bad_messages")
    if not value:
        raise _Refused("empty_messages")
    return [item if _is_plain(item) else canonical.message(item) for item in value]


def _is_plain(item: Json) -> bool:
    """Whether a message is canonical as it stands; most are, and this is a tenth of the cost of finding out why not."""
    return (
        type(item) is dict
        and len(item) == 2
        and type(item.get("content")) is str
        and type(item.get("role")) is str
        and item["role"] in canonical.ROLES
    )


def _split(messages: list[Message]) -> tuple[list[Message], Message | None]:
    """Prompt and answer: the last assistant turn is the answer; a conversation that ends otherwise waits for one."""
    answer = None
    if messages[-1]["role"] == "assistant":
        answer = _answer(messages[-1], [], "empty_answer")
        messages = messages[:-1]
    elif messages[-1]["role"] not in ("user", "tool"):
        raise _Refused("no_question")
    if not any(message["role"] in ("user", "tool") for message in messages):
        raise _Refused("no_question")
    return messages, answer


def _prompt(value: Json) -> list[Message]:
    if isinstance(value, str) and not isinstance(value, Number):
        if not value.strip():
            raise _Refused("empty_prompt")
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise _Refused("empty_prompt")
    messages, answer = _split(_messages(value))
    if answer is not None:
        raise _Refused("prompt_ends_in_answer")
    return messages


def _with_system(messages: list[Message], system: Json) -> list[Message]:
    if (
        not isinstance(system, str)
        or isinstance(system, Number)
        or not system.strip()
        or messages[0]["role"] == "system"
    ):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _answer(value: Json, prompt: list[Message], empty: str) -> Message:
    """One assistant message from text, a message, or a list of messages that may repeat the prompt first."""
    if isinstance(value, list):
        if len(value) > 1 and value[:-1] and _messages(value[:-1]) == prompt:
            value = value[-1:]
        if len(value) != 1:
            raise _Refused("bad_answer" if value else empty)
        value = value[0]
    if _is_plain(value) and value["role"] == "assistant" and value["content"].strip():
        return {"role": "assistant", "content": value["content"]}
    if not isinstance(value, str | dict) or isinstance(value, Number):
        raise _Refused("bad_answer")
    answer = canonical.answer(value)
    if not (answer["content"] or "").strip() and "tool_calls" not in answer:
        raise _Refused(empty)
    return answer


def _preference(messages: list[Message], given: Mapping[str, Any], tools: list[Json] | None) -> Parsed:
    """`prompt` + `chosen` + `rejected`: the rejected answer, corrected to the chosen one."""
    if "completion" in given:
        raise _Refused("ambiguous_shape")
    if "chosen" not in given or "rejected" not in given:
        raise _Refused("half_a_pair")
    if any(name in given for name in ("label", "correction", "ground_truth")):
        raise _Refused("contradicting_verdicts")
    chosen = _answer(given["chosen"], messages, "empty_correction")
    rejected = _answer(given["rejected"], messages, "empty_answer")
    if chosen == rejected:
        raise _Refused("chosen_is_rejected")
    return Parsed(messages, rejected, tools, "edited", chosen, "chosen_rejected", flag(messages, rejected))


def _verdict(
    given: Mapping[str, Any], messages: list[Message], answer: Message | None
) -> tuple[Verdict | None, Message | None]:
    label = _label(given["label"]) if "label" in given else None
    correction = _answer(given["correction"], messages, "empty_correction") if "correction" in given else None
    truth = _answer(given["ground_truth"], messages, "empty_correction") if "ground_truth" in given else None
    if truth is not None:
        if correction is not None and correction != truth:
            raise _Refused("contradicting_verdicts")
        return "gold", truth
    if correction is not None:
        if label is True:
            raise _Refused("contradicting_verdicts")
        return ("edited" if answer is not None else "gold"), correction
    if label is None:
        return None, None
    if answer is None:
        raise _Refused("verdict_without_answer")
    return ("accepted" if label else "rejected"), None


def _label(value: Json) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):  # numbers too: canonical.Number is its spelling
        word = value.strip().lower()
        if word in ("true", "false") and not isinstance(value, Number):
            return word == "true"
        if word in ("0", "1") and isinstance(value, Number):
            return word == "1"
    raise _Refused("bad_label")


def _row_labels(value: Json) -> tuple[RowLabel, ...]:
    """The labels of a row, each tag and each key once; the last of one counts."""
    if not isinstance(value, list) or not all(map(_is_label, value)):
        return ()
    found: dict[tags.Name, RowLabel] = {}
    try:
        for item in value:
            key, parent = item.get("key") or "", item.get("parent")
            clean = tags.labels([], {key: item["label"]}) if key else tags.labels([item["label"]])
            for word in clean.tags:
                found[word, False] = RowLabel(word, None, tags.parent(parent) or None)
            for word, text in clean.attributes:
                found[word, True] = RowLabel(word, text, None)
    except BadRequest:
        raise _Refused("bad_labels") from None
    if len(found) > tags.MAX_ON_SAMPLE:
        raise _Refused("too_many_labels")
    return tuple(found.values())


def _is_label(item: Json) -> bool:
    """Whether this is a label as samples are shown with it, and no other file's word for something else."""
    if not isinstance(item, dict) or "label" not in item or not item.keys() <= {"key", "label", "parent"}:
        return False
    return all(value is None or type(value) is str for value in item.values())


def _tools(value: Json) -> list[Json] | None:
    """Tools of a row: a list of objects, or that list as JSON text, as data sets with one schema keep it."""
    if isinstance(value, str) and not isinstance(value, Number):
        if not value.strip():
            return None
        try:
            value = canonical.loads(value)
        except UnreadableJsonError:
            raise BadMessageError("bad_tools", "`tools` is text that is not JSON.") from None
    return canonical.tools(value)


def flag(messages: list[Message], answer: Message | None) -> Flag | None:
    """The first odd thing about a conversation, in the order of FLAGS; None when a chat template expects it so."""
    turns = messages if answer is None else [*messages, answer]
    with_tools = any(turn["role"] == "tool" or "tool_calls" in turn for turn in turns)
    odd = _odd_order(tuple(turn["role"] for turn in turns))
    return odd if odd is not None or not with_tools else _odd_tools(turns)


@lru_cache(maxsize=4_096)
def _odd_order(roles: tuple[str, ...]) -> Flag | None:
    turns = [role for role in roles if role not in ("system", "developer")]
    first = next((place for place, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    if len(turns) < len(roles) - first:
        return "late_system"
    pairs = set(pairwise(turns))
    if ("user", "user") in pairs:
        return "two_user_turns"
    if ("assistant", "assistant") in pairs:
        return "two_assistant_turns"
    if turns and turns[0] == "assistant":
        return "starts_with_assistant"
    return None


def _odd_tools(turns: list[Message]) -> Flag | None:
    """Whether every tool message answers a call that is open, and every call is answered before the next turn."""
    found: set[Flag] = set()
    opened: list[str | None] = []
    for turn in turns:
        if turn["role"] == "tool":
            answered = turn.get("tool_call_id")
            if answered in opened:
                opened.remove(answered)
            elif opened and (answered is None or None in opened):
                opened.pop(0)
            else:
                found.add("tool_without_call")
        else:
            if opened:
                found.add("call_without_result")
            opened = [call.get("id") for call in turn.get("tool_calls", ())]
    return next((name for name in FLAGS if name in found), None)
