"""Lists, searches and counts over a million samples against DuckDB on the same Parquet files, in the same run.

Ours: what the API does for a page of 50 (samples with text, feedback and tags, and the total of all that match), for
the workspace's tags and for the preview of a dataset; without keys, HTTP and JSON. DuckDB: the same answer in SQL, with
as many threads, as few statements as it needs, and the quicker of its two ways to ignore case. Answers are compared
before anything is timed; sides alternate, medians count. With other work on the machine, compare the processor times.

    python -m bench.list_and_search [--rows 1000000] [--repeat 3]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import polars as pl

from bench.million import FREQUENT, NOW, TAG, make, order_number
from bench.table import Line, record
from loop_dagster.api.finding import Filters, find
from loop_dagster.api.rows.datasets import preview
from loop_dagster.rules.carrying import carried
from loop_dagster.rules.conditions import DatasetConditions
from loop_dagster.settings import Settings
from loop_dagster.store.open import Store, open_store
from loop_dagster.tables import FEEDBACK, LABELS, SAMPLES

AIM = 2.0
PAGE = 50
#: Of the rows about one sample and label the newest, unless it takes the label off.
CARRIED = """SELECT sample_id, label, s.value AS value, s.parent AS parent FROM (
    SELECT sample_id, label,
        arg_max({'value': value, 'parent': parent, 'removed': removed}, (created_at, label_id)) AS s
    FROM labels GROUP BY ALL) WHERE NOT s.removed"""
#: The feedback that decides about each sample: given here before an import's before the judge's, then the newest.
DECIDED = """SELECT sample_id, s.origin <> 'judge' AS reviewed,
    CASE WHEN s.origin <> 'judge' OR round(s.score, 9) >= 0.8 THEN s.verdict END AS teaches FROM (
    SELECT sample_id, arg_max({'verdict': verdict, 'origin': origin, 'score': score},
        (CASE origin WHEN 'here' THEN 2 WHEN 'import' THEN 1 ELSE 0 END, created_at, feedback_id)) AS s
    FROM feedback GROUP BY ALL)"""
TAGGED = (
    f"sample_id IN (SELECT sample_id FROM ({CARRIED}) WHERE value IS NULL AND (label = '{{0}}' OR parent = '{{0}}'))"
)


@dataclass(frozen=True)
class Look:
    """One question: how ours and how DuckDB answers it, in a form that is equal when the answers are."""

    name: str
    ours: Callable[[], object]
    peer: Callable[[], object]


def page_of(store: Store, filters: Filters) -> Callable[[], object]:
    def look() -> object:
        found = find(store, filters, NOW, limit=PAGE, offset=0)
        said = sum(len(row["feedback"]) for row in found.rows), sum(len(row["labels"]) for row in found.rows)
        return found.total, [row["sample_id"] for row in found.rows], *said

    return look


def page_in_sql(db: Any, condition: str) -> Callable[[], object]:
    def look() -> object:
        if condition:
            db.execute(f"CREATE OR REPLACE TEMP TABLE m AS SELECT sample_id, created_at FROM samples WHERE {condition}")
        source = "m" if condition else "samples"
        total = db.execute(f"SELECT count(*) FROM {source}").fetchone()[0]
        newest = f"SELECT sample_id FROM {source} ORDER BY created_at DESC, sample_id DESC LIMIT {PAGE}"
        ids = [row[0] for row in db.execute(newest).fetchall()]
        among = "sample_id BETWEEN ? AND ? AND sample_id IN (SELECT unnest(?))"
        given = [min(ids), max(ids), ids] if ids else ["", "", []]
        rows = {row[0]: row for row in db.execute(f"SELECT * FROM samples WHERE {among}", given).fetchall()}
        said = [
            len(db.execute(f"SELECT * FROM {table} WHERE {among} ORDER BY created_at", given).fetchall())
            for table in ("feedback", "labels")
        ]
        return total, [rows[one][0] for one in ids], *said

    return look


def tagged(tag: str) -> str:
    """Carries the tag or a child of it."""
    tags = f"SELECT sample_id FROM ({CARRIED}) WHERE value IS NULL AND (label = '{tag}' OR parent = '{tag}')"
    return f"sample_id IN ({tags})"


def holds(word: str) -> str:
    """Whatever its case, the quicker of ILIKE and a pattern."""
    return f"(regexp_matches(messages, '(?i){word}') OR regexp_matches(answer, '(?i){word}'))"


def tags_of(store: Store) -> object:
    rows = carried(store.samples.keys().labels).group_by("label", "value", "parent").len()
    return sorted(rows.iter_rows(), key=str)


def tags_in_sql(db: Any) -> object:
    rows = db.execute(f"SELECT label, value, parent, count(*) FROM ({CARRIED}) GROUP BY ALL").fetchall()
    return sorted(rows, key=str)


def preview_of(store: Store) -> object:
    found = preview(store, DatasetConditions(tags=(TAG,)), None, NOW)
    models = [(one["model"], one["samples"]) for one in found["models"]]
    return found["samples"], sorted(found["feedback_counts"].items()), sorted(models)


def preview_in_sql(db: Any) -> object:
    db.execute(
        f"""CREATE OR REPLACE TEMP TABLE m AS SELECT model, CASE teaches WHEN 'accepted' THEN 'good'
        WHEN 'rejected' THEN 'bad' WHEN 'edited' THEN 'corrected' WHEN 'gold' THEN 'corrected' ELSE 'unreviewed' END
        AS word FROM samples LEFT JOIN ({DECIDED}) USING (sample_id) WHERE expires_at > ? AND {tagged(TAG)}""",
        [NOW],
    )
    words = db.execute("SELECT word, count(*) FROM m GROUP BY ALL").fetchall()
    models = db.execute("SELECT model, count(*) FROM m GROUP BY ALL").fetchall()
    return sum(number for _word, number in words), sorted(words), sorted(models)


def looks(store: Store, db: Any, rows: int) -> list[Look]:
    rare = order_number(rows * 3 // 4)
    signal = f"sample_id IN (SELECT sample_id FROM ({DECIDED}) WHERE reviewed AND teaches IN ('edited', 'gold'))"
    pages = [
        ("newest 50", Filters(), ""),
        ("label", Filters(label=TAG), tagged(TAG)),
        ("rare label", Filters(label="vip"), tagged("vip")),
        ("signal corrected", Filters(signal="corrected"), signal),
        ("source and model", Filters(source="shop", model="small-model"), "source = 'shop' AND model = 'small-model'"),
        ("search, one hit", Filters(text=rare), holds(rare)),
        ("search, half of all", Filters(text=FREQUENT.upper()), holds(FREQUENT)),
        ("search under a label", Filters(text="refund", label="vip"), f"{holds('refund')} AND {tagged('vip')}"),
    ]
    found = [Look(name, page_of(store, filters), page_in_sql(db, condition)) for name, filters, condition in pages]
    found.append(Look("all tags", lambda: tags_of(store), lambda: tags_in_sql(db)))
    found.append(Look("dataset preview", lambda: preview_of(store), lambda: preview_in_sql(db)))
    return found


def timed(work: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def opened(store: Store) -> Any:
    """DuckDB over the files of the newest versions."""
    db = duckdb.connect(config={"threads": pl.thread_pool_size()})
    db.execute("SET TimeZone = 'UTC'")
    for table in (SAMPLES, FEEDBACK, LABELS):
        files = ", ".join(f"'{path}'" for path in store.lake.files(table))
        db.execute(f"CREATE VIEW {table.name} AS SELECT * FROM read_parquet([{files}])")
    return db


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="loop-reading-") as folder:
        store = open_store(Settings(home=Path(folder)))
        make(store.lake, options.rows)
        db = opened(store)
        print(f"{options.rows:,} samples, {pl.thread_pool_size()} threads, median of {options.repeat}\n")
        print(f"{'':22}{'ours':>18}{'DuckDB':>18}{'ratio':>8}{'cpu':>7}")
        for look in looks(store, db, options.rows):
            ours, peer = look.ours(), look.peer()
            if ours != peer:
                raise SystemExit(f"{look.name}: the answers differ")
            runs: dict[str, list[tuple[float, float]]] = {"ours": [], "peer": []}
            for turn in range(options.repeat):
                sides = [("ours", look.ours), ("peer", look.peer)]
                for side, work in sides if turn % 2 == 0 else reversed(sides):
                    runs[side].append(timed(work))
            (wall, cpu), (their_wall, their_cpu) = (
                tuple(statistics.median(column) for column in zip(*runs[side], strict=True)) for side in runs
            )
            print(
                f"{look.name:22}{wall:>8.3f} ({cpu:.3f}){their_wall:>10.3f} ({their_cpu:.3f})"
                f"{wall / their_wall:>8.2f}{cpu / their_cpu:>7.2f}",
                flush=True,
            )
            detail = f"{wall:.2f} s against {their_wall:.2f} s; {cpu / their_cpu:.2f} × by processor time"
            what = f"{look.name} at {options.rows:,} samples, against DuckDB"
            record(Line(what=what, got=wall / their_wall, aim=AIM, unit="×", better="lower", detail=detail))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"\npeak memory of both sides in one process: {peak:,.0f} MiB")


if __name__ == "__main__":
    main()
