from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loop_dagster.rules.pipelines import TrainingSettings
from loop_dagster.rules.recipe import defaults, kept_step, out_of_patience, resolve_recipe

AUTOMATIC = TrainingSettings()
losses = st.lists(st.floats(0, 10) | st.just(math.nan), max_size=20)


def test_automatic_values() -> None:
    recipe = resolve_recipe(AUTOMATIC, rows=950, mean_bytes=600, family="llama")
    assert (recipe.lora_rank, recipe.lora_alpha, recipe.learning_rate, recipe.replay_percent) == (16, 32, 2e-4, 50)
    assert (recipe.epochs, recipe.batch_size, recipe.planned_steps) == (8, 8, 952)
    assert (recipe.patience, recipe.keep, recipe.custom) == (3, "best", False)
    assert recipe.automatic == ("epochs", "learning_rate", "lora_rank", "lora_alpha", "replay_percent")


@pytest.mark.parametrize(
    ("rows", "mean_bytes", "epochs"),
    [(950, 600, 8), (1_900, 600, 5), (3_800, 600, 3), (1_900, 9_000, 3), (200_000, 600, 3)],
)
def test_small_sets_get_more_passes(rows: int, mean_bytes: float, epochs: int) -> None:
    assert resolve_recipe(AUTOMATIC, rows=rows, mean_bytes=mean_bytes, family="qwen3").epochs == epochs


@pytest.mark.parametrize("family", ["gemma4", "gemma4_text", "Gemma-4"])
def test_gemma_4_never_stops_early_and_keeps_its_last(family: str) -> None:
    recipe = resolve_recipe(AUTOMATIC, rows=100_000, mean_bytes=600, family=family)
    assert (recipe.epochs, recipe.patience, recipe.keep) == (8, None, "last")
    assert (defaults(family).min_epochs, defaults("gemma3").min_epochs) == (8, 3)


def test_a_set_value_is_used_and_makes_it_custom() -> None:
    recipe = resolve_recipe(TrainingSettings(epochs=1, replay_percent=0), rows=950, mean_bytes=600, family="gemma4")
    assert (recipe.epochs, recipe.replay_percent, recipe.lora_rank, recipe.custom) == (1, 0, 16, True)
    assert recipe.automatic == ("learning_rate", "lora_rank", "lora_alpha")
    assert recipe.sentence == "1 pass in 119 steps of 8 rows, LoRA rank 16, learning rate 0.0002 (custom settings)."


@given(st.integers(1, 300_000), st.floats(1, 100_000), st.sampled_from(["llama", "gemma4"]))
def test_every_recipe_is_sound(rows: int, mean_bytes: float, family: str) -> None:
    recipe = resolve_recipe(AUTOMATIC, rows=rows, mean_bytes=mean_bytes, family=family)
    assert defaults(family).min_epochs <= recipe.epochs <= 8
    assert recipe.planned_steps == recipe.epochs * math.ceil(rows / recipe.batch_size)
    assert 0 < recipe.warmup_steps <= recipe.planned_steps
    checks = recipe.planned_steps // recipe.check_every
    assert checks == recipe.planned_steps if recipe.planned_steps < 15 else 7 <= checks <= 14
    assert json.loads(json.dumps(dataclasses.asdict(recipe)))["epochs"] == recipe.epochs


def test_no_rows_no_recipe() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        resolve_recipe(AUTOMATIC, rows=0, mean_bytes=0, family="llama")


@pytest.mark.parametrize(
    ("checks", "stops"),
    [
        ([], False),
        ([3, 2, 1], False),
        ([1, 2, 3], False),
        ([1, 2, 3, 4], True),
        ([1, 1, 1, 1], True),
        ([2, 3, 3, 1.9], False),
        ([2, math.nan, math.nan, math.nan], True),
        ([math.nan, 5, 6, 7], False),
        ([math.nan, math.nan, math.nan, math.nan], True),
    ],
)
def test_three_checks_without_improvement(checks: list[float], stops: bool) -> None:
    assert out_of_patience(checks, patience=3) is stops
    assert not out_of_patience(checks, patience=None)


@given(losses)
def test_the_best_checked_checkpoint_is_kept(checks: list[float]) -> None:
    steps = [(10 * (n + 1), loss) for n, loss in enumerate(checks)]
    kept = kept_step(steps, keep="best", last_step=999)
    numbers = {step: loss for step, loss in steps if not math.isnan(loss)}
    if not numbers:
        assert kept == 999, "an unchecked last save only when no checked one was kept"
    else:
        assert numbers[kept] == min(numbers.values())
        assert kept == min(step for step, loss in numbers.items() if loss == numbers[kept])
    assert kept_step(steps, keep="last", last_step=999) == 999
