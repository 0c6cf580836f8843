"""What tells one look at a pipeline from the next: a number per tag that changes with anything said under it.

Belongs here: the signature over key columns. Does not belong here: what a look decides (selection.py).

With fifty pipelines, one new sample concerns one of them; this pass over the keys costs less than one selection.
"""

from __future__ import annotations

import polars as pl

from loop_dagster.rules.feedback import id_key


def tag_signatures(samples: pl.LazyFrame, feedback: pl.LazyFrame, labels: pl.LazyFrame) -> dict[str, tuple[int, int]]:
    """(rows, checksum) of every tag and parent over its labels, their samples and the feedback on these.

    Frames need sample_id, and feedback_id, label_id, label and parent of theirs. Checksums compare within one version
    of the libraries: a change of theirs costs one look too many.
    """
    said = feedback.group_by(id_key()).agg(_small("feedback_id").sum().alias("said"))
    there = samples.select(id_key(), pl.lit(1, pl.UInt64).alias("there"))
    rows = (
        labels.select(id_key(), "label", "parent", _small("label_id").alias("row"))
        .join(said, on="id_key", how="left")
        .join(there, on="id_key", how="left")
        .with_columns((pl.col("row") + pl.col("said").fill_null(0) + pl.col("there").fill_null(0)).alias("sum"))
    )
    by_label = rows.group_by(pl.col("label").alias("tag")).agg(pl.len(), pl.col("sum").sum())
    parents = rows.filter(pl.col("parent").is_not_null())
    by_parent = parents.group_by(pl.col("parent").alias("tag")).agg(pl.len(), pl.col("sum").sum())
    both = pl.concat([by_label, by_parent]).group_by("tag").agg(pl.col("len").sum(), pl.col("sum").sum())
    return {tag: (count, total) for tag, count, total in both.collect().iter_rows()}


def _small(name: str) -> pl.Expr:
    """A hash of 32 bits: sums of them stay within 64 bits however many rows there are."""
    return (pl.col(name).hash(7) % 2**32).cast(pl.UInt64)
