"""Training speed of this project's child against TRL's SFTTrainer, on the same chats with the same recipe.

Run: `python -m bench.training_speed [--rows 64] [--epochs 1] [--repeat 3]`. Contestants, each in a process of its own,
in an order that turns by one every round: ours, TRL as it comes (gradient checkpointing on), TRL without gradient
checkpointing. All train the embedded model with LoRA r16 on all linear layers on prompt/completion rows of mixed
length, the same batch size, seed, schedule and steps. Counted are prompt and answer tokens, never padding, over the
training loop alone; wall and processor time are medians over the rounds. Afterwards each adapter's loss on rows that
nobody trained on is computed the same plain way in float32.

Aims: at least 1.3 times TRL as it comes, at least as fast as TRL without checkpointing, check loss within 2 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.table import Line, record
from loop_dagster.models import child
from loop_dagster.models.base import EMBEDDED, digest_of, resolve
from loop_dagster.models.probe import probe
from loop_dagster.models.template import IGNORED, Encoded, Template, rows_of

CONTESTANTS = ("ours", "trl", "trl-no-checkpointing")
BATCH, RATE, RANK, SEED, MAX_LENGTH = 8, 1e-3, 16, 7, 1024
CHECK_ROWS = 24

WORDS = [
    f"{a}{b}" for a in ("pal", "scan", "gate", "dock", "lane", "tray", "rack", "belt") for b in ("et", "or", "ix", "um")
]


def said(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high))).capitalize() + "."


def chats(count: int, seed: int) -> list[dict[str, Any]]:
    """Made-up support chats of one to three turns, from about 50 to about 500 tokens. What is asked last decides the
    answer, so that there is something to learn."""
    rng, fixed = random.Random(seed), random.Random(0)
    answers = {
        word: f"That is for team {i + 1}. {said(fixed, 3, 12 * fixed.choice([1, 1, 2, 4]))}"
        for i, word in enumerate(WORDS)
    }
    rows = []
    for number in range(count):
        messages = [{"role": "user", "content": said(rng, 5, 16 * rng.choice([1, 1, 1, 2, 4]))}]
        for _ in range(rng.choice([0, 0, 1, 2])):
            messages.append({"role": "assistant", "content": said(rng, 5, 20)})
            messages.append({"role": "user", "content": said(rng, 4, 15)})
        word = rng.choice(WORDS)
        messages[-1]["content"] += f" Who looks after {word}?"
        rows.append(
            {"sample_id": f"{seed}-{number}", "role": "train", "messages": messages, "tools": None}
            | {"right_answer": {"role": "assistant", "content": answers[word]}}
        )
    return rows


def write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train_ours(model: Path, rows: Path, out: Path, epochs: int) -> dict[str, float]:
    from loop_dagster.models.train import TrainJob, train

    job = TrainJob(
        work_dir=str(out.parent / "work"),
        out_dir=str(out),
        base_path=str(model),
        base_digest=digest_of(model),
        base_name=EMBEDDED,
        rows_path=str(rows),
        epochs=epochs,
        learning_rate=RATE,
        lora_rank=RANK,
        lora_alpha=2 * RANK,
        batch_size=BATCH,
        warmup_steps=1,
        check_every=1_000_000,
        patience=None,
        keep="last",
        max_length=MAX_LENGTH,
        seed=SEED,
    )
    cpu = time.process_time()
    result = train(job, child.Reporter(job.work_dir, log=lambda line: None))
    # Loading the model is in the processor time of every contestant.
    return {"seconds": result.seconds, "cpu": time.process_time() - cpu, "peak_gb": result.peak_rss / 1e9}


def train_trl(model: Path, rows: Path, out: Path, epochs: int, *, checkpointing: bool) -> dict[str, float]:
    import resource

    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    records = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    data = Dataset.from_list([{"prompt": row["messages"], "completion": [row["right_answer"]]} for row in records])
    cpu = time.process_time()
    child.seed_everything(SEED)
    config = SFTConfig(
        output_dir=str(out.parent / "trl"),
        num_train_epochs=epochs,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        warmup_steps=1,
        max_length=MAX_LENGTH,
        seed=SEED,
        use_cpu=probe().device == "cpu",
        bf16=probe().dtype == "bfloat16",
        gradient_checkpointing=checkpointing,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(model=str(model), args=config, train_dataset=data, peft_config=adapter)
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    used = time.process_time() - cpu
    trainer.model.save_pretrained(out)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "cpu": used, "peak_gb": peak / 1e9}


def check_loss(model: Path, adapter: Path, rows: list[dict[str, Any]]) -> float:
    """Mean loss per answer token, each row alone, in float32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from loop_dagster.models.fast import plain_loss_sum

    encoded = [row for row in Template.load(model).encode(rows_of(rows)) if isinstance(row, Encoded)]
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), adapter).eval()
    with torch.no_grad():
        total = float(plain_loss_sum(loaded, encoded))
    return total / sum(label != IGNORED for row in encoded for label in row.labels)


def worker(arguments: argparse.Namespace) -> None:
    model, rows, out = Path(arguments.model), Path(arguments.rows_file), Path(arguments.out)
    if arguments.contestant == "ours":
        found = train_ours(model, rows, out, arguments.epochs)
    else:
        found = train_trl(model, rows, out, arguments.epochs, checkpointing=arguments.contestant == "trl")
    found["check_loss"] = check_loss(model, out, chats(CHECK_ROWS, seed=2))
    Path(arguments.result).write_text(json.dumps(found))


def compete(contestant: str, model: Path, rows: Path, epochs: int, folder: Path) -> dict[str, float]:
    folder.mkdir(parents=True)
    result = folder / "result.json"
    command = [sys.executable, "-m", "bench.training_speed", "--contestant", contestant]
    command += ["--model", str(model), "--rows-file", str(rows)]
    command += ["--out", str(folder / "adapter"), "--result", str(result), "--epochs", str(epochs)]
    subprocess.run(command, env={**os.environ, **child.child_env()}, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, float] = json.loads(result.read_text())
    return found


def measure(*, rows: int = 64, epochs: int = 1, repeat: int = 3, models_dir: Path | None = None) -> dict[str, Any]:
    """Medians per contestant: {name: {seconds, cpu, tokens_per_s, check_loss, peak_gb}}, and the token count."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = resolve(EMBEDDED, models_dir or folder / "models").path
        write_rows(chats(rows, seed=1), folder / "rows.jsonl")
        sizes = Template.load(model).sizes(rows_of(chats(rows, seed=1)))
        tokens = epochs * sum(size for size in sizes if isinstance(size, int))
        found: dict[str, list[dict[str, float]]] = {contestant: [] for contestant in CONTESTANTS}
        for turn in range(repeat):
            for i in range(len(CONTESTANTS)):
                contestant = CONTESTANTS[(turn + i) % len(CONTESTANTS)]
                place = folder / f"{turn}-{contestant}"
                found[contestant].append(compete(contestant, model, folder / "rows.jsonl", epochs, place))
                print(f"  {turn + 1}/{repeat} {contestant}: {found[contestant][-1]}", file=sys.stderr, flush=True)
        medians = {
            contestant: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            for contestant, runs in found.items()
        }
        for each in medians.values():
            each["tokens_per_s"] = tokens / each["seconds"]
        return {"tokens": tokens, "dtype": probe().dtype, "contestants": medians}


def show(found: dict[str, Any]) -> str:
    ours = found["contestants"]["ours"]
    lines = [
        f"{found['tokens']:,} tokens, {found['dtype']}",
        f"{'':<22} {'tokens/s':>9} {'wall':>9} {'cpu':>9} {'ratio':>7} {'cpu ratio':>10} "
        f"{'check loss':>11} {'peak':>8}",
    ]
    for name, each in found["contestants"].items():
        lines.append(
            f"{name:<22} {each['tokens_per_s']:>9.0f} {each['seconds']:>7.1f} s {each['cpu']:>7.1f} s "
            f"{each['seconds'] / ours['seconds']:>7.2f} {each['cpu'] / ours['cpu']:>10.2f} "
            f"{each['check_loss']:>11.4f} {each['peak_gb']:>5.1f} GB"
        )
    return "\n".join(lines)


def lines_of(found: dict[str, Any]) -> Iterator[Line]:
    """The figures that have an aim: speed against each peer, and how far the check loss is from the nearer one's."""
    ours = found["contestants"]["ours"]
    detail = f"{ours['tokens_per_s']:.0f} tokens/s in {found['dtype']}"
    for name, aim in (("trl", 1.3), ("trl-no-checkpointing", 1.0)):
        peer = found["contestants"][name]
        ratio = peer["seconds"] / ours["seconds"]
        peak = f"{detail}, {ours['peak_gb']:.1f} GB against {peer['tokens_per_s']:.0f}, {peer['peak_gb']:.1f} GB"
        yield Line(what=f"training against {name}", got=ratio, aim=aim, unit="x", better="higher", detail=peak)
        off = 100 * abs(ours["check_loss"] / peer["check_loss"] - 1)
        losses = f"{ours['check_loss']:.4f} against {peer['check_loss']:.4f}"
        yield Line(what=f"check loss off {name}", got=off, aim=2, unit="%", better="lower", detail=losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--models-dir", type=Path, help="where the converted model lies or is kept")
    for name in ("--contestant", "--model", "--rows-file", "--out", "--result"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        worker(arguments)
    else:
        found = measure(
            rows=arguments.rows, epochs=arguments.epochs, repeat=arguments.repeat, models_dir=arguments.models_dir
        )
        print(show(found))
        for line in lines_of(found):
            record(line)


if __name__ == "__main__":
    main()
