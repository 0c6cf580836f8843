from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from loop_dagster.errors import ConversationRefused
from loop_dagster.models.template import IGNORED, Encoded, Row, RowRefusal, Template, stop_ids

CASES = Path(__file__).parent.parent / "cases"
END = "<|im_end|>"
USER = [{"role": "user", "content": "Which colour does banek have?"}]
ANSWER = {"role": "assistant", "content": "The colour of banek is red."}

WITHOUT_TOOLS = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] \
+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
WITH_BOS = "{{ bos_token }}" + WITHOUT_TOOLS
#: The mask of this one leaves the end token out.
MARKED = """{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' }}\
{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\\n' }}{% else %}{{ '<|im_start|>' + \
message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
#: Writes something into the prompt that the finished conversation does not have.
THINKING = WITHOUT_TOOLS.replace(
    "'<|im_start|>assistant\\n' }}{% endif %}", "'<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
#: No end of turn, and a prompt that ends inside what becomes one token.
PLAIN = """{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
QUOTING = "{{ raise_exception('cannot take ' + messages[0]['content']) }}"


@pytest.fixture(scope="module")
def original(tiny_model: Path) -> Template:
    return Template.load(tiny_model)


def with_template(original: Template, chat_template: str) -> Template:
    tokenizer = copy.deepcopy(original.tokenizer)
    tokenizer.chat_template = chat_template
    return Template(tokenizer, original.eos_ids)


def encoded(template: Template, messages: Any = USER, answer: Any = ANSWER, tools: Any = None) -> Encoded:
    [found] = template.encode([Row(key="r", messages=messages, answer=answer, tools=tools)])
    assert isinstance(found, Encoded), found
    return found


def refused(template: Template, messages: Any = USER, answer: Any = ANSWER) -> RowRefusal:
    [found] = template.encode([Row(key="r", messages=messages, answer=answer)])
    assert isinstance(found, RowRefusal), found
    return found


def learned(template: Template, row: Encoded) -> str:
    return str(template.tokenizer.decode([token for token in row.labels if token != IGNORED]))


def test_without_generation_marks_exactly_the_answer_and_its_end_are_learned(original: Template) -> None:
    for template in (original, with_template(original, WITHOUT_TOOLS), with_template(original, WITH_BOS)):
        row = encoded(template)
        assert learned(template, row) == ANSWER["content"] + END
        assert all(label == IGNORED for label in row.labels[: row.prompt_tokens])


def test_the_end_token_keeps_its_label_though_it_pads_too(original: Template) -> None:
    assert original.tokenizer.pad_token_id == original.tokenizer.eos_token_id
    row = encoded(original)
    assert row.labels[-1] == row.input_ids[-1] == original.tokenizer.eos_token_id


@pytest.mark.parametrize("chat_template", [tiny.TEMPLATE, WITHOUT_TOOLS, WITH_BOS, MARKED, PLAIN])
def test_what_is_asked_in_serving_begins_what_was_learned(original: Template, chat_template: str) -> None:
    template = with_template(original, chat_template)
    row = encoded(template)
    asked = template.prompt_ids(USER)
    assert list(row.input_ids[: row.prompt_tokens]) == asked
    assert learned(template, row).removesuffix(END).strip() == ANSWER["content"]


def test_there_is_one_bos_also_with_a_tokenizer_that_adds_one_itself(original: Template) -> None:
    from tokenizers.processors import TemplateProcessing

    template = with_template(original, WITH_BOS)
    bos = template.tokenizer.bos_token_id
    raw = template.tokenizer.backend_tokenizer
    raw.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)])
    assert template.tokenizer("x")["input_ids"][0] == bos  # it does add one of its own
    row = encoded(template)
    assert list(row.input_ids).count(bos) == 1
    assert template.prompt_ids(USER).count(bos) == 1
    assert row.input_ids[0] == bos


def test_a_usable_mask_is_used_and_the_end_token_is_learned_beside_it(original: Template) -> None:
    template = with_template(original, MARKED)
    chat = [*USER, {"role": "assistant", "content": "It is blue."}, {"role": "user", "content": "And banlum?"}]
    row = encoded(template, chat)
    assert learned(template, row) == ANSWER["content"] + END  # not the earlier answer, and it must learn to stop


def test_a_prompt_that_is_not_the_beginning_of_the_conversation_is_refused(original: Template) -> None:
    assert refused(with_template(original, THINKING)).code == "prompt_not_prefix"


def test_a_token_over_the_border_is_learned_as_it_will_be_asked(original: Template) -> None:
    template = with_template(original, PLAIN)
    row = encoded(template)
    whole = template.tokenizer("user: Which colour does banek have?\nassistant: The", add_special_tokens=False)
    assert template.prompt_ids(USER) != whole["input_ids"][: row.prompt_tokens]  # " The" would be one token
    assert template.tokenizer.decode(list(row.input_ids[: row.prompt_tokens])).endswith("assistant: ")
    assert row.labels[-1] == template.tokenizer.eos_token_id  # the template ends no turn, the end token does


@pytest.mark.parametrize(
    "messages",
    [
        [*USER, {"role": "user", "content": "I mean the secret-77 one."}],
        [*USER, {"role": "assistant", "content": "x"}, *USER, {"role": "user", "content": "secret-77"}],
    ],
)
def test_a_conversation_that_the_template_refuses_is_a_refusal_with_a_sentence(
    original: Template, messages: list[dict[str, str]]
) -> None:
    found = refused(original, messages)
    assert found.code == "template_refused"
    assert "Two user turns in a row" in found.sentence
    assert "secret-77" not in found.sentence
    with pytest.raises(ConversationRefused, match="Two user turns"):
        original.prompt_ids(messages)


def test_a_refusal_never_quotes_the_conversation(original: Template) -> None:
    found = refused(with_template(original, QUOTING), [{"role": "user", "content": "secret-77"}])
    assert found.code == "template_refused"
    assert "secret-77" not in found.sentence


def test_one_refused_row_leaves_the_others_as_they_are(original: Template) -> None:
    good, bad = Row(key="g", messages=USER, answer=ANSWER), Row(key="b", messages=[*USER, *USER], answer=ANSWER)
    found = original.encode([good, bad, good])
    assert [type(each) for each in found] == [Encoded, RowRefusal, Encoded]
    assert found[0] == found[2] == encoded(original) or found[0].input_ids == found[2].input_ids  # type: ignore[union-attr]


@pytest.mark.parametrize("content", ["", "  \n", None])
def test_an_answer_that_says_nothing_carries_no_label(original: Template, content: str | None) -> None:
    assert refused(original, answer={"role": "assistant", "content": content}).code == "no_label"


@pytest.mark.parametrize("chat_template", [tiny.TEMPLATE, WITHOUT_TOOLS])
def test_tool_arguments_as_string_or_object_are_the_same_tokens(original: Template, chat_template: str) -> None:
    template = with_template(original, chat_template)
    lines = (CASES / "tool_arguments.jsonl").read_text().splitlines()
    as_string, as_object = [json.loads(line)["messages"] for line in lines]
    assert as_string[1]["content"] is None  # stays legal
    rows = [encoded(template, chat[:-1], chat[-1]) for chat in (as_string, as_object)]
    assert rows[0].input_ids == rows[1].input_ids
    assert rows[0].labels == rows[1].labels
    calls = [encoded(template, chat[:1], chat[1]) for chat in (as_string, as_object)]
    assert calls[0].input_ids == calls[1].input_ids
    assert "find_order" in learned(template, calls[0])
    assert "order_id" in learned(template, calls[0])


def test_the_order_of_keys_in_arguments_does_not_count(original: Template) -> None:
    def calling(arguments: Any) -> Any:
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }

    one, two = (
        encoded(original, answer=calling('{"b": 1, "a": 2}')),
        encoded(original, answer=calling({"a": 2, "b": 1})),
    )
    assert one.input_ids == two.input_ids


@pytest.mark.parametrize("chat_template", [tiny.TEMPLATE, WITHOUT_TOOLS])
def test_tools_on_offer_reach_the_model(original: Template, chat_template: str) -> None:
    template = with_template(original, chat_template)
    tool = {"type": "function", "function": {"name": "find_order", "parameters": {"type": "object"}}}
    prompt = template.tokenizer.decode(template.prompt_ids(USER, [tool]))
    assert "find_order" in prompt
    assert "find_order" not in template.tokenizer.decode(template.prompt_ids(USER))


def test_a_call_that_was_learned_is_read_back_as_that_call(original: Template) -> None:
    for template in (original, with_template(original, WITHOUT_TOOLS)):
        call = {"id": "c", "type": "function", "function": {"name": "find_order", "arguments": '{"order_id":"7"}'}}
        row = encoded(template, answer={"role": "assistant", "content": None, "tool_calls": [call]})
        read = template.read_answer(learned(template, row).removesuffix(END))
        assert read["content"] is None
        assert [each["function"] for each in read["tool_calls"]] == [call["function"]]


@pytest.mark.parametrize("text", ["<tool_call>not json</tool_call>", "<tool_call>[1]</tool_call>", "plain", ""])
def test_what_is_no_call_stays_text(original: Template, text: str) -> None:
    assert original.read_answer(text) == {"role": "assistant", "content": text}


def test_what_a_model_thinks_first_is_not_its_answer(original: Template) -> None:
    told = original.read_answer("<think>\nLet me see.\n</think>\n\nIt is red.")
    assert told == {"role": "assistant", "content": "It is red."}
    assert original.read_answer("Write <think> so.")["content"] == "Write <think> so."


def test_stop_ids_are_those_of_tokenizer_settings_and_template(original: Template) -> None:
    from transformers import GenerationConfig

    tokenizer = copy.deepcopy(original.tokenizer)
    end, text_end = tokenizer.convert_tokens_to_ids([END, "<|endoftext|>"])
    assert stop_ids(tokenizer) == (end,)
    tokenizer.eos_token = "<|endoftext|>"  # what base models say, while the template ends turns otherwise
    assert set(stop_ids(tokenizer)) == {end, text_end}
    assert set(stop_ids(tokenizer, GenerationConfig(eos_token_id=[end, 5]))) == {5, end, text_end}


def test_the_text_parts_of_a_message_are_its_text(original: Template) -> None:
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "Which colour "}, {"type": "text", "text": "is it?"}]}
    ]
    whole = [{"role": "user", "content": "Which colour is it?"}]
    assert original.prompt_ids(parts) == original.prompt_ids(whole)


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


@settings(max_examples=150, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=4), TEXT)
def test_sizes_are_the_lengths_of_what_is_encoded(original: Template, turns: list[str], answer: str) -> None:
    roles = ("user", "assistant")
    odd = turns if len(turns) % 2 else turns[:-1]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(odd)]
    row = Row(key="r", messages=messages, answer={"role": "assistant", "content": answer})
    [size], [row_encoded] = original.sizes([row]), original.encode([row])
    if isinstance(size, RowRefusal) or isinstance(row_encoded, RowRefusal):
        assert isinstance(row_encoded, RowRefusal)
        assert row_encoded.code == "no_label"
    else:
        assert size == row_encoded.tokens
        assert original.prompt_ids(messages) == list(row_encoded.input_ids[: row_encoded.prompt_tokens])
