from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loop_dagster.errors import BadRequest, Refused, TrainingSettingOutOfRange
from loop_dagster.rules.pipelines import LORA_RANKS, PipelineSettings

maybe = st.none()
times = st.integers(0, 2**31).map(lambda seconds: datetime.fromtimestamp(seconds, UTC))
bodies = st.fixed_dictionaries(
    {},
    optional={
        "tags": st.lists(st.from_regex(r"[a-z0-9._-]{1,63}", fullmatch=True), max_size=4),
        "conditions": st.fixed_dictionaries(
            {},
            optional={
                "feedback": st.sampled_from([[], ["good"], ["corrected", "unreviewed"], ["bad", "good"]]),
                "origin": maybe | st.sampled_from(["captured", "imported"]),
                "model": maybe | st.just("gpt-x"),
                "from": maybe | times.map(lambda time: time.isoformat()),
            },
        ),
        "holdout": st.fixed_dictionaries({"percent": st.integers(5, 20)}),
        "training": st.fixed_dictionaries(
            {},
            optional={
                "epochs": maybe | st.integers(1, 15),
                "learning_rate": maybe | st.floats(1e-6, 1e-2),
                "lora_rank": maybe | st.sampled_from(LORA_RANKS),
                "lora_alpha": maybe | st.integers(1, 512),
                "replay_percent": maybe | st.integers(0, 50),
            },
        ),
        "max_versions": maybe | st.integers(1, 100),
        "promotion": st.sampled_from([{"policy": "holdout"}, {"policy": "manual", "k": None}]),
        "train_when": st.sampled_from(
            [
                {"schedule": None},
                {"schedule": {"every": "day", "hour_utc": 0}},
                {"schedule": {"every": "week", "weekday": 0, "hour_utc": 23}},
            ]
        ),
        "auto_scoring": st.booleans(),
    },
)


@given(bodies)
def test_json_round_trip(body: dict[str, Any]) -> None:
    settings = PipelineSettings.from_json(body)
    assert PipelineSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    assert PipelineSettings.from_json(json.dumps(settings.to_json())) == settings


@given(bodies, bodies)
def test_an_edit_changes_only_what_it_names(first: dict[str, Any], second: dict[str, Any]) -> None:
    before = PipelineSettings.from_json(first)
    after = before.merged(second)
    for name in PipelineSettings.model_fields:
        if name not in second:
            assert getattr(after, name) == getattr(before, name)


def test_absent_null_and_a_value_are_three_things() -> None:
    settings = PipelineSettings.from_json(
        {
            "tags": ["refunds"],
            "conditions": {"feedback": ["good"], "model": "m"},
            "holdout": {"percent": 10},
            "training": {"epochs": 8, "lora_rank": 32},
            "max_versions": 3,
            "promotion": {"policy": "manual"},
            "train_when": {"schedule": {"every": "day", "hour_utc": 3}},
            "auto_scoring": False,
        }
    )
    assert settings.merged({}) == settings
    assert settings.merged({"training": {"epochs": None}}).training.epochs is None
    assert settings.merged({"training": {"epochs": None}}).training.lora_rank == 32
    assert settings.merged({"training": {"epochs": 9}}).training.epochs == 9
    assert settings.merged({"training": {}}) == settings
    assert settings.merged({"conditions": {"origin": "captured"}}).conditions.model is None, "replaced whole"
    assert settings.merged({"train_when": {}}) == settings
    assert settings.merged({"train_when": {"schedule": None}}).train_when.schedule is None
    assert settings.merged({"holdout": {"percent": None}}).holdout.percent == 5
    cleared = settings.merged(dict.fromkeys(PipelineSettings.model_fields))
    assert cleared == PipelineSettings()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("epochs", [0, 16, 1.5, True, "3", -1]),
        ("learning_rate", [9.99e-7, 0.0100001, 0, float("nan"), float("inf"), "1e-4", False]),
        ("lora_rank", [0, 5, 12, 128, 16.0]),
        ("lora_alpha", [0, 513, 32.5]),
        ("replay_percent", [-1, 51, 12.5]),
    ],
)
def test_training_settings_out_of_range_are_refused_by_name(field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(TrainingSettingOutOfRange) as refused:
            PipelineSettings.from_json({"training": {field: value}})
        assert refused.value.details["field"] == field
        assert f"training.{field} must be" in refused.value.message


@pytest.mark.parametrize(
    "body",
    [
        {"holdout": {"percent": 4}},
        {"holdout": {"percent": 21}},
        {"holdout": {"percent": 7.5}},
        {"holdout": 5},
        {"max_versions": 0},
        {"max_versions": 101},
        {"max_versions": True},
        {"conditions": {"feedback": ["bad"]}},
        {"conditions": {"feedback": ["unreviewed"]}},
        {"conditions": {"feedback": ["great"]}},
        {"conditions": {"from": "2026-01-01T00:00:00"}},
        {"conditions": {"from": "2026-01-02T00:00:00Z", "to": "2026-01-01T00:00:00Z"}},
        {"tags": ["no spaces inside"]},
        {"tags": ["x" * 64]},
        {"tags": [f"t{n}" for n in range(32)]},
        {"tags": "refunds"},
        {"train_when": {"schedule": {"every": "day", "hour_utc": 24}}},
        {"train_when": {"schedule": {"every": "week", "hour_utc": 3}}},
        {"train_when": {"schedule": {"every": "week", "weekday": 7, "hour_utc": 3}}},
        {"train_when": {"schedule": {"every": "day", "weekday": 1, "hour_utc": 3}}},
        {"train_when": {"schedule": {"every": "month", "hour_utc": 3}}},
        {"auto_scoring": "yes"},
    ],
)
def test_other_values_out_of_range_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(body))):
        PipelineSettings.from_json(body)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"colour": 1}, "colour"),
        ({"colour": None}, "colour"),
        ({"training": {"dropout": 0.1}}, "training.dropout"),
        ({"training": {"dropout": None}}, "training.dropout"),
        ({"conditions": {"label": "x"}}, "conditions.label"),
        ({"train_when": {"schedule": {"every": "day", "hour_utc": 1, "minute": 3}}}, "train_when.schedule.minute"),
    ],
)
def test_unknown_fields_are_refused_by_name(body: dict[str, Any], name: str) -> None:
    with pytest.raises(BadRequest) as refused:
        PipelineSettings().merged(body)
    assert f"{name} is not a setting (known: " in refused.value.message


@pytest.mark.parametrize("body", [{"train_when": {"min_samples": 10}}, {"min_samples": 10}, {"min_samples": None}])
def test_no_setting_changes_the_minimums(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="minimums are fixed"):
        PipelineSettings().merged(body)


def test_policies() -> None:
    with pytest.raises(Refused) as refused:
        PipelineSettings.from_json({"promotion": {"policy": "always"}})
    assert refused.value.code == "PROMOTION_POLICY_UNKNOWN"
    for policy in ("all", "primary", "k_of_n", "weighted"):
        with pytest.raises(Refused) as refused:
            PipelineSettings.from_json({"promotion": {"policy": policy, "k": 2}})
        assert refused.value.code == "PROMOTION_POLICY_NEEDS_BENCHMARK"


def test_tags_are_trimmed_lowered_and_named_once() -> None:
    assert PipelineSettings.from_json({"tags": [" Refunds ", "refunds", "vip"]}).tags == ("refunds", "vip")
