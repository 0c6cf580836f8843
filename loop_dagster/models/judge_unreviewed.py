"""Rating answers that nobody reviewed, on the rubric alone: one call a sample, many at once, never one twice.

Belongs here: the call, and reading back what a killed process had learned. Does not belong here: which samples are
asked about (`rules/scoring.py`), keeping scores (`store/scorings.py`), working off the calls (`judge_calls.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from loop_dagster.models.journal import Journal
from loop_dagster.models.judge import Case, Judge, Message, Ratings, Usage, score
from loop_dagster.models.judge_calls import FORM, Budget, Call, Notes, Sample, Work, key_of

_RATE: Final[Call] = "rate candidate"


@dataclass(frozen=True, slots=True)
class Rated:
    """What came of a chunk: scores from 0 to 1 and codes of failures by sample id; the others were not reached.

    `ended` says why the judge could not go on and `gone` gives its error's code, `stopped` why it went no further by
    itself (money). `total` is what was used for the chunk, in this call and in those before a kill.
    """

    scores: Mapping[str, float]
    failed: Mapping[str, str]
    total: Usage
    ended: str | None = None
    gone: str | None = None
    stopped: str | None = None


@dataclass(frozen=True, slots=True)
class Unreviewed:
    """A sample that is to be rated: its conversation without any right answer, and the answer that a model gave."""

    case: Case
    answer: Message = field(repr=False)

    def key(self, judge: Judge) -> str:
        """What stands for it in the journal."""
        return key_of(judge, self.case, self.answer)


def rate_unreviewed(
    judge: Judge,
    samples: Sequence[Unreviewed],
    *,
    journal: Path,
    budget: Budget | None = None,
    may_go_on: Callable[[], bool] = lambda: True,
) -> Rated:
    """Rate each answer on the rubric alone (rules.md, Scoring unreviewed samples).

    Readable forms, asking once more, waits and the limit of money are those of a comparison. Every call is kept in
    `journal`; the caller deletes it once the scores are stored.
    """
    with Journal(journal, {"form": FORM}) as kept:
        work = Work(judge, notes := Notes(kept, Usage()), budget)
        asked = [Sample(one.case, one.answer, None, one.key(judge), (_RATE,)) for one in samples]
        work.run(asked, None, may_go_on)
    scores = {one.case.sample_id: score(one.said[_RATE]) for one in asked if _RATE in one.said}
    failed = {one.case.sample_id: one.error_code for one in asked if one.error_code is not None}
    return Rated(scores, failed, notes.total, ended=work.ended, gone=work.gone, stopped=work.stopped)


def read_back(journal: Path, keys: Mapping[str, str]) -> Rated:
    """What a journal holds of samples (key → sample id), without asking anybody; calls under way count as used."""
    scores: dict[str, float] = {}
    failed: dict[str, str] = {}
    with ExitStack() as leaving:
        kept = leaving.enter_context(Journal(journal, {"form": FORM}))
        rows = list(kept.rows)
        total = Notes(kept, Usage()).total
    for row in rows:
        sample_id = keys.get(row.get("key", ""))
        if sample_id is None:
            continue
        if "said" in row:
            said: Ratings = row["said"]
            scores[sample_id] = score(said)
        elif "failed" in row:
            failed[sample_id] = row["failed"]
    return Rated(scores, {one: code for one, code in failed.items() if one not in scores}, total)
