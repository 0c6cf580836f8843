"""How a Delta table is declared: columns with type, key, meaning and whether Delta keeps statistics on them.

Belongs here: the declaration and what follows from it without any engine (the Polars schema, an empty frame, the
columns with statistics). Dagster's column metadata and the Great Expectations suites derive from the same objects in
`assets/`; nothing states a column twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import polars as pl

Kind = Literal["id", "key", "text", "word", "int", "float", "bool", "time"]

#: Polars type of each kind. `key` is a signed 64-bit hash (Delta has no unsigned integers), `text` is free or JSON
#: text of a person, `word` is one of a closed set or a short technical name.
DTYPES: Mapping[Kind, pl.DataType] = {
    "id": pl.String(),
    "key": pl.Int64(),
    "text": pl.String(),
    "word": pl.String(),
    "int": pl.Int64(),
    "float": pl.Float64(),
    "bool": pl.Boolean(),
    "time": pl.Datetime("us", "UTC"),
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `words` is the closed set of a `word` column, None where any short name may stand.

    `ours`: names of a `word` column without such a set are made by the loop itself, never given by anybody.
    """

    name: str
    kind: Kind
    meaning: str
    nullable: bool = False
    words: tuple[str, ...] | None = None
    ours: bool = False

    @property
    def dtype(self) -> pl.DataType:
        return DTYPES[self.kind]

    @property
    def has_statistics(self) -> bool:
        """Whether Delta may keep minima and maxima in its log, where they outlive deleted rows.

        Never for text, nor for names that came from outside: an id of a conversation may well be somebody's address.
        """
        return self.kind != "text" and (self.kind != "word" or self.words is not None or self.ours)


@dataclass(frozen=True, slots=True)
class Table:
    """One Delta table. `key` names the columns that identify a row; `by_attempt` tables are written per attempt."""

    name: str
    meaning: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    by_attempt: bool = False
    schema: dict[str, pl.DataType] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names) or not set(self.key) <= set(names):
            raise ValueError(f"table {self.name}: columns {names} must be unique and hold the key {self.key}")
        object.__setattr__(self, "schema", {column.name: column.dtype for column in self.columns})

    def __getitem__(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    @property
    def statistics_columns(self) -> list[str]:
        return [column.name for column in self.columns if column.has_statistics]

    def empty(self) -> pl.DataFrame:
        return pl.DataFrame(schema=self.schema)

    def frame(self, rows: list[dict[str, object]]) -> pl.DataFrame:
        """Rows as a frame of exactly this schema; a missing or a foreign column raises."""
        return pl.DataFrame(rows, schema=self.schema, strict=True) if rows else self.empty()


#: The first columns of every table that is written per attempt.
ATTEMPT_COLUMNS = (
    Column("attempt", "word", "partition key of the attempt, `<pipeline id>/<number, four digits>`", ours=True),
    Column("pipeline_id", "word", "pipeline of the attempt", ours=True),
    Column("attempt_no", "int", "number of the attempt in its pipeline, from 1"),
)
