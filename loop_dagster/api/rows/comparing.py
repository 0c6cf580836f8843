"""Attempts and versions side by side: `AttemptCompareResponse`, `VersionCompareResponse`.

Belongs here: reading what two comparisons kept, and conversions. Does not belong here: which way a sample went
(rules/side_by_side.py). Figures of two comparisons are never subtracted: each had its own opponent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import polars as pl

from loop_dagster.api.gaps import unknown
from loop_dagster.api.rows.attempts import cents_of, pipeline_attempt
from loop_dagster.api.rows.pipelines import Found
from loop_dagster.errors import BadRequest, NotFound
from loop_dagster.report_data import COMPARING
from loop_dagster.rules.side_by_side import SCORES, TIE_BAND, Direction, figures, passes, shared
from loop_dagster.store.open import Store
from loop_dagster.store.records import Attempt
from loop_dagster.store.versions import Version
from loop_dagster.tables import JUDGEMENTS, QUESTIONS
from loop_dagster.tables.attempts import deleted_id
from loop_dagster.wire import timestamp

#: Questions of the set that all versions are measured on.
_COMMON: Final = 1_500
#: Figures of a report that both sides show.
_FIGURES: Final = ("rows_scored", "win_rate", "candidate_pass_rate", "incumbent_pass_rate")
_MORE: Final = ("wins", "losses", "ties", "incumbent_mean", "candidate_mean")
_CHANGED: Final = "Its right answer is another one than when the other attempt was tested."


def attempts_compared(
    store: Store, found: Found, a: str, b: str, *, direction: Direction | None, limit: int, offset: int
) -> dict[str, Any]:
    """Two attempts of one pipeline side by side. Raises NotFound; BadRequest for a direction where there is none."""
    one, other = (_attempt(found, run_id) for run_id in (a, b))
    why = _why_not(one, other)
    rows = shared(_scores(store, one), _scores(store, other))
    same = rows.filter(~pl.col("changed"))
    if direction is not None and why is not None:
        raise BadRequest(f"filter cannot be used: {why}", field="filter")
    listed = rows if direction is None else rows.filter(pl.col("direction") == direction)
    counts: dict[str, int] = dict(same.group_by("direction").len().iter_rows())
    page = listed.slice(offset, limit)
    return {
        **unknown("AttemptCompareResponse"),
        "rule_id": found.pipeline.pipeline_id,
        "a": _side(one, found),
        "b": _side(other, found),
        "tie_band": TIE_BAND,
        "shared_sample": {
            "rows": rows.height,
            "comparable": why is None,
            "why": why,
            "answer_changed": rows.height - same.height,
            "answer_unknown": 0,  # every comparison keeps the right answers that it asked for
            **{word: None if why else counts.get(word, 0) for word in ("higher", "lower", "same")},
            "a": None if why else figures(same["score"]),
            "b": None if why else figures(same["score_b"]),
        },
        "items": [_item(row, why) for row in page.iter_rows(named=True)],
        "total": listed.height,
    }


def versions_compared(store: Store, found: Found, a: int | None, b: int | None) -> dict[str, Any]:
    """Every version of a pipeline side by side, the oldest first. Raises NotFound for a number that is none."""
    numbers = [version.version_no for version in found.versions]
    missing = next((number for number in (a, b) if number is not None and number not in numbers), None)
    if missing is not None:
        raise NotFound("version", f"v{missing}")
    runs = {attempt.run_id: attempt for attempt in found.attempts}
    pairs = [(version, runs[version.run_id]) for version in found.versions]
    first = next(((version, attempt) for version, attempt in pairs if _tested(attempt)), None)
    common = pl.DataFrame(schema={"asked": pl.UInt64}) if first is None else _asked(store, first[1]).head(_COMMON)
    promotion = found.pipeline.settings.promotion
    return {
        **unknown("VersionCompareResponse"),
        "rule_id": found.pipeline.pipeline_id,
        "promotion_policy": {**unknown("PromotionPolicyState"), "policy": promotion.policy, "k": promotion.k},
        "versions": [_version(store, found, version, attempt, common) for version, attempt in pairs],
        "a": a,
        "b": b,
        "common_set": {
            "rows": common.height,
            "from": None if first is None else f"samples held back before v{first[0].version_no}",
        },
    }


def _attempt(found: Found, run_id: str) -> Attempt:
    for attempt in found.attempts:
        if attempt.run_id == run_id:
            return attempt
    raise NotFound("training run", run_id)


def _tested(attempt: Attempt) -> bool:
    return bool((attempt.report or {}).get("rows_scored"))


def _finished(attempt: Attempt) -> bool:
    """Whether it has a report, and is not being compared anew."""
    return attempt.report is not None and attempt.state not in COMPARING


def _why_not(one: Attempt, other: Attempt) -> str | None:
    """Why two comparisons are not on one scale; None when the same judge rated both. The rubric is one for all."""
    for attempt in (one, other):
        if not (_finished(attempt) and _tested(attempt)):
            return f"Attempt {attempt.attempt_no} has no finished comparison that scored anything."
    judges = [_judge(attempt) for attempt in (one, other)]
    if judges[0] != judges[1]:
        by = [f"attempt {attempt.attempt_no} by {judge}" for attempt, judge in zip((one, other), judges, strict=True)]
        return f"They were rated by two judges, {' and '.join(by)}, so their scores are not on one scale."
    return None


def _judge(attempt: Attempt) -> str:
    return str(attempt.frozen.get("judge_model") or attempt.frozen["judge"])


def _scores(store: Store, attempt: Attempt) -> pl.DataFrame:
    """What the candidate scored on each held-back sample of a finished comparison that is still there (`SCORES`)."""
    if not _finished(attempt):
        return pl.DataFrame(schema=SCORES)
    mine = pl.col("attempt") == attempt.key
    scored = store.lake.scan(JUDGEMENTS).filter(mine & (pl.col("status") == "scored"))
    rows = (
        _questions(store, attempt)
        .join(scored.select("sample_id", pl.col("candidate_score").alias("score")).collect(), on="sample_id")
        .filter(~pl.col("sample_id").str.starts_with(deleted_id(0)[:-1]))
        .filter(~pl.col("sample_id").is_in(list(store.inbox.tombstones())))
    )
    return rows.select(list(SCORES))


def _questions(store: Store, attempt: Attempt) -> pl.DataFrame:
    """Held-back samples of an attempt as its report numbers them; `asked` is a key of question and right answer."""
    parts = [pl.col(name).fill_null("") for name in ("messages", "tools", "right_answer")]
    texts = pl.concat_str(parts, separator="\x1e")
    return (
        store.lake.scan(QUESTIONS)
        .filter(pl.col("attempt") == attempt.key)
        .select("sample_id", "ordinal", pl.col("right_answer").hash().alias("right_key"), texts.hash().alias("asked"))
        .collect()
        .sort("ordinal")
        .with_columns(number=pl.int_range(1, pl.len() + 1, dtype=pl.Int64))
    )


def _asked(store: Store, attempt: Attempt) -> pl.DataFrame:
    return _questions(store, attempt).select("asked").unique(maintain_order=True)


def _side(attempt: Attempt, found: Found) -> dict[str, Any]:
    row = pipeline_attempt(attempt, found.pipeline)
    same = ("run_id", "attempt", "version", "trigger", "base_model_id", "model_family", "outcome", "verdict")
    more = ("decision", "train_rows", "holdout_rows", "lineage", "finished_at")
    return {**{name: row[name] for name in (*same, *more)}, "holdout": _holdout(attempt)}


def _holdout(attempt: Attempt) -> dict[str, Any]:
    report = attempt.report
    status = None
    if report is not None:
        status = "budget_stopped" if attempt.counts.get("judge_stopped") else "done"
    return {
        "evaluation_id": attempt.run_id if report else None,
        "status": status,
        "judge_model": _judge(attempt) if report else None,
        "mean_delta": (report or {}).get("mean_change"),
        **{name: (report or {}).get(name) for name in (*_FIGURES, *_MORE)},
    }


def _item(row: Mapping[str, Any], why: str | None) -> dict[str, Any]:
    sides = {
        side: {"evaluation_item_id": number, "score": score, "passed": passes(score)}
        for side, number, score in (("a", row["number"], row["score"]), ("b", row["number_b"], row["score_b"]))
    }
    said = why or (_CHANGED if row["changed"] else None)
    return {"trace_id": row["sample_id"], **sides, "direction": None if said else row["direction"], "why": said}


def _version(store: Store, found: Found, version: Version, attempt: Attempt, common: pl.DataFrame) -> dict[str, Any]:
    row = pipeline_attempt(attempt, found.pipeline)
    report = attempt.report or {}
    compared = [event.at for event in store.attempts.timeline(attempt.run_id) if event.to_state == "evaluating"]
    return {
        **unknown("VersionScores"),
        "version": version.version_no,
        "run_id": attempt.run_id,
        "attempt": attempt.attempt_no,
        "base_model_id": row["base_model_id"],
        "model_family": row["model_family"],
        "state": attempt.state,
        "verdict": attempt.verdict,
        "decision": attempt.decision,
        "compared_at": timestamp(compared[0]) if compared else None,
        "tested": row["tested"],
        "holdout": {
            **{name: report.get(name) for name in _FIGURES},
            "mean_delta": report.get("mean_change"),
            **_on_common(store, attempt, common),
        },
        "promoted_at": timestamp(version.promoted_at),
        "is_live": found.live is not None and found.live.version_no == version.version_no,
        "rolled_back": version.rolled_back_at is not None,
        "model_id": row["base_model_id"],
        "model_role": row["model_role"],
        "cost_cents": cents_of(attempt),
        "cost_up_to": row["cost_up_to"],
        "gpu_seconds": attempt.gpu_seconds,
        "train_rows": attempt.train_rows,
        "learned_new": row["lineage"]["new_samples"],
        "compared_with_version": attempt.compared_with_version,
        "compared_with": attempt.compared_with,
    }


def _on_common(store: Store, attempt: Attempt, common: pl.DataFrame) -> dict[str, Any]:
    """How a version's own test came out on the common questions that it scored against the same right answer.

    Questions are matched by their text, so that a sample which was deleted since still counts.
    """
    if common.is_empty() or not _tested(attempt):
        return {"common_pass_rate": None, "common_rows": None}
    mine = (pl.col("attempt") == attempt.key) & (pl.col("status") == "scored")
    scored = store.lake.scan(JUDGEMENTS).filter(mine).select("sample_id", "candidate_score").collect()
    rows = _questions(store, attempt).unique("asked", keep="first").join(common, on="asked", how="semi")
    found = figures(rows.join(scored, on="sample_id")["candidate_score"])
    return {
        "common_pass_rate": None if found is None else found["pass_rate"],
        "common_rows": None if found is None else found["rows"],
    }
