"""Which tags and attributes samples carry now, over a whole frame of labels at once.

Belongs here: of the rows about one tag, or about one attribute, of a sample the newest counts; a tag and an attribute
of the same name are two things. Does not belong here: what a pipeline selects by tags (matching.py), rows of labels
(store/giving.py). Nearly everything that a sample carries has one row, and only the others are worth sorting.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from loop_dagster.rules.feedback import id_key

#: Whether a row is about an attribute and no tag.
IS_ATTRIBUTE: Final = pl.col("value").is_not_null()
#: Equal for rows about the same; two that are about different things and share one are merely looked at more closely.
_PAIR: Final = (pl.col("sample_id").hash(3) ^ pl.col("label").hash(4) ^ IS_ATTRIBUTE.hash(5)).alias("_pair")
_CARRIED: Final = ("id_key", "label", "value", "parent")


def carried(labels: pl.LazyFrame) -> pl.DataFrame:
    """One row for each tag and attribute that a sample carries: `id_key`, label, value, parent.

    `labels` needs label_id, sample_id, label, value, parent, removed and created_at; of two rows from the same moment
    the higher label_id is the newer.
    """
    rows = labels.select(id_key(), _PAIR, "label", "value", "parent", "removed").collect()
    ordered = rows["_pair"].sort()
    repeated = ordered.filter(ordered == ordered.shift()).unique()
    alone = rows.filter(~pl.col("removed"))
    if repeated.is_empty():
        return alone.select(_CARRIED)
    several = pl.col("_pair").is_in(repeated.implode())
    newest = (
        labels.select(id_key(), _PAIR, "label", "value", "parent", "removed", "created_at", "label_id")
        .filter(several)
        .collect()
        .sort("created_at", "label_id", descending=True)
        .unique(["id_key", "label", IS_ATTRIBUTE], keep="first", maintain_order=True)
        .filter(~pl.col("removed"))
    )
    return pl.concat([alone.filter(~several).select(_CARRIED), newest.select(_CARRIED)])
