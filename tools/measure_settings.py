"""Measures how training settings do on a made-up company: train on most phrasings, ask the rest.

Belongs here: one training and its questions, outside of any pipeline, for choosing the demo's settings on a company
that the demo does not ask about (docs/adr/0004-demo-settings.md). Does not belong here: the rules of an attempt; the
hundred held-back phrasings are picked by hash like there, and 5 % of the rest serve the checks.

    .venv/bin/python tools/measure_settings.py --models .loop/models --learning-rate 0.001
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loop_dagster.models.base import EMBEDDED, BaseModel, resolve
from loop_dagster.models.child import child_env, command, read_result, write_job
from loop_dagster.models.engine import Request, open_engine
from loop_dagster.models.train import TrainJob, TrainResult, recipe_fields
from loop_dagster.rules.pipelines import TrainingSettings
from loop_dagster.rules.recipe import Recipe, resolve_recipe

ROOT = Path(__file__).resolve().parent.parent
HELD_BACK = 100
#: Tokens that an answer may have; the longest right one has under 30.
ANSWER_TOKENS = 64

Chat = list[dict[str, str]]


def company(name: str, seed: int, folder: Path) -> dict[str, list[Chat]]:
    """The company's `conversations`, its `unseen` and its `reworded` questions, each with its answer."""
    paths = {kind: folder / f"{kind}.jsonl" for kind in ("conversations", "unseen", "reworded")}
    options = ["--out", paths["conversations"], "--unseen", paths["unseen"], "--reworded", paths["reworded"]]
    script = [sys.executable, str(ROOT / "examples" / "make_company.py"), "--company", name, "--seed", str(seed)]
    subprocess.run([*script, *map(str, options)], check=True)
    return {
        kind: [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
        for kind, path in paths.items()
    }


def write_rows(path: Path, chats: Sequence[Chat]) -> tuple[int, float]:
    """Write a training set, every twentieth row for the checks; returns rows to train on and their mean bytes."""
    lengths = []
    with path.open("w", encoding="utf-8") as file:
        for number, (question, answer) in enumerate(chats):
            role = "check" if number % 20 == 0 else "train"
            row = {
                "sample_id": str(number),
                "role": role,
                "messages": [question],
                "tools": None,
                "right_answer": answer,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            if role == "train":
                lengths.append(len(json.dumps([question, answer], ensure_ascii=False).encode()))
    return len(lengths), sum(lengths) / len(lengths)


def train(base: BaseModel, recipe: Recipe, rows: Path, folder: Path, seed: int) -> TrainResult:
    """One training in a child, as an attempt does it."""
    job = TrainJob(
        work_dir=str(folder),
        out_dir=str(folder / "adapter"),
        base_path=str(base.path),
        base_digest=base.digest,
        base_name=base.model_id,
        rows_path=str(rows),
        max_length=base.max_length,
        seed=seed,
        **recipe_fields(recipe),
    )
    subprocess.run(
        command("train", write_job(folder / "job.json", job)),
        env={**os.environ, **child_env()},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return read_result(TrainResult, folder)


def exact(engine: Any, chats: Sequence[Chat], *, adapters: Sequence[str], title: str) -> str:
    """How many answers are the right one to the letter; wrong ones are printed with their question."""
    started = time.monotonic()
    requests = [Request(key=str(at), messages=chat[:1], max_new_tokens=ANSWER_TOKENS) for at, chat in enumerate(chats)]
    right = 0
    for (question, answer), given in zip(chats, engine.answer(requests, adapters=adapters), strict=True):
        text = ((given.message or {}).get("content") or "").strip()
        right += text == answer["content"]
        if adapters and text != answer["content"]:
            print(f"    {question['content']} -> {text}")
    return f"{title}: {right} of {len(chats)} exact ({time.monotonic() - started:.0f} s)"


def main() -> int:
    """Returns the exit code, 0 when measured."""
    parser = argparse.ArgumentParser(description="Measure training settings on a made-up company.")
    parser.add_argument("--company", default="gullen-ferries")
    parser.add_argument("--company-seed", type=int, default=7)
    parser.add_argument("--models", type=Path, required=True, help="folder of converted base models, made if missing")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--lora-alpha", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--base-too", action="store_true", help="ask the base model as well")
    given = parser.parse_args()
    settings = TrainingSettings(
        epochs=given.epochs,
        learning_rate=given.learning_rate,
        lora_rank=given.lora_rank,
        lora_alpha=given.lora_alpha,
    )
    base = resolve(EMBEDDED, given.models)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chats = company(given.company, given.company_seed, folder)
        ranked = sorted(chats["conversations"], key=lambda chat: hashlib.blake2b(chat[0]["content"].encode()).digest())
        rows, mean_bytes = write_rows(folder / "rows.jsonl", ranked[HELD_BACK:])
        recipe = resolve_recipe(settings, rows=rows, mean_bytes=mean_bytes, family=base.family)
        print(recipe.sentence, flush=True)
        result = train(base, recipe, folder / "rows.jsonl", folder, given.seed)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(
            f"{rows} rows, {result.trained_steps} steps in {result.seconds:.0f} s; with loading "
            f"{used.ru_utime + used.ru_stime:.0f} s of processor time; kept step {result.kept_step}, check loss "
            f"{result.check_loss}, {result.dtype}, {result.peak_rss / 1e9:.1f} GB",
            flush=True,
        )
        engine = open_engine(base=base.path, base_digest=base.digest)
        engine.load_adapter("candidate", folder / "adapter", base_digest=base.digest)
        for adapters in ((), ("candidate",)) if given.base_too else (("candidate",),):
            who = "candidate" if adapters else "base"
            for title, asked in (
                ("held-back phrasings", ranked[:HELD_BACK]),
                ("unseen questions", chats["unseen"]),
                ("quite other words", chats["reworded"]),
            ):
                print(exact(engine, asked, adapters=adapters, title=f"{who}, {title}"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
