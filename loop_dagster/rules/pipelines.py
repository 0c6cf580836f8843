"""Settings of a pipeline: their ranges, how an edit changes them, and their JSON.

Belongs here: what a person may set, in the API's own nesting, and the refusals. Does not belong here: the pipeline's
name, model, own tag and revision (registry), and what "automatic" resolves to for an attempt (`recipe.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from loop_dagster.errors import BadRequest, Refused, TrainingSettingOutOfRange
from loop_dagster.rules.conditions import FeedbackWord, Narrowing, Part
from loop_dagster.rules.tags import MAX_ON_SAMPLE
from loop_dagster.rules.tags import tag as clean_tag
from loop_dagster.rules.wording import sentence_of

Policy = Literal["holdout", "manual"]

#: Policies of rules.md that weigh benchmarks; an installation without benchmarks cannot follow them.
BENCHMARK_POLICIES: Final = ("all", "primary", "k_of_n", "weighted")
LORA_RANKS: Final = (4, 8, 16, 32, 64)
#: Characters of a use case.
MAX_USE_CASE: Final = 2_000
#: Datasets of one pipeline (rules.md, Pipelines).
MAX_DATASETS: Final = 32

#: Inclusive ranges of the training settings and how a refusal words them (rules.md, How it trains).
TRAINING_RANGES: Final[Mapping[str, tuple[float, float, str]]] = {
    "epochs": (1, 15, "a whole number from 1 to 15"),
    "learning_rate": (1e-6, 1e-2, "a number from 1e-6 to 1e-2"),
    "lora_rank": (4, 64, "one of 4, 8, 16, 32, 64"),
    "lora_alpha": (1, 512, "a whole number from 1 to 512"),
    "replay_percent": (0, 50, "a whole number from 0 to 50"),
}

#: Settings that other systems have for the minimums; here they are fixed and every such field is refused by name.
_MINIMUM_FIELDS: Final = ("min_samples", "min_rows", "min_new_samples", "new_samples", "first_version", "minimums")


class Conditions(Narrowing):
    """What narrows everything that a pipeline selects; `unreviewed` left out leaves out what the judge picked."""

    @field_validator("feedback")
    @classmethod
    def _teaches_something(cls, words: tuple[FeedbackWord, ...]) -> tuple[FeedbackWord, ...]:
        if words and not {"good", "corrected"} & set(words):
            raise ValueError("must hold good or corrected, or be empty: nothing else alone can be trained on")
        return words


DatasetId = Annotated[str, Field(min_length=1, max_length=80)]


class Holdout(Part):
    """`percent` of the usable samples that are held back, at least 100 of them (rules.md, Held back)."""

    percent: int = Field(default=5, ge=5, le=20)


class TrainingSettings(Part):
    """A pipeline's own training settings; None is automatic. Out of range raises `TrainingSettingOutOfRange`."""

    epochs: int | None = None
    learning_rate: float | None = None
    lora_rank: int | None = None
    lora_alpha: int | None = None
    replay_percent: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _in_range(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            for name, (low, high, allowed) in TRAINING_RANGES.items():
                _check_training(name, given.get(name), low, high, allowed)
        return given


def _check_training(name: str, value: object, low: float, high: float, allowed: str) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    whole = name == "learning_rate" or isinstance(value, int)
    if not (number and whole and low <= value <= high):  # type: ignore[operator]  # NaN fails the comparison
        raise TrainingSettingOutOfRange(name, allowed, value)
    if name == "lora_rank" and value not in LORA_RANKS:
        raise TrainingSettingOutOfRange(name, allowed, value)


class Schedule(Part):
    """When an attempt may start once the minimum is met: every day or week at an hour UTC; weekday 0 is Sunday."""

    every: Literal["day", "week"]
    weekday: int | None = Field(default=None, ge=0, le=6)
    hour_utc: int = Field(ge=0, le=23)

    @model_validator(mode="after")
    def _weekday_belongs_to_a_week(self) -> Self:
        if (self.every == "week") != (self.weekday is not None):
            raise ValueError("weekday (0 is Sunday) is needed for every week and must be absent or null for every day")
        return self


class TrainWhen(Part):
    """`schedule` None trains as soon as the minimum is met. The minimum itself is no setting."""

    schedule: Schedule | None = None


class Promotion(Part):
    """How a tested attempt goes live. `k` belongs to policies that count benchmarks and stays None."""

    policy: Policy = "holdout"
    k: None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        policy = given.get("policy", "holdout") if isinstance(given, Mapping) else "holdout"
        if policy in BENCHMARK_POLICIES:
            raise Refused(
                "PROMOTION_POLICY_NEEDS_BENCHMARK",
                f"promotion.policy {policy} decides by benchmarks and this installation has none: choose holdout (goes "
                "live when better on the held-back samples) or manual (every tested attempt waits for a person).",
                policy=policy,
            )
        if policy not in ("holdout", "manual"):
            raise Refused(
                "PROMOTION_POLICY_UNKNOWN",
                f"promotion.policy must be holdout or manual, got {policy!r}. Nothing was saved.",
                policy=policy,
            )
        return given


class PipelineSettings(Part):
    """Everything that a person sets on a pipeline beside its name and model, in the API's own nesting.

    `use_case` says in the owner's words what it is for. `tags` are extra ones: the pipeline's own tag always counts and
    is not listed. `datasets` are ids of saved ones, whose samples are added. `max_versions` None is no limit.
    `auto_scoring` lets the judge score unreviewed samples while the pipeline is short.
    """

    use_case: Annotated[str, Field(max_length=MAX_USE_CASE)] = ""
    tags: Annotated[tuple[str, ...], Field(strict=False, max_length=MAX_ON_SAMPLE - 1)] = ()
    datasets: Annotated[tuple[DatasetId, ...], Field(strict=False, max_length=MAX_DATASETS)] = ()
    conditions: Conditions = Conditions()
    holdout: Holdout = Holdout()
    training: TrainingSettings = TrainingSettings()
    train_when: TrainWhen = TrainWhen()
    promotion: Promotion = Promotion()
    max_versions: int | None = Field(default=None, ge=1, le=100)
    auto_scoring: bool = True

    @field_validator("auto_scoring", mode="before")
    @classmethod
    def _as_the_api_nests_it(cls, given: Any) -> Any:
        nested = isinstance(given, Mapping) and set(given) == {"enabled"}
        return given["enabled"] if nested else given

    @field_validator("tags")
    @classmethod
    def _tags_once(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(clean_tag(tag, what="tags") for tag in tags))

    @field_validator("datasets")
    @classmethod
    def _datasets_once(cls, datasets: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(datasets))

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | str) -> PipelineSettings:
        """Settings from what `to_json` gave, or from a body that names only what it sets.

        Raises `BadRequest` naming every field that is unknown or wrong, `TrainingSettingOutOfRange` or `Refused`.
        """
        return PipelineSettings().merged(json.loads(data) if isinstance(data, str) else data)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` takes back unchanged; times as ISO text."""
        return self.model_dump(mode="json", by_alias=True)

    def merged(self, edit: Mapping[str, Any]) -> PipelineSettings:
        """These settings after an edit, where absent keeps, null puts back to its default and a value replaces.

        `tags`, `datasets` and `conditions` are replaced whole; `training`, `holdout` and `train_when` key by key;
        `promotion` and a schedule whole. Nothing changes when anything is refused (errors as in `from_json`).
        """
        _refuse_minimums(edit)
        base = self.to_json()
        merged = {**base}
        for name, value in edit.items():
            if value is None:
                merged.pop(name, None)  # the default; an unknown name falls through to the refusal below
                if name not in base:
                    merged[name] = None
            elif name in ("training", "holdout", "train_when") and isinstance(value, Mapping):
                changed = {**base[name], **value}
                merged[name] = {key: kept for key, kept in changed.items() if kept is not None or key not in base[name]}
            else:
                merged[name] = value
        try:
            return PipelineSettings.model_validate(merged)
        except ValidationError as refused:
            raise BadRequest(" ".join(_sentence(error) for error in refused.errors()) + " Nothing was saved.") from None


def _refuse_minimums(edit: Mapping[str, Any]) -> None:
    inside = edit.get("train_when")
    given = [*edit, *(f"train_when.{name}" for name in (inside if isinstance(inside, Mapping) else ()))]
    for name in given:
        if name.rpartition(".")[2] in _MINIMUM_FIELDS:
            raise BadRequest(
                f"{name} cannot be set: the minimums are fixed for every pipeline (1,000 to train on beside the "
                "held-back samples, then 1,000 new ones each time). Leave it out.",
                field=name,
            )


def _sentence(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        where = ".".join(str(part) for part in error["loc"])
        owner = PipelineSettings if len(error["loc"]) == 1 else _owner(str(error["loc"][0]), len(error["loc"]))
        known = ", ".join(field.alias or name for name, field in owner.model_fields.items()) if owner else ""
        return f"{where} is not a setting{f' (known: {known})' if known else ''}."
    return sentence_of(error, "The settings")


def _owner(part: str, depth: int) -> type[BaseModel] | None:
    parts: dict[str, type[BaseModel]] = {
        "conditions": Conditions,
        "holdout": Holdout,
        "training": TrainingSettings,
        "promotion": Promotion,
        "train_when": TrainWhen if depth == 2 else Schedule,
    }
    return parts.get(part)
