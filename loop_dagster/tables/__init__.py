"""Every Delta table of the lake, declared once."""

from __future__ import annotations

from loop_dagster.tables.attempts import (
    ADAPTERS,
    ANSWERS,
    HOLDOUTS,
    JUDGEMENTS,
    QUESTIONS,
    REPORTS,
    SELECTIONS,
    TRAINING_SETS,
)
from loop_dagster.tables.base import Column, Table
from loop_dagster.tables.feedback import FEEDBACK
from loop_dagster.tables.labels import LABELS
from loop_dagster.tables.samples import SAMPLES

TABLES: tuple[Table, ...] = (
    SAMPLES,
    FEEDBACK,
    LABELS,
    SELECTIONS,
    HOLDOUTS,
    QUESTIONS,
    TRAINING_SETS,
    ADAPTERS,
    ANSWERS,
    JUDGEMENTS,
    REPORTS,
)

__all__ = [
    "ADAPTERS",
    "ANSWERS",
    "FEEDBACK",
    "HOLDOUTS",
    "JUDGEMENTS",
    "LABELS",
    "QUESTIONS",
    "REPORTS",
    "SAMPLES",
    "SELECTIONS",
    "TABLES",
    "TRAINING_SETS",
    "Column",
    "Table",
]
