"""Which samples meet conditions: the one reading that lists, datasets, exports and pipelines share.

Belongs here: conditions over frames of keys. Does not belong here: what a person may write (conditions.py), what a
pipeline makes of a sample that it selects (selection.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Final

import polars as pl

from loop_dagster.rules import feedback as verdicts
from loop_dagster.rules.carrying import IS_ATTRIBUTE
from loop_dagster.rules.conditions import FEEDBACK_WORDS, DatasetConditions, Narrowing
from loop_dagster.rules.feedback import id_key

#: Columns of `samples` that conditions ask about.
_ASKED: Final = ("origin", "model", "created_at")
#: A sample's feedback in the words of lists, from the deciding verdict.
WORD: Final = pl.col("teaches").replace_strict(verdicts.WORDS, default="unreviewed", return_dtype=pl.String)
#: Nothing is narrowed.
EVERYTHING: Final = Narrowing()


def read(frame: pl.LazyFrame) -> pl.DataFrame:
    """Collected into one piece: a table of 2,000 files arrives in 2,000, and every later step would pay for that."""
    return frame.collect().rechunk()


def tagged(labels: pl.LazyFrame, tags: Collection[str]) -> pl.Series:
    """`id_key` of the samples that carry one of `tags` or a child of one, by the newest row of each tag."""
    wanted = list(tags)
    matches = pl.col("label").is_in(wanted) | pl.col("parent").is_in(wanted)
    # An attribute of the same name is no tag; frames without attributes' values cannot tell and have none.
    if "value" in labels.collect_schema():
        labels = labels.filter(~IS_ATTRIBUTE)
    puts_on = (matches & ~pl.col("removed")).fill_null(False).alias("_puts_on")
    rows = read(labels.select("sample_id", "label", "parent", "removed"))
    # A newer row of a label that once matched may take it off or give it another parent, so all its rows are looked at.
    touched = rows.filter(matches)["label"].unique()
    rows = rows.filter(pl.col("label").is_in(touched.implode())).select(id_key(), "label", puts_on)
    # Only a pair of sample and label with a row that does not put it on needs the newest of its rows looked up.
    pair = ["id_key", "label"]
    against = rows.filter(~pl.col("_puts_on")).select(pair).unique()
    if against.is_empty():
        return rows["id_key"]
    again = labels.filter(pl.col("label").is_in(touched.implode()))
    newest = (
        read(again.select(id_key(), "label", "created_at", "label_id", puts_on))
        .join(against, on=pair, how="semi")
        .sort("created_at", "label_id", descending=True)
        .unique(subset=pair, keep="first", maintain_order=True)
        .filter("_puts_on")
    )
    return pl.concat([rows.join(against, on=pair, how="anti")["id_key"], newest["id_key"]])


def narrowed(conditions: Narrowing) -> list[pl.Expr]:
    """The conditions on a sample itself, as expressions over its columns; the one on feedback is `WORD`'s."""
    keep: list[pl.Expr] = []
    if conditions.origin:
        keep.append(pl.col("origin") == conditions.origin)
    if conditions.model:
        keep.append(pl.col("model") == conditions.model)
    if conditions.from_:
        keep.append(pl.col("created_at") >= conditions.from_)
    if conditions.to:
        keep.append(pl.col("created_at") <= conditions.to)
    return keep


def _belongs(labels: pl.LazyFrame, group: DatasetConditions) -> pl.Expr:
    """All conditions of a group but the one on feedback, over columns of samples and `id_key`; never null."""
    keep = narrowed(group)
    if group.tags and group.match == "any":
        keep.append(pl.col("id_key").is_in(tagged(labels, group.tags).implode()))
    elif group.tags:
        keep += [pl.col("id_key").is_in(tagged(labels, [tag]).implode()) for tag in group.tags]
    return pl.all_horizontal(keep).fill_null(False) if keep else pl.lit(True)


def _held(labels: pl.LazyFrame, groups: Sequence[DatasetConditions]) -> pl.LazyFrame:
    """`labels`, read once where the groups look at them more than once."""
    looks = sum(1 if group.match == "any" else len(group.tags) for group in groups if group.tags)
    return read(labels).lazy() if looks > 1 else labels


def _says(words: Collection[str]) -> pl.Expr:
    return WORD.is_in(list(words)) if words else pl.lit(True)


def chosen(
    samples: pl.LazyFrame,
    feedback: pl.LazyFrame,
    labels: pl.LazyFrame,
    *,
    groups: Sequence[DatasetConditions],
    narrow: Narrowing = EVERYTHING,
    now: datetime,
    columns: Sequence[str] = (),
) -> pl.DataFrame:
    """The samples that belong to any of `groups` and meet `narrow`, with the verdict that decides about each.

    Frames are those of `selection.selected`; deleted samples must not be among `samples`, expired ones are left out.
    Gives sample_id, id_key, created_at, the other `columns` of samples, teaches, reviewed, score, right_key and, where
    feedback has it, right_bytes (of the correction), in the order of `samples`.
    """
    asked = [name for name in ("origin", "model") if any(getattr(group, name) for group in groups)]
    wanted = list(dict.fromkeys(["sample_id", "created_at", "expires_at", *columns, *asked]))
    lazily = samples.filter(*keep) if (keep := narrowed(narrow)) else samples
    rows = read(lazily.select(wanted)).filter(pl.col("expires_at") > now).with_columns(id_key())
    names = [f"_in_{number}" for number in range(len(groups))]
    labels = _held(labels, groups)
    if len(groups) == 1:
        rows = rows.filter(_belongs(labels, groups[0])).with_columns(pl.lit(True).alias(names[0]))
    else:
        marks = [_belongs(labels, group).alias(name) for group, name in zip(groups, names, strict=True)]
        rows = rows.with_columns(marks).filter(pl.any_horizontal(names) if names else pl.lit(False))
    rows = _decided(rows, feedback)
    if any(group.feedback for group in groups):
        said = [pl.col(name) & _says(group.feedback) for group, name in zip(groups, names, strict=True)]
        rows = rows.filter(pl.any_horizontal(said))
    if narrow.feedback:
        rows = rows.filter(_says(narrow.feedback))
    return rows.drop(*names, *(name for name in wanted if name not in ("sample_id", "created_at", *columns)))


def counts(
    samples: pl.LazyFrame,
    feedback: pl.LazyFrame,
    labels: pl.LazyFrame,
    *,
    groups: Sequence[DatasetConditions],
    now: datetime,
) -> list[dict[str, int]]:
    """For each group how many samples it has by the feedback of a person, as `chosen` with that group alone has them.

    Frames are read, and verdicts decided, once for all groups.
    """
    if len(groups) == 1:
        return [_by_word(chosen(samples, feedback, labels, groups=groups, now=now))]
    if not groups:
        return []
    rows = read(samples.select("sample_id", "expires_at", *_ASKED)).filter(pl.col("expires_at") > now)
    rows = _decided(rows.with_columns(id_key()).drop("sample_id", "expires_at"), feedback)
    rows = rows.select("id_key", *_ASKED, WORD.alias("word"))
    labels = _held(labels, groups)
    return [
        _by_word(rows.filter(_belongs(labels, group)), pl.col("word").is_in(list(group.feedback or FEEDBACK_WORDS)))
        for group in groups
    ]


def _by_word(rows: pl.DataFrame, keeps: pl.Expr | None = None) -> dict[str, int]:
    rows = rows if "word" in rows.columns else rows.select(WORD.alias("word"))
    found: dict[str, int] = dict((rows if keeps is None else rows.filter(keeps)).group_by("word").len().iter_rows())
    return {word: found.get(word, 0) for word in FEEDBACK_WORDS}


def _decided(rows: pl.DataFrame, feedback: pl.LazyFrame) -> pl.DataFrame:
    """`rows` with what decides about each: teaches, reviewed, score, right_key and maybe right_bytes."""
    columns = [name for name in verdicts.COLUMNS if name != "sample_id"]
    if "right_bytes" in feedback.collect_schema():
        columns.append("right_bytes")
    said = read(feedback.select(id_key(), *columns))
    if 4 * rows.height < said.height:  # few of many: most feedback is about other samples
        said = said.filter(pl.col("id_key").is_in(rows["id_key"].implode()))
    return rows.join(verdicts.deciding(said), on="id_key", how="left", maintain_order="left").with_columns(
        pl.col("reviewed").fill_null(False)
    )
