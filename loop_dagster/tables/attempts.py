"""Tables written per attempt: the frozen selection and what was derived, measured and decided from it.

An attempt is explained from these rows alone, since purged versions of `samples` cannot be read again.
"""

from __future__ import annotations

from loop_dagster.tables.base import ATTEMPT_COLUMNS, Column, Table

_DELETED = "deleted-"


def deleted_id(ordinal: int) -> str:
    """What stands in the copies of a finished report for the id of a sample that was deleted; it names nobody."""
    return f"{_DELETED}{ordinal}"


def shown_id(sample_id: str) -> str | None:
    """The id of a copy's sample as people and the API see it: null once the sample was deleted (rules.md, Samples)."""
    return None if sample_id.startswith(_DELETED) else sample_id


SELECTIONS = Table(
    "selections",
    "what one attempt took of every sample that its pipeline selects, frozen when the attempt starts",
    (
        *ATTEMPT_COLUMNS,
        Column("sample_id", "id", "sample"),
        Column("role", "word", "what the attempt does with it", words=("train", "check", "holdout", "left_out")),
        Column("reason", "word", "why, a code of rules/selection.py"),
        Column("teaches", "word", "deciding verdict, null where none decides", nullable=True),
        Column("right_key", "key", "hash of the right answer, null where there is none", nullable=True),
        Column("prompt_key", "key", "hash of the normalised prompt"),
        Column("rank", "key", "place in the hold-back order: seeded hash of the normalised prompt"),
        Column("reviewed", "bool", "true when a person reviewed it, false for a pick of the judge"),
        Column("is_new", "bool", "true for a pair that the last attempt that trained did not have"),
        Column("held_by", "int", "earlier attempt that held it back; null where none did", nullable=True),
    ),
    key=("attempt", "sample_id"),
    by_attempt=True,
)

HOLDOUTS = Table(
    "holdouts",
    "samples that an attempt was the first to hold back, with the copy that every attempt is asked; sticky",
    (
        *ATTEMPT_COLUMNS,
        Column("sample_id", "id", "sample; null once it was deleted", nullable=True),
        Column("prompt_key", "key", "hash of the normalised prompt"),
        Column("rank", "key", "place in the hold-back order"),
        Column("reviewed", "bool", "true when a person reviewed it, false for a pick of the judge"),
    ),
    key=("attempt", "prompt_key", "sample_id"),
    by_attempt=True,
)

QUESTIONS = Table(
    "questions",
    "the held-back samples that one attempt is judged on, copied: at most 1,500",
    (
        *ATTEMPT_COLUMNS,
        Column("sample_id", "id", "sample; `deleted-<ordinal>` once it was deleted"),
        Column("ordinal", "int", "place, by (attempt that held it back, hash)"),
        Column("messages", "text", "the prompt, JSON array"),
        Column("tools", "text", "JSON array of tools", nullable=True),
        Column(
            "right_answer",
            "text",
            "JSON of the right assistant message; null when rated on the rubric alone",
            nullable=True,
        ),
    ),
    key=("attempt", "sample_id"),
    by_attempt=True,
)

TRAINING_SETS = Table(
    "training_sets",
    "the rows that one attempt trains on, copied",
    (
        *ATTEMPT_COLUMNS,
        Column("sample_id", "id", "sample"),
        Column("ordinal", "int", "place in the set, from 0, oldest sample first"),
        Column("role", "word", "trained on, or kept aside for the checks", words=("train", "check")),
        Column("teaches", "word", "deciding verdict"),
        Column("right_key", "key", "hash of the right answer"),
        Column("prompt_key", "key", "hash of the normalised prompt"),
        Column("messages", "text", "the prompt, JSON array"),
        Column("tools", "text", "JSON array of tools", nullable=True),
        Column("right_answer", "text", "JSON of the assistant message that is learned"),
    ),
    key=("attempt", "sample_id"),
    by_attempt=True,
)

ADAPTERS = Table(
    "adapters",
    "the LoRA adapter that an attempt kept, and how its training went",
    (
        *ATTEMPT_COLUMNS,
        Column("adapter_digest", "word", "digest of the adapter folder under artifacts"),
        Column("base_digest", "word", "digest of the base that it fits"),
        Column("dtype", "word", "precision it trained in"),
        Column("planned_steps", "int", "optimiser steps planned"),
        Column("trained_steps", "int", "optimiser steps made"),
        Column("kept_step", "int", "step whose weights were kept"),
        Column("tokens", "int", "non-padding tokens trained on"),
        Column("seconds", "float", "wall time of the training loop"),
        Column("recipe", "text", "JSON of the resolved recipe"),
        Column("curve", "text", "JSON array of {step, train_loss, check_loss}, at most 200 points"),
        Column("created_at", "time", "when it was kept"),
    ),
    key=("attempt",),
    by_attempt=True,
)

ANSWERS = Table(
    "answers",
    "what both models answered to each held-back sample",
    (
        *ATTEMPT_COLUMNS,
        Column("sample_id", "id", "sample, as in questions"),
        Column("side", "word", "who answered", words=("candidate", "incumbent")),
        Column("answer", "text", "JSON of the assistant message; null when it gave none", nullable=True),
        Column("finish", "word", "how it ended", words=("stop", "length", "too_long", "empty", "error")),
        Column("prompt_tokens", "int", "tokens of the prompt"),
        Column("answer_tokens", "int", "tokens of the answer"),
    ),
    key=("attempt", "sample_id", "side"),
    by_attempt=True,
)

JUDGEMENTS = Table(
    "judgements",
    "how the judge rated and preferred the answers to each held-back sample",
    (
        *ATTEMPT_COLUMNS,
        Column("sample_id", "id", "sample, as in questions"),
        Column("status", "word", "whether it could be scored", words=("scored", "failed")),
        Column("error_code", "word", "why it failed", nullable=True),
        Column("candidate_score", "float", "0 to 1, null when failed", nullable=True),
        Column("incumbent_score", "float", "0 to 1, null when failed", nullable=True),
        Column("candidate_ratings", "text", "JSON {dimension: 0-10}", nullable=True),
        Column("incumbent_ratings", "text", "JSON {dimension: 0-10}", nullable=True),
        Column(
            "candidate_first",
            "word",
            "who was preferred when the candidate was read first",
            nullable=True,
            words=("candidate", "incumbent", "tie"),
        ),
        Column(
            "incumbent_first",
            "word",
            "who was preferred when the incumbent was read first",
            nullable=True,
            words=("candidate", "incumbent", "tie"),
        ),
        Column(
            "winner",
            "word",
            "both orders agree, else a tie; null when failed",
            nullable=True,
            words=("candidate", "incumbent", "tie"),
        ),
        Column("unanswered", "bool", "true when a missing answer decided it without a rating"),
    ),
    key=("attempt", "sample_id"),
    by_attempt=True,
)

REPORTS = Table(
    "reports",
    "the comparison of candidate and incumbent on the held-back set, with every bar",
    (
        *ATTEMPT_COLUMNS,
        Column("verdict", "word", "what the bars say", words=("better", "not_better", "inconclusive")),
        Column("missed_bar", "word", "first bar that was missed", nullable=True),
        Column("bars", "text", "JSON array of {key, what, needed, got, met}"),
        Column("judge", "word", "judge that rated, by name"),
        Column("compared_with", "word", "version or original", words=("version", "original")),
        Column("compared_with_version", "int", "version that it was compared with", nullable=True),
        Column("rows_scored", "int", "samples scored"),
        Column("rows_failed", "int", "samples that could not be scored"),
        Column("rows_gone", "int", "held-back samples gone before the start"),
        Column("wins", "int", "samples won in both orders"),
        Column("losses", "int", "samples lost in both orders"),
        Column("ties", "int", "the rest"),
        Column("win_rate", "float", "wins / (wins + losses), null with none decided", nullable=True),
        Column("candidate_mean", "float", "mean score", nullable=True),
        Column("incumbent_mean", "float", "mean score", nullable=True),
        Column("mean_change", "float", "mean of candidate minus incumbent", nullable=True),
        Column("candidate_pass_rate", "float", "share at 0.70 or more", nullable=True),
        Column("incumbent_pass_rate", "float", "share at 0.70 or more", nullable=True),
        Column("warnings", "text", "JSON array of warning codes"),
        Column("created_at", "time", "when it was written"),
    ),
    key=("attempt",),
    by_attempt=True,
)
