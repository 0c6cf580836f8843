"""How long the minimums of one pipeline take over a million samples, read from Delta tables of 1 to 2,000 files.

Run: `python -m bench.minimums [--rows 1000000] [--files 1 100 2000]`. The tables are made under a temporary folder. A
figure is the median of `--repeat` runs of everything that the sensor does for one pipeline: opening three tables,
reading their key columns and `select`, once for a pipeline that never trained and once after one attempt.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import uuid_utils
from deltalake import convert_to_deltalake

from bench.table import Line, record
from loop_dagster.rules.pipelines import PipelineSettings
from loop_dagster.rules.selection import History, Scope, Selection, select
from loop_dagster.store.lake import MOST_SMALL_FILES, Lake
from loop_dagster.tables import FEEDBACK, LABELS, SAMPLES, Table

NOW = datetime(2026, 6, 1, tzinfo=UTC)
START = NOW - timedelta(days=29)
SCOPE = Scope(own_tag="support-replies", seed=8_675_309, settings=PipelineSettings())
TEXT_BYTES = 120


@dataclass(frozen=True)
class Figure:
    """Seconds on the clock and of processors; with other work on the machine only the second says much."""

    wall_s: float
    cpu_s: float

    def __str__(self) -> str:
        return f"{self.wall_s:.2f} s ({self.cpu_s:.2f} cpu)"


def ids(count: int) -> list[str]:
    return [str(uuid_utils.uuid7()) for _ in range(count)]


def key(rng: np.random.Generator, count: int, distinct: int | None = None) -> np.ndarray:
    values = rng.integers(-(2**63), 2**63 - 1, distinct or count, dtype=np.int64)
    return values if distinct is None else values[rng.integers(0, distinct, count)]


def declared(table: Table, columns: dict[str, Any], rows: int) -> pl.DataFrame:
    """A frame of the table's schema; columns that are not named are null."""
    frame = pl.select(pl.int_range(rows).alias("_row"))
    for name, values in columns.items():
        frame = frame.with_columns(pl.Series(name, values) if isinstance(values, list | np.ndarray) else values)
    missing = [pl.lit(None, dtype).alias(name) for name, dtype in table.schema.items() if name not in columns]
    return frame.with_columns(missing).select(list(table.schema)).cast(pl.Schema(table.schema))


def sample_rows(rows: int, rng: np.random.Generator) -> pl.DataFrame:
    prompt = key(rng, rows, distinct=int(rows * 0.9))
    created = pl.lit(START) + pl.duration(seconds=2 * pl.col("_row"))
    columns = {
        "sample_id": ids(rows),
        "source": pl.lit("support-replies").alias("source"),
        "origin": rng.choice(["captured", "imported"], rows),
        "identity": ids(rows),
        "model": pl.lit("a-model").alias("model"),
        "messages": pl.lit("m" * TEXT_BYTES).alias("messages"),
        "answer": pl.lit("a" * TEXT_BYTES).alias("answer"),
        "text_key": prompt ^ 7,
        "prompt_key": prompt,
        "answer_key": key(rng, rows),
        "bytes": pl.lit(2 * TEXT_BYTES).alias("bytes"),
        "created_at": created.alias("created_at"),
        "expires_at": (created + pl.duration(days=30)).alias("expires_at"),
    }
    return declared(SAMPLES, columns, rows)


def feedback_rows(samples: pl.DataFrame, rng: np.random.Generator) -> pl.DataFrame:
    """One verdict for every sample, a second one for one in twenty."""
    about = pl.concat([samples, samples.sample(fraction=0.05, seed=1)]).select("sample_id", "created_at")
    rows = about.height
    corrected, judged = pl.col("verdict").is_in(["edited", "gold"]), pl.col("verdict") == "scored"
    columns = {
        "feedback_id": ids(rows),
        "sample_id": about["sample_id"].alias("sample_id"),
        "verdict": rng.choice(
            ["accepted", "rejected", "edited", "gold", "scored"], rows, p=[0.4, 0.15, 0.2, 0.05, 0.2]
        ),
        "person": rng.choice(["here", "import"], rows),
        "origin": pl.when(judged).then(pl.lit("judge")).otherwise("person").alias("origin"),
        "right_answer": pl.when(corrected).then(pl.lit("r" * TEXT_BYTES)).alias("right_answer"),
        "key": key(rng, rows),
        "right_key": pl.when(corrected).then("key").alias("right_key"),
        "right_bytes": pl.when(corrected).then(TEXT_BYTES).alias("right_bytes"),
        "any": rng.random(rows),
        "score": pl.when(judged).then("any").alias("score"),
        "created_at": (about["created_at"] + timedelta(minutes=5)).alias("created_at"),
    }
    return declared(FEEDBACK, columns, rows)


def label_rows(samples: pl.DataFrame) -> pl.DataFrame:
    """The pipeline's tag on every sample, another one on one in ten."""
    own = samples.select("sample_id", pl.lit("support-replies").alias("label"), "created_at")
    other = samples.sample(fraction=0.1, seed=2).select("sample_id", pl.lit("vip").alias("label"), "created_at")
    both = pl.concat([own, other])
    return both.with_columns(
        pl.Series("label_id", ids(both.height)),
        pl.lit(None, pl.String).alias("value"),
        pl.lit(None, pl.String).alias("parent"),
        pl.lit(False).alias("removed"),
    ).select(list(LABELS.schema))


def write(lake: Lake, table: Table, rows: pl.DataFrame, files: int) -> None:
    folder = Path(lake.path(table))
    folder.mkdir(parents=True)
    size = -(-rows.height // files)
    for number, start in enumerate(range(0, rows.height, size)):
        rows.slice(start, size).write_parquet(folder / f"part-{number:05d}.parquet")
    convert_to_deltalake(folder)


def timed(lake: Lake, history: History, repeat: int) -> tuple[Figure, Selection]:
    walls, cpus = [], []
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        frames = [lake.scan(table) for table in (SAMPLES, FEEDBACK, LABELS)]
        selection = select(*frames, scope=SCOPE, history=history, now=NOW)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return Figure(statistics.median(walls), statistics.median(cpus)), selection


def note(where: str, figure: Figure) -> None:
    """Hand one figure to the runner."""
    detail = f"{figure.cpu_s:.2f} s of processors"
    record(Line(what=f"minimums {where}", got=figure.wall_s, aim=1, unit="s", better="lower", detail=detail))


def gather(lake: Lake, tables: list[tuple[Table, pl.DataFrame]], repeat: int) -> Figure:
    """The same look after each table got one more row, as any import or drain adds some."""
    for table, rows in tables:
        lake.append(table, rows.head(1).with_columns(pl.lit(str(uuid_utils.uuid7())).alias(table.key[0])))
    return timed(lake, History.empty(), repeat)[0]


def after(selection: Selection) -> History:
    """The history that one attempt leaves which took `selection` and kept an adapter."""
    rows = selection.rows.with_columns(pl.lit(1, pl.Int64).alias("attempt_no"))
    trained = pl.col("role").is_in(["train", "check"])
    return History.of(held=rows.filter(pl.col("role") == "holdout"), trained=rows.filter(trained))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, nargs="+", default=[1, 100, 2_000])
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    rng = np.random.default_rng(5)
    samples = sample_rows(options.rows, rng)
    tables = [(SAMPLES, samples), (FEEDBACK, feedback_rows(samples, rng)), (LABELS, label_rows(samples))]
    print(f"{options.rows:,} samples, {pl.thread_pool_size()} threads, median of {options.repeat}")
    print(f"{'files':>6}  {'first attempt':<20} {'next attempt':<20} what the first would take")
    for files in options.files:
        with tempfile.TemporaryDirectory() as root:
            lake = Lake(root)
            for table, rows in tables:
                write(lake, table, rows, files)
            first, selection = timed(lake, History.empty(), options.repeat)
            following, _ = timed(lake, after(selection), options.repeat)
            note(f"in {files:,} files", first)
            if files > MOST_SMALL_FILES:
                gathered = gather(lake, tables, options.repeat)
                print(
                    f"{'':>6}  {gathered!s:<20} after one more commit of each table, which writes small files together"
                )
                note(f"in {files:,} files, after the next commit", gathered)
        taken = f"{selection.train:,} train, {selection.held:,} held back of {selection.usable:,} usable"
        print(f"{files:>6}  {first!s:<20} {following!s:<20} {taken}", flush=True)


if __name__ == "__main__":
    main()
