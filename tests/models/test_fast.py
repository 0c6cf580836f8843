from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from loop_dagster.models import fast
from loop_dagster.models.template import IGNORED, Encoded, Row, Template

pytestmark = pytest.mark.model
COUNT = 6


@pytest.fixture(scope="module")
def rows(tiny_model: Path) -> list[Encoded]:
    """Rows of different lengths behind one system prompt."""
    template = Template.load(tiny_model)
    system = {"role": "system", "content": "red blue green"}
    made = []
    for number, fact in enumerate(tiny.facts(COUNT)):
        messages, answer = tiny.conversation(fact, number)
        longer = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}] * (number % 3)
        made.append(Row(key=str(number), messages=[system, *longer, *messages], answer=answer))
    found = template.encode(made)
    assert all(isinstance(row, Encoded) for row in found)
    return [row for row in found if isinstance(row, Encoded)]


def lora(model: Any, *, warm: bool = True, **more: Any) -> Any:
    """`model` with an adapter whose weights are not zero, so that it matters."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **more)
    made = get_peft_model(model, config)
    if warm:
        for name, value in made.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(value, std=0.05)
    return made


def loaded(path: Path, dtype: str = "float32", **more: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return lora(AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)), **more)


def gradients(model: Any) -> dict[str, Any]:
    found = {name: value.grad.clone() for name, value in model.named_parameters() if value.requires_grad}
    model.zero_grad()
    return found


def test_packed_and_fused_training_has_the_plain_loss_and_the_plain_gradients(
    tiny_model: Path, rows: list[Encoded]
) -> None:
    import torch

    model = loaded(tiny_model)
    plain_loss = fast.plain_loss_sum(model, rows)
    plain_loss.backward()
    plain = gradients(model)
    assert fast.fuse(model) == 14  # seven linear layers in each of two blocks
    packed_loss = fast.loss_sum(model, fast.pack(rows, torch.float32))
    packed_loss.backward()
    packed = gradients(model)
    assert torch.allclose(plain_loss, packed_loss, rtol=1e-5)
    assert plain.keys() == packed.keys()
    for name, gradient in plain.items():
        assert gradient.abs().max() > 0, name
        assert torch.allclose(gradient, packed[name], rtol=1e-3, atol=1e-4 * float(gradient.abs().max())), name
    fast.unfuse(model)
    assert torch.allclose(plain_loss, fast.plain_loss_sum(model, rows))


def test_the_adapters_own_weights_and_gradients_stay_float32_over_a_bfloat16_base(
    tiny_model: Path, rows: list[Encoded]
) -> None:
    import torch

    model = loaded(tiny_model, "bfloat16")
    plain = float(fast.plain_loss_sum(model, rows).detach())
    assert fast.speed_up(model, rows[:3], "bfloat16")
    loss = fast.loss_sum(model, fast.pack(rows, torch.bfloat16))
    loss.backward()
    assert {gradient.dtype for gradient in gradients(model).values()} == {torch.float32}
    assert float(loss.detach()) == pytest.approx(plain, rel=fast.TOLERANCE["bfloat16"])


def test_what_all_rows_begin_with_is_there_once(rows: list[Encoded]) -> None:
    import torch

    shared = fast.shared_prefix(rows)
    assert shared > 5
    packed = fast.pack(rows, torch.float32)
    assert packed["input_ids"].shape[1] == shared + sum(row.tokens - shared for row in rows)
    learned = [token for row in rows for token in row.labels if token != IGNORED]
    assert packed["targets"].tolist() == learned
    at = packed["position_ids"][0]
    assert int(at.max()) == max(row.tokens for row in rows) - 1


def test_a_row_alone_needs_no_mask(rows: list[Encoded]) -> None:
    import torch

    assert "attention_mask" not in fast.pack(rows[:1], torch.float32)


@pytest.mark.parametrize("more", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
def test_a_layer_of_another_kind_stays_as_it_is(tiny_model: Path, more: dict[str, Any]) -> None:
    assert fast.fuse(loaded(tiny_model, **more)) == 0


def test_a_model_that_mixes_rows_in_spite_of_the_mask_is_found_out(rows: list[Encoded]) -> None:
    """Short convolutions look at the neighbours in the sequence, whatever row they are of."""
    import torch
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=640,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    model = lora(Lfm2ForCausalLM(config))
    with torch.no_grad():
        plain = fast.plain_loss_sum(model, rows)
    assert not fast.speed_up(model, rows, "float32")
    with torch.no_grad():
        assert torch.equal(plain, fast.plain_loss_sum(model, rows))  # and it is as it was


ROWS = st.lists(st.tuples(st.integers(2, 40), st.integers(1, 20)), min_size=1, max_size=20)


def encoded(number: int, prompt: int, answer: int) -> Encoded:
    ids = [7] * min(3, prompt - 1) + [100 + number] * (prompt - min(3, prompt - 1)) + [200] * answer
    return Encoded(str(number), array("i", ids), array("i", [IGNORED] * prompt + [200] * answer), prompt)


@given(ROWS, st.integers(1, 120))
def test_every_row_is_in_one_group_and_only_a_row_alone_is_over_the_limit(
    sizes: list[tuple[int, int]], limit: int
) -> None:
    rows = [encoded(i, prompt, answer) for i, (prompt, answer) in enumerate(sizes)]
    groups = fast.split(rows, limit)
    assert sorted(row.key for group in groups for row in group) == sorted(row.key for row in rows)
    for group in groups:
        shared = fast.shared_prefix(group)
        assert len(group) == 1 or shared + sum(row.tokens - shared for row in group) <= limit


@given(ROWS)
def test_the_shared_beginning_is_shared_and_ends_before_every_prompt_does(sizes: list[tuple[int, int]]) -> None:
    rows = [encoded(i, prompt, answer) for i, (prompt, answer) in enumerate(sizes)]
    shared = fast.shared_prefix(rows)
    assert 0 <= shared < min(row.prompt_tokens for row in rows)
    assert len({tuple(row.input_ids[:shared]) for row in rows}) == 1
