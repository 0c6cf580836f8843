from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_adapter

from loop_dagster.errors import AdapterLeaks, AdapterRefused, BadRequest, BaseChanged
from loop_dagster.models import engine as engine_module
from loop_dagster.models.base import digest_of
from loop_dagster.models.engine import Answer, Request, TransformersEngine, open_engine

MakeAdapter = Callable[..., Path]


def _open(path: Path) -> TransformersEngine:
    engine = open_engine(base=path, base_digest=digest_of(path), dtype="float32")
    assert isinstance(engine, TransformersEngine)
    return engine


def _questions(count: int = 40, *, most: int = 24) -> list[Request]:
    """Questions of very different lengths: some with a conversation before them."""
    found = []
    table = tiny.facts(count)
    for at, fact in enumerate(table):
        messages, _ = tiny.conversation(fact, at)
        for earlier in range(at % 4):
            before, answer = tiny.conversation(table[earlier], earlier)
            messages = [*before, answer, *messages]
        found.append(Request(key=f"q{at}", messages=messages, max_new_tokens=most))
    return found


@pytest.fixture(scope="module")
def make_adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeAdapter:
    return lambda **options: tiny_adapter.adapter(tiny_model, tmp_path_factory.mktemp("adapter"), **options)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[TransformersEngine]:
    engine = _open(tiny_model)
    yield engine
    engine.close()


@pytest.fixture
def loaded(engine: TransformersEngine, make_adapter: MakeAdapter) -> Iterator[TransformersEngine]:
    """The engine with two adapters that change what it says."""
    for name, seed in (("aa", 1), ("bb", 2)):
        engine.load_adapter(name, make_adapter(seed=seed), base_digest=engine.base_digest)
    yield engine
    for name in tuple(engine.adapters):
        engine.unload_adapter(name)


@pytest.mark.model
@pytest.mark.parametrize("adapters", [(), ("aa",), ("aa", "bb")])
def test_a_batch_answers_as_one_by_one(loaded: TransformersEngine, adapters: tuple[str, ...]) -> None:
    questions = _questions()
    together = loaded.answer(questions, adapters=adapters)
    alone = [loaded.answer([question], adapters=adapters)[0] for question in questions]
    assert together == alone
    assert len({answer.prompt_tokens for answer in together}) > 5
    assert [answer.key for answer in together] == [question.key for question in questions]


@pytest.mark.model
def test_answers_are_those_of_transformers_own_generate(engine: TransformersEngine, tiny_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for question, answer in zip(_questions(12), engine.answer(_questions(12)), strict=True):
        prompt = engine.template.prompt_ids(question.messages)
        whole = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=question.max_new_tokens)[0]
        text = engine.template.tokenizer.decode(whole[len(prompt) :], skip_special_tokens=True)
        assert answer.message == engine.template.read_answer(text)
        assert answer.prompt_tokens == len(prompt)


@pytest.mark.model
def test_answers_without_an_adapter_stay_the_bases(engine: TransformersEngine, make_adapter: MakeAdapter) -> None:
    questions = _questions()
    before = engine.answer(questions)
    engine.load_adapter("aa", make_adapter(seed=1), base_digest=engine.base_digest)
    with_adapter = engine.answer(questions, adapters=["aa"])
    assert with_adapter != before
    assert engine.answer(questions) == before
    engine.load_adapter("bb", make_adapter(seed=2), base_digest=engine.base_digest)
    assert engine.answer(questions, adapters=["aa"]) == with_adapter
    assert engine.answer(questions, adapters=["bb"]) not in (before, with_adapter)
    for name in ("aa", "bb"):
        engine.unload_adapter(name)
        assert engine.answer(questions) == before
    engine.load_adapter("aa", make_adapter(seed=1), base_digest=engine.base_digest)
    assert engine.answer(questions, adapters=["aa"]) == with_adapter
    engine.unload_adapter("aa")
    engine.unload_adapter("aa")
    assert engine.adapters == frozenset()


@pytest.mark.model
def test_adapters_on_top_of_each_other_are_their_merges(
    loaded: TransformersEngine, tiny_model: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    for seed in (1, 2):
        model = PeftModel.from_pretrained(model, str(make_adapter(seed=seed))).merge_and_unload()
    merged = tmp_path / "merged"
    shutil.copytree(tiny_model, merged)
    model.save_pretrained(merged)
    questions = _questions(20)
    one = _open(merged)
    assert one.answer(questions) == loaded.answer(questions, adapters=["aa", "bb"])
    one.close()


@pytest.mark.model
def test_how_an_answer_ends(engine: TransformersEngine) -> None:
    known = _questions(1)[0].messages
    long = [{"role": "user", "content": "What is the city of banek? " * 200}]
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    answers = engine.answer(
        [
            Request(key="whole", messages=known),
            Request(key="cut", messages=known, max_new_tokens=2),
            Request(key="long", messages=long),
            Request(key="refused", messages=twice),
        ]
    )
    assert [answer.finish for answer in answers] == ["stop", "length", "too_long", "error"]
    whole, cut, too_long, refused = answers
    assert whole.message is not None and whole.message["content"].startswith("The ") and whole.answer_tokens > 2
    assert cut.message is not None and cut.answer_tokens == 2
    assert too_long == Answer("long", None, "too_long", too_long.prompt_tokens, 0) and too_long.prompt_tokens > 1024
    assert refused.message is None
    [limited] = engine.answer([Request(key="whole", messages=known)], max_length=whole.prompt_tokens - 1)
    assert limited.finish == "too_long"
    [fits] = engine.answer([Request(key="whole", messages=known)], max_length=whole.prompt_tokens)
    assert fits == whole


@pytest.mark.model
def test_the_models_limit_bounds_the_answer(engine: TransformersEngine) -> None:
    words = 1_000
    while len(engine.template.prompt_ids([{"role": "user", "content": "a " * words}])) > 1_020:
        words -= 1
    [answer] = engine.answer([Request(key="q", messages=[{"role": "user", "content": "a " * words}])])
    assert answer.answer_tokens <= 1_024 - answer.prompt_tokens


@pytest.mark.model
def test_an_answer_without_text_is_empty(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    silent = tmp_path / "silent"
    shutil.copytree(tiny_model, silent)
    weights = load_file(silent / "model.safetensors")
    weights["model.norm.weight"].zero_()  # all logits equal: the first token of the vocabulary, a special one
    save_file(weights, silent / "model.safetensors", {"format": "pt"})
    engine = _open(silent)
    [answer] = engine.answer([Request(key="q", messages=[{"role": "user", "content": "a"}], max_new_tokens=4)])
    assert (answer.message, answer.finish) == (None, "empty")
    engine.close()


@pytest.mark.model
def test_a_changed_base_is_refused_before_anything_is_loaded(
    tiny_model: Path, tmp_path: Path, make_adapter: MakeAdapter
) -> None:
    with pytest.raises(BaseChanged):
        open_engine(base=tiny_model, base_digest="0" * 64)
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    engine = _open(copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    with pytest.raises(BaseChanged):
        engine.load_adapter("aa", make_adapter(seed=1), base_digest=engine.base_digest)
    assert engine.adapters == frozenset()
    engine.close()


@pytest.mark.model
def test_adapters_that_do_not_fit_are_refused(engine: TransformersEngine, make_adapter: MakeAdapter) -> None:
    good = make_adapter(seed=1)
    for path, digest, needed in (
        (good, "f" * 64, "base"),
        (make_adapter(seed=1, config={"modules_to_save": ["embed_tokens"]}), engine.base_digest, "modules_to_save"),
        (make_adapter(seed=1, config={"peft_type": "LOHA"}), engine.base_digest, "LORA"),
        (make_adapter(seed=1, rank=128), engine.base_digest, "at most 64"),
        # Fewer modules named than the file has tensors for: PEFT would load the rest without a word.
        (make_adapter(seed=1, config={"target_modules": ["q_proj"]}), engine.base_digest, "tensors"),
    ):
        with pytest.raises(AdapterRefused, match=needed):
            engine.load_adapter("cc", path, base_digest=digest)
        assert "cc" not in engine.adapters
    before = engine.answer(_questions(5))
    engine.load_adapter("cc", good, base_digest=engine.base_digest)
    assert engine.answer(_questions(5)) == before
    engine.unload_adapter("cc")


@pytest.mark.model
def test_a_base_that_is_no_longer_itself_is_found_out(tiny_model: Path, make_adapter: MakeAdapter) -> None:
    import torch

    engine = _open(tiny_model)
    weight = next(p for name, p in engine._model.named_parameters() if name.endswith("layers.1.mlp.up_proj.weight"))
    with torch.no_grad():
        weight[0, 0] += 1e-2  # what a merge that was not wholly undone leaves behind
    with pytest.raises(AdapterLeaks):
        engine.load_adapter("aa", make_adapter(seed=1), base_digest=engine.base_digest)
    assert engine.adapters == frozenset()
    engine.close()


@pytest.mark.model
def test_small_batches_and_a_full_memory_change_no_answer(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = _questions()

    def full(times: float) -> Callable[[], None]:
        """Stands for a machine whose memory runs out so many times; counts the steps."""

        def check() -> None:
            steps.append(1)
            if len(steps) <= times:
                raise MemoryError

        steps.clear()
        return check

    steps: list[int] = []
    whole = engine.answer(questions, check=full(0))
    in_one_batch = len(steps)
    seen: list[str] = []
    assert engine.answer(questions, check=full(5), on_answer=lambda answer: seen.append(answer.key)) == whole
    assert sorted(seen) == sorted(question.key for question in questions)
    assert {answer.finish for answer in engine.answer(questions, check=full(float("inf")))} == {"error"}
    monkeypatch.setitem(engine_module.BATCH_TOKENS, "cpu", 500)
    assert engine.answer(questions, check=full(0)) == whole
    assert len(steps) > 3 * in_one_batch


@pytest.mark.model
def test_tokens_come_one_by_one_and_check_ends_it(engine: TransformersEngine) -> None:
    questions = _questions(4)
    tokens: dict[str, list[int]] = {question.key: [] for question in questions}
    answers = engine.answer(questions, on_token=lambda key, token: tokens[key].append(token))
    for answer in answers:
        text = engine.template.tokenizer.decode(tokens[answer.key], skip_special_tokens=True)
        assert answer.message == engine.template.read_answer(text)
        assert len(tokens[answer.key]) == answer.answer_tokens

    class EndedError(Exception):
        pass

    def end() -> None:
        raise EndedError

    with pytest.raises(EndedError):
        engine.answer(questions, check=end)


@pytest.mark.model
def test_sampling_is_seeded_and_greedy_at_its_limit(engine: TransformersEngine) -> None:
    messages = [{"role": "user", "content": "Tell me"}]

    def ask(**options: Any) -> dict[str, Any] | None:
        [answer] = engine.answer([Request(key="q", messages=messages, max_new_tokens=20, **options)])
        return answer.message

    assert ask(temperature=2.0, seed=1) == ask(temperature=2.0, seed=1)
    assert len({json.dumps(ask(temperature=3.0, seed=seed)) for seed in range(8)}) > 4
    assert ask(temperature=3.0, top_p=0.0, seed=1) == ask()


@pytest.mark.model
def test_an_unknown_engine_or_adapter_is_named(engine: TransformersEngine) -> None:
    with pytest.raises(BadRequest, match="there is: transformers"):
        open_engine("vllm", base=Path("x"), base_digest="y")
    with pytest.raises(BadRequest, match="zz is not loaded"):
        engine.answer(_questions(1), adapters=["zz"])
