"""How an attempt trains: the person's settings, and automatic values where there are none.

Belongs here: the resolved recipe, when training stops early and which checkpoint is kept. Does not belong here: ranges
of the settings (`pipelines.py`) and training itself (`models/train.py`). Automatic values are this project's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from loop_dagster.rules.numbers import share_ceil
from loop_dagster.rules.pipelines import TrainingSettings

LEARNING_RATE: Final = 2e-4
LORA_RANK: Final = 16
LORA_ALPHA: Final = 32
REPLAY_PERCENT: Final = 50
MIN_EPOCHS: Final = 3
MAX_EPOCHS: Final = 8
#: Gemma 4 learns the form of the answers long before their facts, and its check loss worsens while it does.
SLOW_FAMILY: Final = "gemma4"
SLOW_MIN_EPOCHS: Final = 8

#: Optimiser steps that the automatic number of passes aims at; 1,000 rows get there in eight passes.
AIMED_STEPS: Final = 1_000
#: Rows per optimiser step: few in a small set, so that it still makes enough steps; bigger sets can afford the calmer
#: gradient of a bigger batch.
BATCH_SIZES: Final = ((0, 8), (10_000, 16), (50_000, 32))
#: Rows from this mean length (bytes of prompt and answer, about 2,000 tokens) on carry enough for half the batch.
LONG_ROW_BYTES: Final = 8_000
WARMUP_PERCENT: Final = 5
CHECKS: Final = 10
PATIENCE: Final = 3

Keep = Literal["best", "last"]
_T = TypeVar("_T", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that one training needs to know beside its rows and its base.

    `batch_size`: rows per optimiser step, whatever part of it fits the machine at once. `planned_steps`: optimiser
    steps of all passes. `check_every`: steps between two checks. `patience`: checks without improvement after which it
    stops, None never. `keep`: the best checked checkpoint, or the last. `automatic`: settings that no person set;
    `custom` when any was.
    """

    epochs: int
    learning_rate: float
    lora_rank: int
    lora_alpha: int
    replay_percent: int
    batch_size: int
    planned_steps: int
    warmup_steps: int
    check_every: int
    patience: int | None
    keep: Keep
    custom: bool
    automatic: tuple[str, ...]

    @property
    def sentence(self) -> str:
        return (
            f"{self.epochs} {'pass' if self.epochs == 1 else 'passes'} in {self.planned_steps:,} steps of "
            f"{self.batch_size} rows, LoRA rank {self.lora_rank}, learning rate {self.learning_rate:g} "
            f"({'custom' if self.custom else 'automatic'} settings)."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What automatic means for a model (`training_defaults` on the wire)."""

    learning_rate: float
    lora_rank: int
    lora_alpha: int
    replay_percent: int
    min_epochs: int
    max_epochs: int


def defaults(family: str) -> Defaults:
    """The automatic values for a model of `family` (the `model_type` of its config)."""
    return Defaults(
        learning_rate=LEARNING_RATE,
        lora_rank=LORA_RANK,
        lora_alpha=LORA_ALPHA,
        replay_percent=REPLAY_PERCENT,
        min_epochs=SLOW_MIN_EPOCHS if _is_slow(family) else MIN_EPOCHS,
        max_epochs=MAX_EPOCHS,
    )


def resolve_recipe(settings: TrainingSettings, *, rows: int, mean_bytes: float, family: str) -> Recipe:
    """The recipe for `rows` rows to train on (check rows not among them) of `mean_bytes` UTF-8 bytes each.

    Raises ValueError without any row (rules.md, How it trains).
    """
    if rows < 1:
        raise ValueError("a recipe needs at least one row to train on")
    auto = defaults(family)
    batch = max(size for least, size in BATCH_SIZES if rows >= least)
    if mean_bytes >= LONG_ROW_BYTES:
        batch //= 2
    steps_per_epoch = math.ceil(rows / batch)
    wanted = math.ceil(AIMED_STEPS / steps_per_epoch)
    epochs = settings.epochs or min(auto.max_epochs, max(auto.min_epochs, wanted))
    steps = epochs * steps_per_epoch
    automatic = tuple(name for name, value in settings if value is None)
    slow = _is_slow(family)
    return Recipe(
        epochs=epochs,
        learning_rate=_or(settings.learning_rate, auto.learning_rate),
        lora_rank=_or(settings.lora_rank, auto.lora_rank),
        lora_alpha=_or(settings.lora_alpha, auto.lora_alpha),
        replay_percent=_or(settings.replay_percent, auto.replay_percent),
        batch_size=batch,
        planned_steps=steps,
        warmup_steps=share_ceil(WARMUP_PERCENT, steps),
        check_every=max(1, round(steps / CHECKS)),
        patience=None if slow else PATIENCE,
        keep="last" if slow else "best",
        custom=len(automatic) < len(TrainingSettings.model_fields),
        automatic=automatic,
    )


def out_of_patience(check_losses: Sequence[float], *, patience: int | None) -> bool:
    """Whether the last `patience` checks all failed to improve on the best before them. A NaN improves nothing."""
    if patience is None or len(check_losses) <= patience:
        return False
    best = _lowest(check_losses[:-patience])
    return not any(loss < best for loss in check_losses[-patience:])


def kept_step(checks: Sequence[tuple[int, float]], *, keep: Keep, last_step: int) -> int:
    """The step whose weights are kept: the earliest with the lowest check loss, or the last one.

    `checks` are (step, check loss) of the checked checkpoints. The last save is kept unchecked only when `keep` says so
    or no check gave a number.
    """
    numbers = [(loss, step) for step, loss in checks if math.isfinite(loss)]
    return last_step if keep == "last" or not numbers else min(numbers)[1]


def _lowest(losses: Sequence[float]) -> float:
    return min((loss for loss in losses if not math.isnan(loss)), default=math.inf)


def _is_slow(family: str) -> bool:
    return family.lower().replace("_", "").replace("-", "").startswith(SLOW_FAMILY)


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
