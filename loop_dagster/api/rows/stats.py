"""The workspace in numbers: `LoopStats`.

Belongs here: counting samples and feedback from keys, without any text. Does not belong here: pipelines' own counts.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Any, Final

import polars as pl

from loop_dagster.api.rows.pipelines import RECENT, capture, counts, find_all
from loop_dagster.rules.feedback import COLUMNS, WORDS, deciding, id_key
from loop_dagster.store.open import Store
from loop_dagster.tables.feedback import VERDICTS

#: Who gave feedback, in the wire's words.
SOURCES: Final = {"here": "human", "import": "human", "judge": "judge"}


def stats(store: Store, now: datetime) -> dict[str, Any]:
    """How much there is and what people said of it."""
    keys = store.samples.keys(now)
    samples = keys.samples.select(
        id_key(), "created_at", pl.col("answer_key").is_not_null().alias("answered")
    ).collect()
    given = keys.feedback.select(*COLUMNS).collect().with_columns(id_key())
    # Everything is counted from the side of feedback, of which there is less: what has none is unreviewed.
    given = given.filter(pl.col("id_key").is_in(samples["id_key"].implode()))
    taught = deciding(given).filter("reviewed")
    words: Counter[str] = Counter()
    for verdict, number in taught.group_by("teaches").len().iter_rows():
        words[WORDS[verdict]] += number
    words["unreviewed"] = samples.height - taught.height
    unanswered = samples.filter(~pl.col("answered"))["id_key"]
    teaches_nothing = (pl.col("teaches") == "accepted") & pl.col("id_key").is_in(unanswered.implode())
    ready = taught.filter((pl.col("teaches") != "rejected") & ~teaches_nothing)
    by_verdict = dict(given.group_by("verdict").len().iter_rows())
    by_source: Counter[str] = Counter()
    for origin, number in given.group_by("origin").len().iter_rows():
        by_source[SOURCES[origin]] += number
    return {
        "capture": capture(store, now),
        "traces": samples.height,
        "signalled_traces": taught.height,  # by a person, as lists filter by it
        "signals": given.height,
        "by_verdict": {verdict: by_verdict.get(verdict, 0) for verdict in VERDICTS},
        "by_source": dict(by_source),
        "ready": {"sft": ready.height},
        "samples_recent": samples.filter(pl.col("created_at") > now - RECENT).height,
        "feedback": {word: words.get(word, 0) for word in ("good", "corrected", "bad", "unreviewed")},
        "pipelines": counts(find_all(store)),
    }
