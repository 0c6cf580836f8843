"""What an import did, in counts and in named rows.

Belongs here: the result of a call and how it grows page by page. Does not belong here: anything that reads or writes
rows. Nothing in a result quotes a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from loop_dagster.errors import LoopError
from loop_dagster.rules.shapes import Refusal

#: Rows that a result names one by one; its counts are always of all.
NAMED_ROWS: Final = 1_000
NAMED_IDS: Final = 5_000


@dataclass(frozen=True, slots=True)
class RowNote:
    """One row of an import and what is to be said of it; never quotes the row.

    `row` counts the rows from 1, `line` the lines of the file: of an array on one line every row has line 1.
    """

    row: int
    line: int
    code: str
    sentence: str

    def __getitem__(self, name: str) -> int | str:
        value: int | str = getattr(self, name)
        return value


@dataclass(frozen=True, slots=True)
class ImportResult:
    """What one call did, not what the lake holds; the names are those of the public client.

    `reviewed` counts verdicts that this call wrote, `needs_review` answered samples that it created without one.
    `refused_rows`, `flagged_rows`, `not_saved_rows` and `verdicts_not_saved_rows` name at most 1,000 rows, `trace_ids`
    the first 5,000 samples created, in the file's order. `error` is why an incomplete call stopped, None if it did not.
    """

    import_id: str
    source: str
    imported: int
    already_present: int
    reviewed: int
    needs_review: int
    waiting_for_answer: int
    refused: int
    refused_reasons: tuple[dict[str, Any], ...]
    refused_rows: tuple[RowNote, ...]
    flagged: int
    flagged_rows: tuple[RowNote, ...]
    not_saved: int
    not_saved_rows: tuple[int, ...]
    verdicts_not_saved: int
    verdicts_not_saved_rows: tuple[int, ...]
    by_shape: dict[str, int]
    redacted: dict[str, int]
    notes: tuple[str, ...]
    trace_ids: tuple[str, ...]
    error: dict[str, str] | None = None

    @property
    def complete(self) -> bool:
        """Whether everything that was read and not refused is stored. If not, send the same rows with the same id."""
        return not (self.not_saved or self.verdicts_not_saved)

    @property
    def refused_why(self) -> list[str]:
        return [str(reason["code"]) for reason in self.refused_reasons]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an incomplete one carries `error` with the code IMPORT_INCOMPLETE."""
        values = asdict(self)
        cause = values.pop("error")
        result = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        result["refused_why"] = self.refused_why
        if not self.complete:
            why = f" {cause['message']}" if cause else ""
            result["error"] = {
                "code": "IMPORT_INCOMPLETE",
                "message": f"{self.not_saved:,} rows and {self.verdicts_not_saved:,} verdicts were not saved.{why} "
                f"Send the same rows again with import_id {self.import_id}: what is stored is not stored twice.",
            }
        return result


@dataclass(slots=True)
class Tally:
    """Counts that grow page by page."""

    imported: int = 0
    already_present: int = 0
    reviewed: int = 0
    needs_review: int = 0
    waiting_for_answer: int = 0
    refused: Counter[Refusal] = field(default_factory=Counter)
    refused_rows: list[RowNote] = field(default_factory=list)
    flagged: int = 0
    flagged_rows: list[RowNote] = field(default_factory=list)
    not_saved: int = 0
    not_saved_rows: list[int] = field(default_factory=list)
    verdicts_not_saved: int = 0
    verdicts_not_saved_rows: list[int] = field(default_factory=list)
    by_shape: Counter[str] = field(default_factory=Counter)
    redacted: Counter[str] = field(default_factory=Counter)
    trace_ids: list[str] = field(default_factory=list)

    def result(self, import_id: str, source: str, cause: LoopError | OSError | None) -> ImportResult:
        reasons = tuple(
            {"code": refusal.code, "count": count, "sentence": refusal.sentence}
            for refusal, count in self.refused.most_common()
        )
        error = None
        if isinstance(cause, LoopError):
            error = {"code": cause.code, "message": cause.message}
        elif cause is not None:  # an OSError's own text can name files; its kind is enough
            error = {
                "code": "LAKE_NOT_WRITABLE",
                "message": f"{type(cause).__name__}: {cause.strerror or ''}",
            }
        return ImportResult(
            import_id=import_id,
            source=source,
            imported=self.imported,
            already_present=self.already_present,
            reviewed=self.reviewed,
            needs_review=self.needs_review,
            waiting_for_answer=self.waiting_for_answer,
            refused=sum(self.refused.values()),
            refused_reasons=reasons,
            refused_rows=tuple(self.refused_rows),
            flagged=self.flagged,
            flagged_rows=tuple(self.flagged_rows),
            not_saved=self.not_saved,
            not_saved_rows=tuple(self.not_saved_rows),
            verdicts_not_saved=self.verdicts_not_saved,
            verdicts_not_saved_rows=tuple(self.verdicts_not_saved_rows),
            by_shape=dict(self.by_shape),
            redacted=dict(self.redacted),
            notes=tuple(_notes(self)),
            trace_ids=tuple(self.trace_ids),
            error=error,
        )


def name(names: list[Any], name: object) -> None:
    if len(names) < NAMED_ROWS:
        names.append(name)


def _notes(tally: Tally) -> Iterator[str]:
    """Sentences about what this call created, made from the same counts."""
    if tally.by_shape["question"]:
        yield f"Questions alone, which wait for an answer: {tally.by_shape['question']:,}."
    if tally.by_shape["chosen_rejected"]:
        yield f"Rejected answers, corrected to the chosen ones: {tally.by_shape['chosen_rejected']:,}."
    if tally.needs_review:
        yield f"Answered samples that wait for review, and teach nothing before it: {tally.needs_review:,}."
    if tally.flagged:
        yield f"Conversations in an unusual order, which are flagged: {tally.flagged:,}."
    if tally.already_present and not (tally.imported or tally.not_saved or tally.refused):
        yield "Every row of this import was there already."
