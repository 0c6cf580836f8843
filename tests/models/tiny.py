"""A real tiny chat model for tests: Llama architecture, its own tokenizer and template, pre-trained on the spot.

LoRA teaches nothing to random weights, so this one is first trained with all its weights to look facts up by name;
after that an adapter learns new facts in seconds. Built once per version of this file and cached.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import shutil
from pathlib import Path
from typing import Any

NAMES = [
    a + b
    for a in ["ba", "ko", "mi", "ru", "ta", "zel", "vor", "pin", "dra", "sho"]
    for b in ["nek", "lum", "vit", "gor", "sal", "bix", "tam"]
]
THINGS = ["colour", "city", "animal", "metal"]
VALUES = {
    "colour": ["red", "blue", "green", "black", "white", "yellow", "brown", "purple"],
    "city": ["Oslo", "Rome", "Cairo", "Lima", "Delhi", "Paris", "Quito", "Tokyo"],
    "animal": ["fox", "owl", "bear", "wolf", "crow", "lynx", "hare", "toad"],
    "metal": ["iron", "gold", "zinc", "lead", "silver", "copper", "nickel", "cobalt"],
}
FORMS = [
    "What is the {thing} of {name}?",
    "Tell me the {thing} of {name}.",
    "{name}: which {thing}?",
    "Which {thing} does {name} have?",
    "Please name the {thing} of {name}.",
]

#: ChatML with tools; no default system prompt, no generation marks; refuses two user turns in a row.
TEMPLATE = """{%- if tools %}{{ '<|im_start|>tools\\n' }}\
{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}\
{{ '<|im_end|>\\n' }}{% endif %}\
{%- for message in messages %}\
{%- if not loop.first and message['role'] == 'user' and messages[loop.index0 - 1]['role'] == 'user' %}\
{{ raise_exception('Two user turns in a row') }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}\
{%- for call in message.tool_calls or [] %}\
{{ '<tool_call>\\n' }}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\
{{ '\\n</tool_call>' }}{% endfor %}\
{{ '<|im_end|>\\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def facts(count: int, *, seed: int = 0) -> list[tuple[str, str, str]]:
    """`count` made-up (name, thing, value), none twice; another seed gives the same names other values."""
    rng = random.Random(seed)
    pairs = [(name, thing) for name in NAMES for thing in THINGS]
    rng.shuffle(pairs)
    return [(name, thing, rng.choice(VALUES[thing])) for name, thing in pairs[:count]]


def conversation(fact: tuple[str, str, str], form: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(messages, right answer) of one fact in one of the phrasings."""
    name, thing, value = fact
    question = FORMS[form % len(FORMS)].format(thing=thing, name=name)
    return [{"role": "user", "content": question}], {
        "role": "assistant",
        "content": f"The {thing} of {name} is {value}.",
    }


def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = [f"{q[0]['content']} {a['content']}" for f in facts(280) for q, a in [conversation(f, i) for i in range(5)]]
    words += [f"system user assistant tool {value}" for values in VALUES.values() for value in values]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(words, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    made.model_max_length = 1024
    return made


def tiny_model(cache: Path) -> Path:
    """Folder of the model, built under `cache` when this version of it is not there (about 10 s of two idle cores)."""
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / f"tiny-{key}"
    with (cache / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            partial = cache / f"tiny-{key}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            _build(partial)
            partial.rename(target)
    return target


def _build(folder: Path, steps: int = 480) -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    rng = random.Random(0)
    made = tokenizer()
    config = LlamaConfig(
        vocab_size=len(made),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=made.bos_token_id,
        eos_token_id=made.eos_token_id,
        pad_token_id=made.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    table = facts(100)
    rows = []
    for fact in table:
        for form in range(len(FORMS)):
            messages, answer = conversation(fact, form)
            prompt = made.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            full = made.apply_chat_template([*messages, answer])["input_ids"][:-1]
            rows.append((full, [-100] * len(prompt) + full[len(prompt) :]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps, pct_start=0.1)
    model.train()
    for _ in range(steps):
        batch = rng.sample(rows, 32)
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])
        labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in batch])
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    model.generation_config = GenerationConfig(eos_token_id=made.eos_token_id, pad_token_id=made.pad_token_id)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    made.save_pretrained(folder)
