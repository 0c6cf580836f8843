"""Which unreviewed samples the judge scores for a pipeline, how many at a time, and what it is doing about it.

Belongs here: rules.md, Scoring unreviewed samples: whom it may ask about and in which order, chunks that never ask for
more than is short, tries after failures, waits while the judge is away, the status with its sentence. Does not belong
here: what a score teaches (`selection.py`), what it costs (`money.py`), asking and storing. `now` comes in.

What a score could change is found by supposing it: where every sample that may be asked about were picked, those that
the next attempt would then train on or hold back are worth asking about. Duplicates, twins of held-back samples and
what is too long fall out by the one rule that decides about all other samples too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

import polars as pl

from loop_dagster.rules.feedback import PICK_SCORE
from loop_dagster.rules.minimums import Minimum

Status = Literal["scoring", "waiting", "idle", "held", "off"]

#: Samples of a chunk, after which everything is looked at anew; more where the judge takes more at once (ours).
CHUNK: Final = 100
#: Where there are very many, only so many of the newest are supposed to be picked at first: a chunk is far smaller.
WINDOW: Final = 20_000
#: So often a sample is asked about whose rating could not be had, and the waits between (ours).
MOST_TRIES: Final = 3
TRY_AGAIN: Final = (timedelta(hours=1), timedelta(days=1))
#: Waits while the judge is away or refuses, after 1, 2, 3 … times in a row; the last one from then on (ours).
HOLDS: Final = (timedelta(minutes=5), timedelta(minutes=15), timedelta(hours=1), timedelta(hours=4))

_ROLES: Final = ("train", "check", "holdout")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known of earlier tries beside the scores themselves.

    `resting`: samples that this judge failed to rate, until their next try or for good. `by_others`: samples that only
    other judges have scored, which this one may be asked about again.
    """

    resting: Collection[str] = ()
    by_others: Collection[str] = ()


def known_to(rows: pl.DataFrame, asked: Asked) -> pl.Series:
    """Ids of the samples whose score stands: picked by any judge, or scored below the bar by this one."""
    found = rows.filter((pl.col("teaches") == "scored") | (pl.col("reason") == "below_bar"))
    again = (pl.col("reason") == "below_bar") & pl.col("sample_id").is_in(list(asked.by_others))
    return found.filter(~again)["sample_id"]


def askable(rows: pl.DataFrame, asked: Asked) -> pl.Series:
    """Ids of the samples that may be asked about at all, from the rows of a selection (`Selection.rows`).

    Never one that a person reviewed, one without an answer, one pinned, or one that this judge has scored: a score of
    the same judge, by the same rubric, of the same answer stays. (A sample's answer never changes.)
    """
    may = (pl.col("reason") == "no_feedback") | (
        (pl.col("reason") == "below_bar") & pl.col("sample_id").is_in(list(asked.by_others))
    )
    found = rows.filter(may & ~pl.col("reviewed"))["sample_id"]
    return found.filter(~found.is_in(list(asked.resting)))


def supposed(ids: pl.Series, now: datetime) -> pl.DataFrame:
    """Feedback as it would be if the judge gave each of the samples the best score now: what selecting reads of it."""
    return pl.DataFrame({"sample_id": ids.cast(pl.String)}).select(
        (pl.lit("supposed ") + pl.col("sample_id")).alias("feedback_id"),
        "sample_id",
        verdict=pl.lit("scored"),
        origin=pl.lit("judge"),
        right_key=pl.lit(None, pl.Int64),
        score=pl.lit(1.0),
        created_at=pl.lit(now).cast(pl.Datetime("us", "UTC")),
        right_bytes=pl.lit(None, pl.Int64),
    )


def worth_asking(rows: pl.DataFrame, ids: pl.Series, samples: pl.DataFrame, *, known: pl.Series) -> pl.DataFrame:
    """Those of the askable `ids` whose score could count, the newest first, with the key of the answer to rate.

    `rows` are of a selection that supposed the best score for each of `ids`; `samples` has sample_id, created_at,
    text_key and answer_key of these and of the `known`, whose score stands: the same answer to the same conversation is
    not asked about again under another id. Gives `sample_id` and `right_key`.
    """
    same = ["text_key", "answer_key"]
    scored = samples.filter(pl.col("sample_id").is_in(known.implode())).select(same)
    return (
        rows.filter(pl.col("sample_id").is_in(ids.implode()) & pl.col("role").is_in(_ROLES))
        .select("sample_id", "right_key")
        .join(samples.select("sample_id", "created_at", *same), on="sample_id", how="inner")
        .join(scored, on=same, how="anti")
        .sort("created_at", "sample_id", descending=True)
        .select("sample_id", "right_key")
    )


def chunk_size(short: int, *, at_once: int) -> int:
    """How many samples are asked about before the next look: never more than are short, if all of them were picked."""
    return max(0, min(short, max(CHUNK, 2 * at_once)))


def picked(score: float) -> bool:
    """Whether a score is trained on (rules.md, What a sample teaches)."""
    return round(score, 9) >= PICK_SCORE


def next_try(tries: int, now: datetime) -> datetime | None:
    """When a sample is asked about again whose rating could not be had `tries` times; None: never again."""
    return None if tries >= MOST_TRIES else now + TRY_AGAIN[min(tries, len(TRY_AGAIN)) - 1]


def hold_until(failures: int, now: datetime) -> datetime:
    """When the judge is tried again after it was away, or rated nothing, `failures` times in a row (from 1)."""
    return now + HOLDS[min(failures, len(HOLDS)) - 1]


@dataclass(frozen=True, slots=True)
class Hold:
    """Why scoring is held although there is something to do; `until` None: until something is changed."""

    code: str
    sentence: str
    until: datetime | None = None

    def holds(self, now: datetime) -> bool:
        return self.until is None or now < self.until


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a pipeline's scoring depends on, as far as somebody looked.

    `active`: number of the attempt under way. `complete`: no further version can be made. `leaves_out`: its feedback
    condition leaves unreviewed samples out. `cannot`: why this judge cannot score. `minimum` and `left` (samples worth
    asking about) are None where nobody counted.
    """

    enabled: bool
    paused: bool = False
    complete: bool = False
    active: int | None = None
    leaves_out: bool = False
    cannot: str | None = None
    hold: Hold | None = None
    minimum: Minimum | None = None
    left: int | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """What scoring is doing, with the sentence that says so. `held_until` only where a time ends the hold."""

    status: Status
    message: str
    held_until: datetime | None = None


def standing(facts: Facts, now: datetime) -> Standing:
    """What scoring is doing for a pipeline. What was not counted hinders nothing."""
    for applies, status, message in _reasons(facts):
        if applies:
            return Standing(status, message)
    if facts.hold is not None and facts.hold.holds(now):
        return Standing("held", facts.hold.sentence, facts.hold.until)
    if facts.left == 0:
        return Standing("idle", "No unreviewed sample is left whose score could count.")
    short = f"the {facts.minimum.short:,} that it still needs" if facts.minimum else "what it needs"
    message = f"The judge scores unreviewed samples, the newest first, until the next attempt has {short}."
    return Standing("scoring", message)


def _reasons(facts: Facts) -> list[tuple[bool, Status, str]]:
    """What keeps scoring from being wanted at all, in the order in which it is said."""
    ready = facts.minimum is not None and facts.minimum.ready
    under_way = f"Attempt {facts.active} is under way; samples for the next one are scored once it has ended."
    out = "The pipeline's feedback condition leaves unreviewed samples out, so none is scored."
    return [
        (not facts.enabled, "off", "The scoring of unreviewed samples is switched off."),
        (facts.paused, "waiting", "The pipeline is paused, so nothing is scored."),
        (facts.complete, "waiting", "The pipeline can make no more versions, so nothing is scored."),
        (facts.leaves_out, "idle", out),
        (facts.active is not None, "waiting", under_way),
        (ready, "waiting", "The next attempt has what it needs, so nothing is scored."),
        (facts.cannot is not None, "held", facts.cannot or ""),
    ]
