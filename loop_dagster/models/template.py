"""One chat template for training and serving: the same conversation is the same tokens in both.

Belongs here: conversations to token ids, which ids carry a label, which ids end a turn, and an answer's text back to a
message. Does not belong here: reading model folders (base.py), truncation (nothing is ever cut), padding (by length,
in train.py) and anything that computes with weights.

`Template.load` never imports torch. Rule: rules.md, How it trains (token for token; a template without a usable
assistant mask trains by prompt/completion split; no row without a label is ever trained on).
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from loop_dagster.errors import ConversationRefused
from loop_dagster.models.base import digest_of

#: Label of a token that nothing is learned from.
IGNORED = -100

RefusalCode = Literal["template_refused", "prompt_not_prefix", "no_label"]
Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_THOUGHT = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)
_PROBE = "zq_probe_7"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One conversation: what comes before the answer, the tools on offer, and the answer that is learned."""

    key: str
    messages: Sequence[Message]
    answer: Message | None = None
    tools: Tools | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of prompt and answer; `labels` repeats an id where it is learned and holds IGNORED elsewhere.

    Both are arrays of 32-bit integers: 200,000 conversations of 500 tokens are 0.8 GB, as lists they would be 6 GB.
    """

    key: str
    input_ids: array[int]
    labels: array[int]
    prompt_tokens: int

    @property
    def tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class RowRefusal:
    """A conversation that this template does not take; the sentence holds nothing of its text."""

    key: str
    code: RefusalCode
    sentence: str


@dataclass(frozen=True)
class Template:
    """The chat template and tokenizer of one base model.

    `eos_ids` are the end tokens of the model's generation settings.
    """

    tokenizer: Any
    eos_ids: tuple[int, ...] = ()
    path: Path | None = field(default=None, compare=False)

    @classmethod
    def load(cls, path: Path | str) -> Template:
        """The template of a model folder (base.py checked it)."""
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        folder = Path(path)
        tokenizer = TokenizersBackend.from_pretrained(str(folder), local_files_only=True)
        eos: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            if (folder / name).is_file():
                eos |= _ids(json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id"))
        return cls(tokenizer, tuple(sorted(eos)), folder)

    @cached_property
    def digest(self) -> str:
        """Changes whenever the same conversation could become other tokens: tokens are counted once per this."""
        return digest_of(self.path)[:16] if self.path is not None else ""

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: end tokens of tokenizer and generation settings, and what the template puts after."""
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        first = next((i for i in self._after[:2] if i in special and self.tokenizer.decode([i]).strip()), None)
        ids = _ids(self.tokenizer.eos_token_id) | set(self.eos_ids) | ({first} if first is not None else set())
        return tuple(sorted(ids))

    @cached_property
    def _after(self) -> list[int]:
        """What the template puts after an answer at the end of a conversation."""
        return self._ids(self._text([*_PROBE_CHAT, {"role": "assistant", "content": _PROBE}]).rpartition(_PROBE)[2])

    @cached_property
    def _closes_answers(self) -> bool:
        return any(i in self.stop_ids for i in self._after)

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template writes tool calls itself; where it does not, they go into the text (see `_shown`)."""
        call = {"id": "c1", "type": "function", "function": {"name": _PROBE, "arguments": {"a": 1}}}
        asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        told = {"role": "tool", "tool_call_id": "c1", "name": _PROBE, "content": "ok"}
        try:
            return _PROBE in self._render([*_PROBE_CHAT, asked, told], None, prompt=True)
        except Exception:  # a template may refuse the role, or fail on it, in any way
            return False

    @cached_property
    def _marks_answers(self) -> bool:
        return bool(_GENERATION.search(self.tokenizer.get_chat_template()))

    def prompt_ids(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Token ids that the model is asked with. Raises ConversationRefused."""
        [found] = self.prompts([Row(key="", messages=messages, tools=tools)])
        if isinstance(found, RowRefusal):
            raise ConversationRefused(found.code, found.sentence)
        return found

    def prompts(self, rows: Sequence[Row]) -> list[list[int] | RowRefusal]:
        """Prompts of many rows, one entry per row, tokenised together; their answers are not looked at."""
        texts = [self._try(row, prompt=True) for row in rows]
        ids = iter(self._batch([text for text in texts if isinstance(text, str)]))
        return [next(ids) if isinstance(text, str) else text for text in texts]

    def encode(self, rows: Sequence[Row]) -> list[Encoded | RowRefusal]:
        """Prompt, answer and end token of many rows, one entry per row; every row needs an answer."""
        pairs = [(self._try(row, prompt=True), self._try(row, prompt=False)) for row in rows]
        fine = [(p, f) for p, f in pairs if isinstance(p, str) and isinstance(f, str)]
        prompts, fulls = iter(self._batch([p for p, _ in fine])), iter(self._batch([f for _, f in fine]))
        found: list[Encoded | RowRefusal] = []
        for row, (prompt, full) in zip(rows, pairs, strict=True):
            if isinstance(prompt, RowRefusal):
                found.append(prompt)
            elif isinstance(full, RowRefusal):
                found.append(full)
            else:
                found.append(self._encoded(row, prompt, full, next(prompts), next(fulls)))
        return found

    def sizes(self, rows: Sequence[Row]) -> list[int | RowRefusal]:
        """How many tokens `encode` gives each row, for half the work: only whole conversations are tokenised.

        Where a token spans the border between prompt and answer the count may be one or two lower than `encode`'s.
        """
        pairs = [(self._try(row, prompt=True), self._try(row, prompt=False)) for row in rows]
        ids = iter(self._batch([full for prompt, full in pairs if isinstance(prompt, str) and isinstance(full, str)]))
        return [self._size(row, prompt, full, ids) for row, (prompt, full) in zip(rows, pairs, strict=True)]

    def _size(
        self, row: Row, prompt: str | RowRefusal, full: str | RowRefusal, ids: Iterator[list[int]]
    ) -> int | RowRefusal:
        if isinstance(prompt, RowRefusal):
            return prompt
        if isinstance(full, RowRefusal):
            return full
        found = next(ids)
        if not full.startswith(prompt):
            return RowRefusal(row.key, "prompt_not_prefix", _NOT_PREFIX)
        answer = _plain(row.answer or {"role": "assistant"})
        if not answer["content"].strip() and "tool_calls" not in answer:
            return RowRefusal(row.key, "no_label", _NO_LABEL)
        if not self._closes_answers:
            return len(found) + 1
        return next(i for i in range(len(found), 0, -1) if found[i - 1] in self.stop_ids)

    def read_answer(self, text: str) -> dict[str, Any]:
        """The assistant message that a generated text is (special tokens already dropped).

        Tool calls in `<tool_call>` tags become `tool_calls` with their arguments as a JSON string; what does not parse
        stays text. What a reasoning model thinks first is not part of its answer.
        """
        text = _THOUGHT.sub("", text)
        calls: list[dict[str, Any]] = []
        rest: list[str] = []
        end = 0
        for match in _CALL.finditer(text):
            try:
                data = json.loads(match[1])
                name, arguments = str(data["name"]), data.get("arguments", data.get("parameters", {}))
            except (ValueError, KeyError, AttributeError):
                continue
            rest.append(text[end : match.start()])
            end = match.end()
            written = arguments if isinstance(arguments, str) else _canonical(arguments)
            calls.append(
                {"id": f"call_{len(calls)}", "type": "function", "function": {"name": name, "arguments": written}}
            )
        content = "".join([*rest, text[end:]]).strip()
        if not calls:
            return {"role": "assistant", "content": content}
        return {"role": "assistant", "content": content or None, "tool_calls": calls}

    def overhead(self) -> tuple[int, int]:
        """Most tokens that the template adds: (to any conversation, to each message), measured on short ones."""
        one, three = self._chat_of(1), self._chat_of(3)
        each = max(1, -(-(len(self._ids(three)) - len(self._ids(one))) // 2))
        return len(self._ids(one)), each

    def _chat_of(self, turns: int) -> str:
        roles = ("user", "assistant")
        return self._text([{"role": roles[i % 2], "content": "a"} for i in range(turns)], prompt=True)

    def _encoded(
        self, row: Row, prompt: str, full: str, prompt_ids: list[int], full_ids: list[int]
    ) -> Encoded | RowRefusal:
        if not full.startswith(prompt):
            return RowRefusal(row.key, "prompt_not_prefix", _NOT_PREFIX)
        mask: list[int] | None = None
        if full_ids[: len(prompt_ids)] == prompt_ids:
            if self._marks_answers:
                mask = self._mask(row)
        else:
            # A token spans the border between prompt and answer. The model is asked with the prompt's own ids, so
            # those are what it must learn to continue; that is sound as long as the text stays the same.
            full_ids = prompt_ids + self._ids(full[len(prompt) :])
            if self.tokenizer.decode(full_ids) != self.tokenizer.decode(self._ids(full)):
                return RowRefusal(row.key, "prompt_not_prefix", _NOT_PREFIX)
        start = len(prompt_ids)
        stops = [i for i in range(start, len(full_ids)) if full_ids[i] in self.stop_ids]
        ids = full_ids[: stops[-1] + 1] if stops else [*full_ids, self._end_id()]
        learned = range(start, len(ids))
        if mask is not None and any(mask[start:]):
            # The end token is learned also where the template's mask leaves it out: a model must learn to stop.
            learned_set = {i for i in learned if (i < len(mask) and mask[i]) or i == len(ids) - 1}
        else:
            learned_set = set(learned)
        if not any(ids[i] not in self._blank_ids for i in learned_set - {len(ids) - 1}):
            return RowRefusal(row.key, "no_label", _NO_LABEL)
        labels = [token if i in learned_set else IGNORED for i, token in enumerate(ids)]
        return Encoded(row.key, array("i", ids), array("i", labels), start)

    @cached_property
    def _blank_ids(self) -> frozenset[int]:
        """Ids that say nothing: white space and special tokens."""
        known = range(len(self.tokenizer))
        texts = self.tokenizer.batch_decode([[i] for i in known])
        special = set(self.tokenizer.all_special_ids)
        return frozenset(i for i, text in zip(known, texts, strict=True) if i in special or not text.strip())

    def _end_id(self) -> int:
        end = self.tokenizer.eos_token_id
        return int(end) if end is not None else self.stop_ids[0]

    def _mask(self, row: Row) -> list[int]:
        assert row.answer is not None
        shown, tools = self._shown([*row.messages, row.answer], row.tools)
        marked = self.tokenizer.apply_chat_template(
            shown, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(marked["assistant_masks"])

    def _try(self, row: Row, *, prompt: bool) -> str | RowRefusal:
        messages = [*row.messages] if prompt else [*row.messages, *([row.answer] if row.answer is not None else [])]
        try:
            return self._text(messages, row.tools, prompt=prompt)
        except Exception as error:  # templates are programs; what they raise is theirs
            return RowRefusal(row.key, "template_refused", self._why(error))

    def _why(self, error: Exception) -> str:
        said = str(error).strip()
        # Only words that stand in the template itself: a message built from the conversation would quote it.
        quoted = f": {said}" if said and said in str(self.tokenizer.chat_template) else f" ({type(error).__name__})"
        return f"The model's chat template does not take this conversation{quoted}"

    def _text(self, messages: Sequence[Message], tools: Tools | None = None, *, prompt: bool = False) -> str:
        shown, offered = self._shown(messages, tools)
        return self._render(shown, offered, prompt=prompt)

    def _render(self, messages: Sequence[Message], tools: Tools | None, *, prompt: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, add_generation_prompt=prompt, tokenize=False
            )
        )

    def _shown(self, messages: Sequence[Message], tools: Tools | None) -> tuple[list[dict[str, Any]], Tools | None]:
        """The messages as the template gets them: text content, tool arguments as objects.

        A template that knows no tools gets them as text: calls in `<tool_call>` tags in the assistant's turn, results
        in `<tool_response>` tags in a user's turn, the tools on offer in front of the first message.
        """
        plain = [_plain(message) for message in messages]
        uses = bool(tools) or any("tool_calls" in m or m["role"] == "tool" for m in plain)
        if not uses or self.shows_tools:
            return plain, tools
        return _written_out(plain, tools), None

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"])

    def _batch(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        found = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return [list(ids) for ids in found]


_PROBE_CHAT: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
_NOT_PREFIX = (
    "The model's chat template writes the conversation with an answer differently from the prompt alone, so what is "
    "learned would not be what is asked later."
)
_NO_LABEL = "The answer has neither text nor a tool call that the template shows."


def stop_ids(tokenizer: Any, generation_config: Any = None) -> tuple[int, ...]:
    """Ids that end an answer, for a tokenizer and generation settings that are already loaded."""
    return Template(tokenizer, tuple(sorted(_ids(getattr(generation_config, "eos_token_id", None))))).stop_ids


def rows_of(records: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Rows from records with the canonical JSON columns of the lake: sample_id, messages, tools, right_answer."""
    return [
        Row(
            key=str(record["sample_id"]),
            messages=_loaded(record["messages"]),
            answer=_loaded(record.get("right_answer")),
            tools=_loaded(record.get("tools")),
        )
        for record in records
    ]


def _loaded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return {int(each) for each in value} if isinstance(value, list | tuple | set) else {int(value)}


def _canonical(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _content(value: Any) -> str:
    if isinstance(value, list):
        return "".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in value)
    return "" if value is None else str(value)


def _arguments(value: Any) -> Any:
    """Tool arguments as the object that templates expect; keys sorted, so that both spellings give the same tokens."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    return json.loads(_canonical(value))


def _plain(message: Message) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message["role"], "content": _content(message.get("content"))}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            shown[name] = message[name]
    if message.get("tool_calls"):
        shown["tool_calls"] = [
            {
                **{name: call[name] for name in ("id",) if call.get(name) is not None},
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": _arguments(call["function"].get("arguments")),
                },
            }
            for call in message["tool_calls"]
        ]
    return shown


def _written_out(messages: list[dict[str, Any]], tools: Tools | None) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if written and written[-1]["role"] == "user" and written[-1]["content"].endswith("</tool_response>"):
                written[-1]["content"] += f"\n{content}"
                continue
        for call in message.get("tool_calls", ()):
            block = f"<tool_call>\n{_canonical(call['function'])}\n</tool_call>"
            content = f"{content}\n{block}" if content else block
        written.append({"role": role, "content": content})
    if tools and written:
        offered = "\n".join(_canonical(tool) for tool in tools)
        written[0]["content"] = (
            f"<tools>\n{offered}\n</tools>\nTo call a tool, write "
            f'<tool_call>\n{{"arguments":{{}},"name":""}}\n</tool_call>\n\n{written[0]["content"]}'
        )
    return written
