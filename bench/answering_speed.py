"""How fast the engine answers held-back questions, against transformers' own `generate` on the same model.

Run: `python -m bench.answering_speed [--questions 200] [--dtype float32] [--repeat 1]`. All ways answer the same
questions of examples/company.jsonl with the embedded base model, greedy, with the same token limit, in one process,
in alternating order; a figure is the median of the rounds. Peers: `generate` with one question at a time, and
`generate` with batches of 16 in the order in which the questions come (left padding, its documented way).

Answers are compared token for token. In float32 all ways must give the same ones; in bfloat16 the kernels round
differently for other batch shapes, and a near tie between two tokens may fall the other way.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from bench.table import Line, record
from loop_dagster.models.base import EMBEDDED, resolve
from loop_dagster.models.child import child_env
from loop_dagster.models.engine import Request, TransformersEngine, open_engine
from loop_dagster.models.probe import Dtype, probe

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "company.jsonl"
BATCH = 16

Way = Callable[[], list[list[int]]]


def questions(count: int, most: int) -> list[Request]:
    """Every n-th question of the made-up company, in the order of the file."""
    rows = [json.loads(line)["messages"][:-1] for line in EXAMPLES.read_text(encoding="utf-8").splitlines()]
    step = max(1, len(rows) // count)
    return [Request(key=str(at), messages=row, max_new_tokens=most) for at, row in enumerate(rows[::step][:count])]


def ways(engine: TransformersEngine, model: Any, asked: list[Request]) -> dict[str, Way]:
    """Each way of answering, as token ids without the end token."""
    import torch

    prompts = [engine.template.prompt_ids(request.messages) for request in asked]
    stops, pad = set(engine.template.stop_ids), engine.template.stop_ids[0]
    most = asked[0].max_new_tokens

    def ended(ids: list[int]) -> list[int]:
        return ids[: next((at for at, token in enumerate(ids) if token in stops), len(ids))]

    def ours() -> list[list[int]]:
        tokens: dict[str, list[int]] = {request.key: [] for request in asked}
        engine.answer(asked, on_token=lambda key, token: tokens[key].append(token))
        return [tokens[request.key] for request in asked]

    def generate(size: int) -> Way:
        def run() -> list[list[int]]:
            found = []
            for start in range(0, len(prompts), size):
                batch = prompts[start : start + size]
                longest = max(map(len, batch))
                ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in batch])
                mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
                whole = model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=most,
                    do_sample=False,
                    pad_token_id=pad,
                    eos_token_id=[*stops],
                )
                found += [ended(row) for row in whole[:, longest:].tolist()]
            return found

        return run

    return {"engine": ours, "generate, one by one": generate(1), f"generate, batches of {BATCH}": generate(BATCH)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=get_args(Dtype), default=probe().dtype)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--models", type=Path, default=Path(".loop") / "models", help="where base models are kept")
    options = parser.parse_args()
    for name, value in child_env().items():
        os.environ.setdefault(name, value)
    import torch
    from transformers import AutoModelForCausalLM

    base = resolve(EMBEDDED, options.models)
    engine = open_engine(base=base.path, base_digest=base.digest, dtype=options.dtype)
    assert isinstance(engine, TransformersEngine)
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=getattr(torch, options.dtype)).to(
        engine.precision.device
    )
    asked = questions(options.questions, options.max_new_tokens)
    measured = ways(engine, model, asked)
    wall: dict[str, list[float]] = {name: [] for name in measured}
    cpu: dict[str, list[float]] = {name: [] for name in measured}
    answers: dict[str, list[list[int]]] = {}
    for turn in range(options.repeat):
        for name in list(measured)[:: -1 if turn % 2 else 1]:
            began, cpu_began = time.perf_counter(), time.process_time()
            answers[name] = measured[name]()
            wall[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - cpu_began)
            print(f"round {turn + 1}, {name}: {wall[name][-1]:.1f} s ({cpu[name][-1]:.1f} s of processors)", flush=True)
    first = next(iter(measured))
    limits = f"{options.max_new_tokens} tokens each, {options.dtype}, {torch.get_num_threads()} threads"
    print(f"{len(asked)} questions, {limits}")
    print(f"{'':<26} {'wall':>9} {'cpu':>9} {'ratio':>7} {'cpu ratio':>10} {'tokens':>8}  same answers as the engine")
    for name in measured:
        seconds, cpu_seconds = statistics.median(wall[name]), statistics.median(cpu[name])
        ratio, cpu_ratio = seconds / statistics.median(wall[first]), cpu_seconds / statistics.median(cpu[first])
        same = sum(one == other for one, other in zip(answers[first], answers[name], strict=True))
        tokens = sum(map(len, answers[name]))
        print(
            f"{name:<26} {seconds:>7.1f} s {cpu_seconds:>7.1f} s {ratio:>6.1f}x {cpu_ratio:>9.1f}x {tokens:>8,}"
            f"  {same} of {len(asked)}"
        )
        if name == "generate, one by one":
            detail = f"{seconds / ratio:.1f} s against {seconds:.1f} s, {same} of {len(asked)} answers the same"
            what = f"{len(asked)} answers against generate one by one"
            record(Line(what=what, got=ratio, aim=5, unit="x", better="higher", detail=detail))


if __name__ == "__main__":
    main()
