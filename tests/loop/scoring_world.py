"""A pipeline with reviewed and unreviewed samples and a judge on loopback, for the tests of scoring."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import yaml
from pydantic import SecretStr
from stub_judge import KEY, Reply, Shown, StubJudge, completion, rating

from loop_dagster import scoring
from loop_dagster.models.base import resolve
from loop_dagster.models.reference_judge import ReferenceJudge
from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.scoring import Done
from loop_dagster.settings import Settings
from loop_dagster.store.intake import import_for_pipeline
from loop_dagster.store.open import Store, open_store
from loop_dagster.store.pipelines import Pipeline

#: 10 cents a thousand tokens read, 20 a thousand written: a call of the stub (100 and 10) costs 1.2 cents.
PRICES = {"judge_input_cents_per_million": Decimal(10_000), "judge_output_cents_per_million": Decimal(20_000)}


def now() -> datetime:
    return datetime.now(UTC)


def status(store: Store, pipeline: Pipeline) -> tuple[str, str]:
    """Where scoring stands for a pipeline now, and the sentence that says so."""
    found = scoring.plan(store, store.pipelines.get(pipeline.pipeline_id), now()).standing
    return found.status, found.message


def settings_of(home: Path, url: str, **more: Any) -> Settings:
    """Settings of an installation whose judge is the stub."""
    judge = {"judge": "openai", "judge_url": url, "judge_model": "judge-1", "judge_api_key": SecretStr(KEY)}
    return Settings(**{"home": home, **judge, "judge_concurrency": 8, **more})


def in_file(settings: Settings) -> None:
    """Put the judge's settings into the home's file, for what opens the installation by its home alone."""
    told = settings.model_dump(include={name for name in Settings.model_fields if name.startswith("judge")})
    plain = {name: str(value) if isinstance(value, Decimal) else value for name, value in told.items()}
    (settings.root / "settings.yaml").write_text(yaml.safe_dump({**plain, "judge_api_key": KEY}))


def made(store: Store, model: Path, name: str = "Support", **settings: Any) -> Pipeline:
    """A new pipeline on the tiny model."""
    digest = resolve(str(model), store.settings.models_dir).digest
    wanted = PipelineSettings.from_json(settings)
    return store.pipelines.create(name, model_id=str(model), model_digest=digest, seed=7, settings=wanted)


def fill(
    store: Store, pipeline: Pipeline, start: int, stop: int, *, good: bool = False, text: str = "is on its way"
) -> None:
    """Import samples numbered from `start` to before `stop`: marked good, or reviewed by nobody."""
    path = store.settings.root / "rows.jsonl"
    rows = ({"prompt": f"Where is parcel {n}?", "completion": f"Parcel {n} {text}."} for n in range(start, stop))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    import_for_pipeline(store, path, pipeline, holder="test", now=now(), default_feedback="good" if good else None)


def number_of(shown: Shown) -> int:
    """Which parcel a call is about."""
    return int(shown.blocks["CONVERSATION"][0]["content"].split()[-1].rstrip("?"))


def likes(rule: Callable[[int], float]) -> Callable[[Shown], Reply]:
    """A judge that rates by the parcel's number, 0 to 10."""
    return lambda shown: completion(rating(rule(number_of(shown))))


@contextmanager
def judged(home: Path, reply: Callable[[Shown], Reply], **settings: Any) -> Iterator[tuple[Store, StubJudge]]:
    with StubJudge(reply) as stub:
        mine = settings_of(home, stub.url, **settings)
        in_file(mine)
        yield open_store(mine), stub


def run(store: Store, pipeline: Pipeline, **options: Any) -> Done:
    """One scoring run as the asset makes it, without Dagster."""

    def nothing_long(_pipeline: Pipeline, _length: object, _pairs: object) -> None:
        raise AssertionError("no sample of these tests is long")

    with store.leases.hold(scoring.LEASE, holder="test") as held:
        return scoring.score(store, pipeline.pipeline_id, lease=held, **{"count_long": nothing_long, **options})


def only_with_a_right_answer(_settings: Settings) -> ReferenceJudge:
    """A judge of somebody's own, which says that it rates nothing alone."""
    return ReferenceJudge()


def scores(store: Store) -> list[tuple[str, float]]:
    """Every score that is stored: sample id and score, as it is read."""
    frame = store.samples.keys().feedback.filter(pl.col("origin") == "judge").select("sample_id", "score").collect()
    return frame.rows()
