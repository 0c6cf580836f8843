"""Training a LoRA adapter: the job, the loop, the checks, the adapter that is kept.

Belongs here: what happens between frozen rows and a folder with an adapter. Does not belong here: choosing rows or a
recipe (rules/), templates (template.py), the CPU's fast computation (fast.py), booking machines.

Run as `python -m loop_dagster.models.train JOB.json`; on several GPUs as `accelerate launch -m
loop_dagster.models.train JOB.json`, where rank 0 alone reports and writes. Rule: rules.md, How it trains.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from loop_dagster.errors import AdapterRefused, NoLabels, NothingToTrain
from loop_dagster.models import base
from loop_dagster.models.child import LeaseRef, Reporter, run, seed_everything
from loop_dagster.models.probe import Precision, probe
from loop_dagster.models.template import Encoded, RowRefusal, Template, rows_of
from loop_dagster.rules.recipe import Recipe

#: The highest rank that the engines serve (vLLM's default kernels; rules.md allows no more).
MAX_RANK = 64
#: Points of a curve, every check among them (rules.md, How it trains).
CURVE_POINTS = 200
#: All that an adapter's folder holds.
ADAPTER_FILES = frozenset({"adapter_config.json", "adapter_model.safetensors"})
_ENCODE_AT_ONCE = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """One training.

    `rows_path`: JSON lines {sample_id, role: train|check, messages, tools, right_answer}. `out_dir`: the adapter's
    folder; one that an earlier try left there is replaced. `base_name`: what the adapter's config calls its base, never
    a path. Times of the recipe are optimiser steps; `patience` checks without improvement stop it, None never does.
    `max_length`: tokens of prompt and answer; longer rows are left out. `pack` False keeps to padded batches where
    fast.py could pack.
    """

    work_dir: str
    out_dir: str
    base_path: str
    base_digest: str
    base_name: str
    rows_path: str
    epochs: int
    learning_rate: float
    lora_rank: int
    lora_alpha: int
    batch_size: int
    warmup_steps: int
    check_every: int
    patience: int | None
    keep: Literal["best", "last"]
    max_length: int
    seed: int
    pack: bool = True
    lease: LeaseRef | None = None


def recipe_fields(recipe: Recipe) -> dict[str, Any]:
    """The fields of a TrainJob that its recipe decides."""
    names = ("epochs", "learning_rate", "lora_rank", "lora_alpha", "batch_size", "warmup_steps", "check_every")
    return {name: getattr(recipe, name) for name in (*names, "patience", "keep")}


class CurvePoint(TypedDict):
    """Losses at one optimiser step; either may be null."""

    step: int
    train_loss: float | None
    check_loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A row that was not trained on, and why: `too_long`, or a RefusalCode of template.py."""

    sample_id: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a training made. Losses are means per answer token: `train_loss` as last logged up to the kept step,
    `check_loss` at it (None when it was not checked). `tokens` are those of prompts and answers that were trained on,
    without padding; `seconds` is the wall time of the loop with its checks; `peak_rss` is in bytes."""

    adapter_dir: str
    planned_steps: int
    trained_steps: int
    kept_step: int
    early_stopped: bool
    dtype: str
    precision: str
    packed: bool
    train_rows: int
    check_rows: int
    tokens: int
    seconds: float
    train_loss: float | None
    check_loss: float | None
    curve: tuple[CurvePoint, ...]
    left_out: tuple[LeftOut, ...]
    peak_rss: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Encoded rows of one set."""

    train: list[Encoded]
    check: list[Encoded]
    left_out: tuple[LeftOut, ...]


def check_adapter_config(config: Mapping[str, Any]) -> None:
    """Raise AdapterRefused for an adapter that cannot be served: whole modules saved beside it, or too high a rank."""
    saved = config.get("modules_to_save")
    if saved:
        raise AdapterRefused(
            f"modules_to_save ({', '.join(sorted(map(str, saved)))})",
            "an adapter of low-rank weights alone: whole modules are not served, and merging unties tied embeddings",
        )
    ranks = [int(config.get("r") or 0), *(int(rank) for rank in (config.get("rank_pattern") or {}).values())]
    if max(ranks) > MAX_RANK:
        raise AdapterRefused(f"rank {max(ranks)}", f"at most {MAX_RANK}, the engine's limit")


def read_rows(path: Path, template: Template, *, max_length: int, reporter: Reporter | None = None) -> Rows:
    """Encode a set. Raises NoLabels when any row would carry no label, NothingToTrain when none is left to train on."""
    sets: dict[str, list[Encoded]] = {"train": [], "check": []}
    left_out: list[LeftOut] = []
    unlabelled: list[str] = []
    total = 0
    with path.open(encoding="utf-8") as file:
        while records := [json.loads(line) for line, _ in zip(file, range(_ENCODE_AT_ONCE), strict=False)]:
            total += len(records)
            for record, found in zip(records, template.encode(rows_of(records)), strict=True):
                if isinstance(found, RowRefusal):
                    (unlabelled if found.code == "no_label" else []).append(found.key)
                    left_out.append(LeftOut(sample_id=found.key, code=found.code))
                elif found.tokens > max_length:
                    left_out.append(LeftOut(sample_id=found.key, code="too_long"))
                else:
                    sets[record["role"]].append(found)
            if reporter is not None:
                reporter.check()
                reporter.report(total, total, unit="row read")
    if unlabelled:
        raise NoLabels(unlabelled, total)
    if not sets["train"]:
        raise NothingToTrain(total, dict(Counter(each.code for each in left_out)))
    return Rows(sets["train"], sets["check"], tuple(left_out))


def thinned(curve: Sequence[CurvePoint], limit: int = CURVE_POINTS) -> tuple[CurvePoint, ...]:
    """At most `limit` points in order: every check, the first and last point, and the rest evenly spread."""
    points = sorted(curve, key=lambda point: point["step"])
    if len(points) <= limit:
        return tuple(points)
    ends = (0, len(points) - 1)
    must = {i for i, point in enumerate(points) if point["check_loss"] is not None or i in ends}
    rest = [i for i in range(len(points)) if i not in must]
    room = max(0, limit - len(must))
    chosen = {rest[i * len(rest) // room] for i in range(room)}
    return tuple(points[i] for i in sorted(must | chosen))


def save_adapter(model: Any, out_dir: Path, *, base_name: str) -> None:
    """Write the adapter of a PEFT model, and nothing else, to `out_dir` in one rename."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    partial = out_dir.with_name(f".{out_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config = model.peft_config["default"].to_dict() | {
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "target_modules": _target_names(model),
    }
    check_adapter_config(config)
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    weights = {name: value.detach().float().cpu().contiguous() for name, value in state.items()}
    save_file(weights, partial / "adapter_model.safetensors", metadata={"format": "pt"})
    text = json.dumps(config, indent=2, sort_keys=True, default=str)
    (partial / "adapter_config.json").write_text(text + "\n", encoding="utf-8")
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    partial.rename(out_dir)


def _clear(out_dir: Path) -> None:
    """Take away the adapter of an earlier try, which ended before anybody kept it; anything else stays."""
    names = {path.name for path in out_dir.iterdir()} if out_dir.is_dir() else set()
    if names - ADAPTER_FILES or (out_dir.exists() and not out_dir.is_dir()):
        raise AdapterRefused("other files already in its place", f"an empty place at {out_dir.name}")
    shutil.rmtree(out_dir, ignore_errors=True)


def _target_names(model: Any) -> list[str]:
    """The trained layers by the shortest names that mean exactly them, in order: the same adapter, the same bytes."""
    trained = {name for name in model.targeted_module_names if not name.endswith("lm_head")}
    short = {name.rpartition(".")[2] for name in trained}
    base_names = {name for name, _ in model.get_base_model().named_modules() if not name.endswith("base_layer")}
    meant = {name for name in base_names if name.rpartition(".")[2] in short}
    return sorted(short if meant == trained else trained)


def train(job: TrainJob, reporter: Reporter) -> TrainResult:
    """Train one adapter. Raises the errors of `read_rows`, BaseChanged, AdapterRefused, TrainingDiverged, Stopped."""
    check_adapter_config({"r": job.lora_rank})
    _clear(Path(job.out_dir))
    base.verify(job.base_path, job.base_digest)
    rows = read_rows(Path(job.rows_path), Template.load(job.base_path), max_length=job.max_length, reporter=reporter)
    precision = probe()
    reporter.say(precision.why)
    reporter.check()
    seed_everything(job.seed)
    from loop_dagster.models.trainer import Loop

    loop = Loop(job, rows, precision, reporter)
    started = time.monotonic()
    loop.run()
    seconds = time.monotonic() - started
    reporter.beat()
    if loop.is_main:
        save_adapter(loop.model, Path(job.out_dir), base_name=job.base_name)
    return _result(job, rows, precision, loop, seconds)


def _result(job: TrainJob, rows: Rows, precision: Precision, loop: Any, seconds: float) -> TrainResult:
    points: list[CurvePoint] = loop.curve()
    seen = [p["train_loss"] for p in points if p["step"] <= loop.kept_step and p["train_loss"] is not None]
    unit = 1 if sys.platform == "darwin" else 1024
    return TrainResult(
        adapter_dir=job.out_dir,
        planned_steps=loop.planned_steps,
        trained_steps=loop.trained_steps,
        kept_step=loop.kept_step,
        early_stopped=loop.trained_steps < loop.planned_steps,
        dtype=precision.dtype,
        precision=precision.why,
        packed=loop.packed,
        train_rows=len(rows.train),
        check_rows=len(rows.check),
        tokens=loop.tokens,
        seconds=round(seconds, 3),
        train_loss=seen[-1] if seen else None,
        check_loss=dict(loop.checks).get(loop.kept_step),
        curve=thinned(points),
        left_out=rows.left_out,
        peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    )


def planned_steps(rows: int, batch_size: int, epochs: int) -> int:
    """Optimiser steps of `epochs` passes over `rows` rows; the last batch of a pass may be smaller."""
    return epochs * math.ceil(rows / batch_size)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the child."""
    return run(TrainJob, train, argv)


if __name__ == "__main__":
    sys.exit(main())
