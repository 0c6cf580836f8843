"""A lake of made-up samples with text, feedback and tags, for the benchmarks of reading: `make(lake, rows)`.

Belongs here: the rows. Sample ids are UUIDv7 of the moment a sample was recorded, one every two seconds, as captures
and imports leave them; one in ten has a tool call. Every text holds its own order number, so a search can ask for one
sample and, with a word, for half of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

import numpy as np
import polars as pl
import uuid_utils

from loop_dagster.store.lake import Lake
from loop_dagster.tables import FEEDBACK, LABELS, SAMPLES, Table

NOW: Final = datetime(2026, 6, 1, tzinfo=UTC)
PAGE: Final = 50_000
#: In about every second sample.
FREQUENT: Final = "warehouse"
#: The own tag of the pipeline that selects every second sample.
TAG: Final = "support-replies"
_WORDS: Final = (
    "order parcel refund invoice the a is was were where when please could would have been waiting since yesterday "
    "address delivery customer account change cancel confirm number shipping payment returned support thanks because "
    "café naïve Größe straße 12.50 10:20 2026-05-29"
)
_SENTENCES: Final = 20_000


def make(lake: Lake, rows: int, *, seed: int = 5) -> None:
    """Fill the three tables of an empty lake, a page of 50,000 samples a commit, the oldest first."""
    rng = np.random.default_rng(seed)
    sentences = _sentences(rng)
    start = NOW - timedelta(seconds=2 * rows)
    for first in range(0, rows, PAGE):
        for table, frame in _page(rng, sentences, first, min(PAGE, rows - first), start):
            lake.append(table, frame)


def order_number(row: int) -> str:
    """What the text of this row alone holds."""
    return f"order #{row:07d}x"


def _sentences(rng: np.random.Generator) -> pl.Series:
    words = _WORDS.split()
    texts = [" ".join(words[place] for place in line) for line in rng.integers(0, len(words), (_SENTENCES, 14))]
    often = rng.random(_SENTENCES) < 0.16
    return pl.Series([f"{text} {FREQUENT}." if hit else f"{text}." for text, hit in zip(texts, often, strict=True)])


def _page(
    rng: np.random.Generator, sentences: pl.Series, first: int, rows: int, start: datetime
) -> Iterator[tuple[Table, pl.DataFrame]]:
    base = pl.DataFrame({"row": pl.int_range(first, first + rows, eager=True)}).with_columns(
        (pl.lit(start) + pl.duration(seconds=2 * pl.col("row"))).dt.cast_time_unit("us").alias("created_at")
    )
    base = base.with_columns(_ids("sample_id", base["created_at"]))
    yield SAMPLES, _samples(rng, sentences, base)
    yield FEEDBACK, _feedback(rng, base)
    yield LABELS, _labels(rng, base)


def _samples(rng: np.random.Generator, sentences: pl.Series, base: pl.DataFrame) -> pl.DataFrame:
    rows = base.height
    said = [sentences.gather(rng.integers(0, _SENTENCES, rows)).alias(f"s{number}") for number in range(4)]
    number = pl.format("order #{}x", pl.col("row").cast(pl.String).str.zfill(7))
    call = pl.lit(
        ',"tool_calls":[{"function":{"arguments":"{\\"zone\\":\\"north\\"}","name":"look_up"},"id":"call_77",'
        '"type":"function"}]'
    )
    called = pl.col("row") % 10 == 3
    frame = base.with_columns(*said).with_columns(
        pl.concat_str(
            pl.lit('[{"content":"'), "s0", pl.lit(" "), "s1", pl.lit(" "), number, pl.lit('","role":"user"}]')
        ).alias("messages"),
        pl.concat_str(
            pl.lit('{"content":"'),
            "s2",
            pl.lit(" "),
            "s3",
            pl.lit('","role":"assistant"'),
            pl.when(called).then(call).otherwise(pl.lit("")),
            pl.lit("}"),
        ).alias("answer"),
    )
    prompt = rng.integers(-(2**63), 2**63 - 1, rows, dtype=np.int64)
    return _declared(
        SAMPLES,
        frame.with_columns(
            pl.Series("source", rng.choice(["support-replies", "shop", "billing"], rows, p=[0.5, 0.3, 0.2])),
            pl.Series("origin", rng.choice(["captured", "imported"], rows, p=[0.8, 0.2])),
            _identity().alias("identity"),
            pl.format("conversation-{}", pl.col("row") // 3).alias("conversation_id"),
            pl.Series("model", rng.choice(["small-model", "large-model"], rows)),
            pl.Series("text_key", prompt),
            pl.Series("prompt_key", prompt ^ 7),
            pl.Series("answer_key", prompt ^ 99),
            (pl.col("messages").str.len_bytes() + pl.col("answer").str.len_bytes()).cast(pl.Int64).alias("bytes"),
            (pl.col("created_at") + timedelta(days=365)).alias("expires_at"),
        ),
    )


def _feedback(rng: np.random.Generator, base: pl.DataFrame) -> pl.DataFrame:
    """One verdict on three in ten samples, a second one on one in fifty."""
    about = pl.concat([base.filter(pl.col("row") % 10 < 3), base.filter(pl.col("row") % 50 == 1)])
    rows = about.height
    corrected, judged = pl.col("verdict").is_in(["edited", "gold"]), pl.col("verdict") == "scored"
    words = ["accepted", "rejected", "edited", "gold", "scored"]
    frame = about.with_columns(
        (pl.col("created_at") + timedelta(minutes=5)).alias("created_at"),
        pl.Series("verdict", rng.choice(words, rows, p=[0.4, 0.15, 0.2, 0.05, 0.2])),
        pl.Series("person", rng.choice(["here", "import"], rows)),
        pl.Series("key", rng.integers(-(2**63), 2**63 - 1, rows, dtype=np.int64)),
        pl.Series("any", rng.random(rows)),
    )
    return _declared(
        FEEDBACK,
        frame.with_columns(
            _ids("feedback_id", frame["created_at"]),
            pl.when(judged).then(pl.lit("judge")).otherwise("person").alias("origin"),
            pl.when(corrected).then(pl.lit('{"content":"Within 30 days.","role":"assistant"}')).alias("right_answer"),
            pl.when(corrected).then("key").alias("right_key"),
            pl.when(corrected).then(52).alias("right_bytes"),
            pl.when(judged).then("any").alias("score"),
        ),
    )


def _labels(rng: np.random.Generator, base: pl.DataFrame) -> pl.DataFrame:
    """The pipeline's tag on every second sample, a rare one on one in a thousand, an attribute on one in five."""
    row = pl.col("row")
    tag = base.filter(row % 2 == 0).with_columns(label=pl.lit(TAG), value=pl.lit(None, pl.String))
    rare = base.filter(row % 1000 == 7).with_columns(label=pl.lit("vip"), value=pl.lit(None, pl.String))
    country = base.filter(row % 5 == 0).with_columns(label=pl.lit("country"), value=pl.lit("de"))
    frame = pl.concat([tag, rare, country])
    removed = rng.random(frame.height) < 0.002
    return _declared(LABELS, frame.with_columns(_ids("label_id", frame["created_at"]), pl.Series("removed", removed)))


def _ids(name: str, moments: pl.Series) -> pl.Series:
    """UUIDv7 of each moment."""
    made = [str(uuid_utils.uuid7(nanoseconds=at * 1000)) for at in moments.dt.timestamp("us")]
    return pl.Series(name, made)


def _declared(table: Table, frame: pl.DataFrame) -> pl.DataFrame:
    """The table's columns; those that are not there are null."""
    missing = [pl.lit(None, dtype).alias(name) for name, dtype in table.schema.items() if name not in frame.columns]
    return frame.with_columns(missing).select(pl.col(name).cast(dtype) for name, dtype in table.schema.items())


def _identity() -> pl.Expr:
    """32 hex digits in no order, as a hash leaves them."""
    return pl.concat_str(
        pl.col("sample_id").hash(seed).cast(pl.String).str.pad_start(20, "0").str.tail(16) for seed in (1, 2)
    )
