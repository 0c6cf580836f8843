"""Which samples a pipeline's next attempt takes, what it does with each, and whether there are enough.

Belongs here: the one selection that the sensor, the assets, the API and the command line share, so that they can never
disagree: tags and conditions, what each sample teaches, duplicates, hold-back, twins, the training rows. Does not
belong here: text of any kind, token counts (they come in as `unfit`), writing the result.

Steps: `selected` (tags, conditions, expiry, deciding verdict) → `usable` (what may be learned) → `select` (sides).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, get_args

import numpy as np
import polars as pl

from loop_dagster.rules.conditions import DatasetConditions
from loop_dagster.rules.feedback import id_key
from loop_dagster.rules.holdback import check_rows, first_rows, newly_held, ranks
from loop_dagster.rules.matching import chosen
from loop_dagster.rules.minimums import Minimum, held_size, minimum
from loop_dagster.rules.pipelines import PipelineSettings

#: A fresh line trains on the newest this many (rules.md, How it trains).
MOST_TRAIN_ROWS: Final = 200_000

Role = Literal["train", "check", "holdout", "left_out"]
Reason = Literal[
    "new",
    "again",
    "held_before",
    "held_new",
    "pinned",
    "wrong",
    "no_answer",
    "below_bar",
    "no_feedback",
    "too_long",
    "template_refuses",
    "not_counted",
    "duplicate",
    "twin_of_held",
    "beyond_newest",
]

#: Why a sample is left out, as sentences; the first that applies counts, in this order.
LEFT_OUT: Final[Mapping[str, str]] = {
    "pinned": "It is pinned in a benchmark, so nothing trains on it.",
    "wrong": "It was marked wrong without a right answer, so there is nothing to learn from it.",
    "no_answer": "It waits for an answer, so there is nothing to learn from it yet.",
    "below_bar": "Nobody reviewed it and the judge scored it below 0.8.",
    "no_feedback": "Nobody reviewed it and the judge has not scored it.",
    "too_long": "Prompt and answer together are longer than the model's training length.",
    "template_refuses": "The model's chat template refuses this conversation.",
    "not_counted": "Nobody has counted yet whether it fits the model's training length; the next intake run does.",
    "duplicate": "An older sample has the same prompt and the same right answer; that one counts.",
    "twin_of_held": "A sample with the same prompt is held back, so this one is never trained on.",
    "beyond_newest": f"The attempt trains on the newest {MOST_TRAIN_ROWS:,} samples and this one is older.",
}
#: What an attempt does with the samples that it takes.
TAKEN: Final[Mapping[str, str]] = {
    "new": "It is trained on for the first time.",
    "again": "It is trained on, as in the last attempt that trained.",
    "held_before": "It is held back to judge attempts, as it was for an earlier attempt, and never trained on.",
    "held_new": "It is held back to judge attempts, from this attempt on, and never trained on.",
}
assert {*LEFT_OUT, *TAKEN} == set(get_args(Reason))

#: Columns of `samples` that selecting needs; none of them is text.
SAMPLE_COLUMNS: Final = (
    "sample_id",
    "origin",
    "model",
    "created_at",
    "expires_at",
    "text_key",
    "prompt_key",
    "answer_key",
)
HELD_SCHEMA: Final = {"sample_id": pl.String, "prompt_key": pl.Int64, "attempt_no": pl.Int64}
TRAINED_SCHEMA: Final = {"sample_id": pl.String, "right_key": pl.Int64, "prompt_key": pl.Int64, "attempt_no": pl.Int64}


@dataclass(frozen=True, slots=True)
class Scope:
    """What a pipeline selects by: its own tag beside its settings, its datasets, and the seed of its hold-back order.

    `datasets` are the conditions of those that its settings name.
    """

    own_tag: str
    seed: int
    settings: PipelineSettings
    datasets: tuple[DatasetConditions, ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.own_tag, *self.settings.tags)))

    @property
    def groups(self) -> tuple[DatasetConditions, ...]:
        """What a sample must belong to at least one of: those that carry any of the tags, and each dataset."""
        # The tags were checked when they were set, and there may be one more of them than a dataset takes.
        return (DatasetConditions.model_construct(tags=self.tags), *self.datasets)


@dataclass(frozen=True, slots=True)
class History:
    """What earlier attempts of the pipeline did; the attempt that is being selected for is not among them.

    `held`: every sample that any of them held back, whatever became of the attempt (`HELD_SCHEMA`; sample_id is null
    once it was deleted). `trained_prompts`: prompt_key of everything that an attempt which kept an adapter trained on,
    check rows among it, each once. `last_trained`: number of the newest such attempt, and `last_pairs` its
    (`sample_id`, `right_key`).
    """

    held: pl.DataFrame
    trained_prompts: pl.Series
    last_trained: int | None
    last_pairs: pl.DataFrame

    @classmethod
    def empty(cls) -> History:
        return cls.of(held=pl.DataFrame(schema=HELD_SCHEMA), trained=pl.DataFrame(schema=TRAINED_SCHEMA))

    @classmethod
    def of(cls, held: pl.DataFrame | pl.LazyFrame, trained: pl.DataFrame | pl.LazyFrame) -> History:
        """History from rows of all earlier attempts: what they held back, and what those with an adapter trained on.

        Frames have at least the columns of `HELD_SCHEMA` and `TRAINED_SCHEMA`.
        """
        last = pl.col("attempt_no") == pl.col("attempt_no").max()
        held_rows, prompts, last_rows = pl.collect_all(
            [
                held.lazy().select(list(HELD_SCHEMA)),
                trained.lazy().select("prompt_key").unique(),
                trained.lazy().filter(last).select(list(TRAINED_SCHEMA)),
            ]
        )
        return cls(
            held=held_rows,
            trained_prompts=prompts["prompt_key"],
            last_trained=last_rows["attempt_no"][0] if last_rows.height else None,
            last_pairs=last_rows.select("sample_id", "right_key").unique(subset="sample_id", keep="any"),
        )


@dataclass(frozen=True, slots=True)
class Selection:
    """What one attempt takes of everything that its pipeline selects.

    `rows`: one row per selected sample, in no order (sorting a million ids takes longer than choosing): `sample_id`,
    `role` (`Role`), `reason` (`Reason`), `teaches` (the deciding verdict or null), `right_key`, `prompt_key`, `rank`,
    `reviewed` (by a person), `is_new` (counts as new), and `held_by` (number of the earlier attempt that held it back,
    null for the others and for `held_new`).
    `usable` = `held` + `train` + twins of held-back ones + those beyond the newest 200,000. `left_out`: how many for
    which reason.
    """

    rows: pl.DataFrame
    selected: int
    usable: int
    held: int
    held_new: int
    train: int
    new: int
    train_picked: int
    left_out: Mapping[str, int]
    minimum: Minimum

    @property
    def ready(self) -> bool:
        return self.minimum.ready

    @property
    def message(self) -> str:
        return self.minimum.message


def selected(
    samples: pl.LazyFrame, feedback: pl.LazyFrame, labels: pl.LazyFrame, *, scope: Scope, now: datetime
) -> pl.DataFrame:
    """Every sample that the pipeline selects at `now`, with what decides about it and what it would teach.

    Frames need `SAMPLE_COLUMNS`, `feedback.COLUMNS` and, of labels, label_id, sample_id, label, parent, removed,
    created_at (and value, where attributes are stored beside tags). Deleted samples must not be among `samples`.
    Gives sample_id, id_key, created_at, text_key, prompt_key, answered, teaches, reviewed, score, right_key (of the
    answer to learn, null where there is none), and, where samples have `bytes`, `longest`: bytes of prompt, answer and
    correction together.
    """
    has_bytes = "bytes" in samples.collect_schema()
    columns = ["text_key", "prompt_key", "answer_key", *(["bytes"] if has_bytes else [])]
    if not has_bytes and "right_bytes" in feedback.collect_schema():
        feedback = feedback.drop("right_bytes")
    rows = chosen(
        samples,
        feedback,
        labels,
        groups=scope.groups,
        narrow=scope.settings.conditions,
        now=now,
        columns=columns,
    )
    own_answer = pl.col("teaches").is_in(["accepted", "scored"])
    corrected = pl.col("teaches").is_in(["edited", "gold"])
    rows = rows.with_columns(
        pl.when(own_answer).then("answer_key").when(corrected).then("right_key").alias("right_key"),
        pl.col("answer_key").is_not_null().alias("answered"),
        *([(pl.col("bytes") + pl.col("right_bytes").fill_null(0)).alias("longest")] if has_bytes else []),
    )
    return rows.drop("answer_key", "right_bytes", "bytes", strict=False)


def _with_reason(rows: pl.DataFrame, *, unfit: pl.DataFrame | None, pinned: Collection[str]) -> pl.DataFrame:
    """`rows` with the first reason that leaves each out on its own account; null for what may be learned."""
    teaches, score = pl.col("teaches"), pl.col("score")
    by_itself = (
        pl.when(pl.col("sample_id").is_in(list(pinned)) if pinned else pl.lit(False))
        .then(pl.lit("pinned"))
        .when(teaches == "rejected")
        .then(pl.lit("wrong"))
        .when(pl.when(teaches.is_null()).then(~pl.col("answered")).otherwise(pl.col("right_key").is_null()))
        .then(pl.lit("no_answer"))
        .when(teaches.is_null() & score.is_not_null())
        .then(pl.lit("below_bar"))
        .when(teaches.is_null())
        .then(pl.lit("no_feedback"))
    )
    rows = rows.with_columns(by_itself.alias("reason"))
    if unfit is None or unfit.is_empty():
        return rows
    why = pl.col("why") if "why" in unfit.columns else pl.lit("too_long").alias("why")
    unfit = unfit.select("sample_id", "right_key", why).unique(subset=["sample_id", "right_key"])
    return (
        rows.join(unfit, on=["sample_id", "right_key"], how="left")
        .with_columns(pl.coalesce("reason", "why").alias("reason"))
        .drop("why")
    )


def _without_duplicates(rows: pl.DataFrame, history: History) -> pl.DataFrame:
    """Marks all but one of the samples with the same prompt and the same right answer, to the letter.

    The oldest stays, unless one of them is held back or was trained on already: then that one, so that a question is
    not lost and content that was learned does not count as new once more under an older sample's id.
    """
    keys = ["text_key", "right_key"]
    mixed = rows.select((pl.col("text_key").hash(1) ^ pl.col("right_key").hash(2)).alias("pair"))["pair"]
    fit = rows["reason"].is_null()
    ordered = mixed.filter(fit).sort()
    repeated = ordered.filter(ordered == ordered.shift()).unique()
    if repeated.is_empty():
        return rows
    # Equal pairs have equal hashes, so these few rows hold every duplicate; the keys themselves then decide.
    doubles = rows.filter(fit & mixed.is_in(repeated.implode())).with_columns(
        pl.col("sample_id").is_in(history.held["sample_id"].drop_nulls().implode()).alias("_held"),
        pl.col("sample_id").is_in(history.last_pairs["sample_id"].implode()).alias("_trained"),
    )
    stays = doubles.sort("_held", "_trained", "created_at", "sample_id", descending=[True, True, False, False]).unique(
        subset=keys, keep="first", maintain_order=True
    )
    dropped = doubles.join(stays, on="id_key", how="anti")["_row"]
    return _reasoned(rows, _mask(rows, dropped), "duplicate")


def _mask(rows: pl.DataFrame, numbers: pl.Series) -> pl.Series:
    mask = np.zeros(rows.height, dtype=np.bool_)
    mask[numbers.to_numpy()] = True
    return pl.Series("mask", mask)


def _reasoned(rows: pl.DataFrame, mask: pl.Series, reason: Reason) -> pl.DataFrame:
    return rows.with_columns(pl.when(mask).then(pl.lit(reason)).otherwise("reason").alias("reason"))


def _sides(rows: pl.DataFrame, *, scope: Scope, history: History) -> pl.DataFrame:
    """Adds `held_by` and the reasons `held_before`, `held_new` and `twin_of_held` to the usable rows."""
    before = history.held.drop_nulls("sample_id").group_by("sample_id").agg(pl.col("attempt_no").min().alias("held_by"))
    rows = rows.join(before.select(id_key(), "held_by"), on="id_key", how="left")
    usable = rows["reason"].is_null()
    kept = usable & rows["held_by"].is_not_null()
    numbers = (usable & ~kept).arg_true()
    fresh = newly_held(
        rows.select("sample_id", "prompt_key", "rank", "reviewed", "created_at")[numbers],
        trained_prompts=history.trained_prompts,
        places=held_size(scope.settings.holdout.percent, int(usable.sum())) - int(kept.sum()),
    )
    held = _mask(rows, numbers.filter(fresh))
    rows = _reasoned(_reasoned(rows, kept, "held_before"), held, "held_new")
    closed = pl.concat([history.held["prompt_key"], rows["prompt_key"].filter(held)]).unique()
    twin = rows["reason"].is_null() & rows["prompt_key"].is_in(closed.implode())
    return _reasoned(rows, twin, "twin_of_held")


def _training_rows(rows: pl.DataFrame, *, scope: Scope, history: History) -> pl.DataFrame:
    """Decides the rows that are left: new, again or beyond the newest 200,000; sets `role` and `is_new`."""
    left = rows["reason"].is_null().arg_true()
    columns = rows.select("sample_id", "id_key", "prompt_key", "right_key", "created_at")
    newest = left.filter(
        first_rows(
            columns.select("created_at", "sample_id")[left],
            MOST_TRAIN_ROWS,
            by=["created_at", "sample_id"],
            descending=True,
        )
    )
    train = columns[newest]
    had = train.join(
        history.last_pairs.select(id_key(), pl.col("right_key").alias("_had")),
        on="id_key",
        how="left",
        maintain_order="left",
    )
    again = newest.filter((had["_had"] == had["right_key"]).fill_null(False))
    checks = newest.filter(check_rows(train, seed=scope.seed))
    trains, checked = _mask(rows, newest), _mask(rows, checks)
    rows = _reasoned(_reasoned(rows, trains, "new"), _mask(rows, again), "again")
    return rows.with_columns(
        pl.col("reason").fill_null("beyond_newest"),
        pl.when(checked)
        .then(pl.lit("check"))
        .when(trains)
        .then(pl.lit("train"))
        .when(pl.col("reason").is_in(["held_before", "held_new"]))
        .then(pl.lit("holdout"))
        .otherwise(pl.lit("left_out"))
        .alias("role"),
        pl.col("reason").eq_missing(pl.lit("new")).alias("is_new"),
    )


def select(
    samples: pl.LazyFrame | pl.DataFrame,
    feedback: pl.LazyFrame | pl.DataFrame,
    labels: pl.LazyFrame | pl.DataFrame,
    *,
    scope: Scope,
    history: History,
    now: datetime,
    unfit: pl.DataFrame | None = None,
    pinned: Collection[str] = (),
) -> Selection:
    """What the pipeline's next attempt takes at `now`, and whether that is enough (rules.md, Samples to When an attempt
    starts). The order of the rows of any frame changes nothing.

    `unfit`: what cannot be trained on for its length or form: `sample_id`, `right_key` and, optionally, `why`
    (`too_long`, the default, or `template_refuses`). `pinned`: ids of samples pinned in any benchmark.
    """
    light = samples.lazy().select(SAMPLE_COLUMNS)
    rows = selected(light, feedback.lazy(), labels.lazy(), scope=scope, now=now)
    rows = _with_reason(rows, unfit=unfit, pinned=pinned).with_row_index("_row")
    rows = _without_duplicates(rows, history).with_columns(ranks(rows["prompt_key"], seed=scope.seed))
    usable = rows["reason"].null_count()
    rows = _training_rows(_sides(rows, scope=scope, history=history), scope=scope, history=history)
    rows = rows.select(
        "sample_id", "role", "reason", "teaches", "right_key", "prompt_key", "rank", "reviewed", "is_new", "held_by"
    )
    return _summed(rows, usable=usable, scope=scope, history=history)


def _summed(rows: pl.DataFrame, *, usable: int, scope: Scope, history: History) -> Selection:
    counts: dict[str, int] = dict(rows.group_by("reason").len().iter_rows())
    held_new = counts.get("held_new", 0)
    kept = counts.get("held_before", 0)
    train = counts.get("new", 0) + counts.get("again", 0)
    first = history.last_trained is None
    trains = pl.col("role").is_in(["train", "check"])
    counted = trains | (pl.col("role") == "holdout") if first else pl.col("is_new")
    picked = pl.col("teaches") == "scored"
    train_picked, have_picked = rows.select((trains & picked).sum(), (counted & picked).sum().alias("counted")).row(0)
    return Selection(
        rows=rows,
        selected=rows.height,
        usable=usable,
        held=kept + held_new,
        held_new=held_new,
        train=train,
        new=counts.get("new", 0),
        train_picked=train_picked,
        left_out={reason: counts[reason] for reason in LEFT_OUT if reason in counts},
        minimum=minimum(
            scope.settings.holdout.percent,
            first=first,
            usable=usable,
            held=kept + held_new,
            kept=kept,
            train=train,
            new=counts.get("new", 0),
            picked=have_picked,
        ),
    )
