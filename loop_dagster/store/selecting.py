"""Reads what the selection rule needs, for the sensor, the assets and the command line alike.

Belongs here: the history of a pipeline's attempts from the lake, token counts of the few samples that are long, and one
call of rules/selection.py. Does not belong here: any rule, and counting tokens itself (models/lengths.py does; its
counts are kept in the registry, once per sample, right answer, tokenizer and template).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import polars as pl
import sqlalchemy as sa

from loop_dagster.rules.selection import HELD_SCHEMA, TRAINED_SCHEMA, History, Scope, Selection, select, selected
from loop_dagster.store.open import Store
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.store.records import Attempt
from loop_dagster.store.registry import insert_new
from loop_dagster.store.samples import KeyFrames
from loop_dagster.store.schema import token_counts
from loop_dagster.tables import HOLDOUTS, SELECTIONS

#: Counted as this many tokens when the model's template refuses the conversation.
REFUSED = -1
PAIR_SCHEMA = {"sample_id": pl.String, "right_key": pl.Int64}


@dataclass(frozen=True, slots=True)
class Length:
    """What limits the length of a training row.

    `max_tokens` is the training length; `safe_bytes` the UTF-8 bytes up to which no row can pass it, so that it is
    never tokenised; `tokenizer` the digest of the base, which covers tokenizer and template: counts are kept under it.
    """

    max_tokens: int
    safe_bytes: int
    tokenizer: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A selection, and the pairs of it whose length nobody has counted yet; those count as too long meanwhile."""

    selection: Selection
    uncounted: pl.DataFrame


def scope_of(store: Store, pipeline: Pipeline) -> Scope:
    """What the pipeline selects by: its datasets as they are now, or as the attempt froze them."""
    datasets = pipeline.frozen_datasets
    if datasets is None:
        datasets = tuple(one.conditions for one in store.datasets.get_many(pipeline.settings.datasets))
    return Scope(own_tag=pipeline.tag, seed=pipeline.seed, settings=pipeline.settings, datasets=datasets)


def history_of(store: Store, pipeline: Pipeline, *, before: int | None = None) -> History:
    """What the pipeline's attempts (numbered below `before`) held back and, where they kept an adapter, trained on."""
    held = store.lake.scan(HOLDOUTS).filter(_of(pipeline, before)).select(list(HELD_SCHEMA))
    numbers = _trained(store, pipeline, before)
    if not numbers:
        return History.of(held, pl.LazyFrame(schema=TRAINED_SCHEMA))
    # What an attempt trained on was new to it, or to one before it: with the newest attempt's own rows that is all that
    # History asks for, and a fraction of all rows once there are many attempts.
    enough = pl.col("is_new") | (pl.col("attempt_no") == numbers[-1])
    return History.of(held, _took(store, pipeline, numbers).filter(enough).select(list(TRAINED_SCHEMA)))


def trained_pairs(store: Store, pipeline: Pipeline) -> pl.LazyFrame:
    """Every (sample, right answer) that an attempt which kept an adapter trained on, with the attempt's number.

    From the frozen selections, which keep keys and no text: they outlive the rows of a deleted sample, so a twin of
    what was once trained on is never held back.
    """
    numbers = _trained(store, pipeline, None)
    if not numbers:
        return pl.LazyFrame(schema=TRAINED_SCHEMA)
    return _took(store, pipeline, numbers).select(list(TRAINED_SCHEMA))


def live_that_learned(store: Store, *sample_ids: str) -> list[Pipeline]:
    """The pipelines whose live version was trained on any of the samples: each owes a rebuild once these are deleted.

    A version is trained from the base on everything at once, so its own attempt's rows are all that it learned.
    """
    live = {store.attempts.get(one.run_id).key: one.pipeline_id for one in store.versions.all_live().values()}
    if not live:
        return []
    here = pl.col("sample_id").is_in(sample_ids) & pl.col("role").is_in(["train", "check"])
    rows = store.lake.scan(SELECTIONS).filter(pl.col("attempt").is_in(list(live)) & here)
    learned = {live[attempt] for attempt in rows.select("attempt").collect()["attempt"]}
    return [one for one in store.pipelines.list() if one.pipeline_id in learned]


def _trained(store: Store, pipeline: Pipeline, before: int | None) -> list[int]:
    """Numbers of the attempts (below `before`) that kept an adapter, oldest first."""
    return [
        attempt.attempt_no
        for attempt in store.attempts.list(pipeline.pipeline_id)
        if attempt.adapter_digest is not None and (before is None or attempt.attempt_no < before)
    ]


def _took(store: Store, pipeline: Pipeline, numbers: list[int]) -> pl.LazyFrame:
    """What these attempts trained on."""
    took = _of(pipeline, None) & pl.col("attempt_no").is_in(numbers) & pl.col("role").is_in(["train", "check"])
    return store.lake.scan(SELECTIONS).filter(took)


def _of(pipeline: Pipeline, before: int | None) -> pl.Expr:
    mine = pl.col("pipeline_id") == pipeline.pipeline_id
    return mine if before is None else mine & (pl.col("attempt_no") < before)


def measure(
    store: Store,
    pipeline: Pipeline,
    length: Length | None,
    now: datetime,
    *,
    before: int | None = None,
    keys: KeyFrames | None = None,
) -> Measured:
    """What the pipeline's next attempt (or attempt `before`) would take at `now`; without `length` none is too long.

    `keys` are frames that a pass over many pipelines read once.
    """
    keys = keys or store.samples.keys()
    scope = scope_of(store, pipeline)
    nothing = pl.DataFrame(schema=PAIR_SCHEMA)
    unfit, uncounted = _unfit(store, keys, scope, length, now) if length else (nothing, nothing)
    selection = select(
        keys.samples,
        keys.feedback,
        keys.labels,
        scope=scope,
        history=history_of(store, pipeline, before=before),
        now=now,
        unfit=unfit,
    )
    return Measured(selection, uncounted)


def uncounted_pairs(store: Store, pipeline: Pipeline, length: Length, now: datetime) -> pl.DataFrame:
    """Pairs (`sample_id`, `right_key`) that the pipeline selects, may be too long, and nobody has counted yet."""
    return _unfit(store, store.samples.keys(), scope_of(store, pipeline), length, now)[1]


def keep_counts(store: Store, length: Length, counts: Mapping[tuple[str, int], int]) -> None:
    """Keep token counts by (sample id, key of the right answer); `REFUSED` where the template refuses the row."""
    with store.registry.write() as connection:
        for (sample_id, right_key), tokens in counts.items():
            insert_new(
                connection,
                token_counts,
                {
                    "workspace": store.registry.workspace,
                    "tokenizer": length.tokenizer,
                    "sample_id": sample_id,
                    "right_key": right_key,
                    "tokens": tokens,
                },
            )


def counted_rows(store: Store) -> int:
    """How many counts are kept: part of what tells a sensor that something changed."""
    with store.registry.read() as connection:
        query = sa.select(sa.func.count()).where(token_counts.c.workspace == store.registry.workspace)
        return int(connection.execute(query.select_from(token_counts)).scalar_one())


def _unfit(
    store: Store, keys: KeyFrames, scope: Scope, length: Length, now: datetime
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Pairs that cannot be trained on with `why`, those not yet counted among them, and the uncounted ones alone."""
    half = length.safe_bytes // 2  # one of prompt+answer and correction must be longer, if both together are
    answers_long = keys.feedback.filter(pl.col("right_bytes") > half).select("sample_id").collect()["sample_id"]
    odd = pl.col("flag").is_not_null()  # a template may refuse what was flagged at import, however short it is
    suspects = odd | (pl.col("bytes") > half) | pl.col("sample_id").is_in(answers_long.implode())
    long_ones = keys.samples.filter(suspects)
    nothing = pl.DataFrame(schema=PAIR_SCHEMA)
    if long_ones.select(pl.len()).collect().item() == 0:
        return nothing, nothing
    rows = selected(long_ones, keys.feedback, keys.labels, scope=scope, now=now)
    flagged = long_ones.filter(odd).select("sample_id").collect()["sample_id"]
    doubtful = (pl.col("longest") > length.safe_bytes) | pl.col("sample_id").is_in(flagged.implode())
    rows = rows.filter(doubtful & pl.col("right_key").is_not_null())
    pairs = rows.select(list(PAIR_SCHEMA))
    known = pairs.join(_counts(store, length, pairs), on=list(PAIR_SCHEMA), how="left")
    bad = known.filter(
        pl.col("tokens").is_null() | (pl.col("tokens") > length.max_tokens) | (pl.col("tokens") == REFUSED)
    )
    why = (
        pl.when(pl.col("tokens").is_null())
        .then(pl.lit("not_counted"))
        .when(pl.col("tokens") == REFUSED)
        .then(pl.lit("template_refuses"))
        .otherwise(pl.lit("too_long"))
    )
    uncounted = known.filter(pl.col("tokens").is_null()).select(list(PAIR_SCHEMA))
    return bad.select(*PAIR_SCHEMA, why.alias("why")), uncounted


def _counts(store: Store, length: Length, pairs: pl.DataFrame) -> pl.DataFrame:
    with store.registry.read() as connection:
        query = sa.select(token_counts.c.sample_id, token_counts.c.right_key, token_counts.c.tokens).where(
            token_counts.c.workspace == store.registry.workspace, token_counts.c.tokenizer == length.tokenizer
        )
        rows = connection.execute(query).all()
    counts = pl.DataFrame(rows, schema={**PAIR_SCHEMA, "tokens": pl.Int64}, orient="row")
    return counts.join(pairs, on=list(PAIR_SCHEMA), how="semi")


def trained_on(attempt: Attempt) -> dict[str, object]:
    """What the attempt selected by, as it was when it opened (`TrainedOn`)."""
    settings = attempt.frozen["settings"]
    return {
        "tags": attempt.frozen["tags"],
        "conditions": settings["conditions"],
        "datasets": attempt.frozen.get("datasets", []),
    }
