"""Tables of the lake whose folder is gone: a reader takes one for a table that nobody has written to yet.

Belongs here: what tells that a table was there, and what is lost with it. Does not belong here: damage inside a table
(store/torn.py). Deletions, expiry and deleted pipelines take rows away and never a table, so what once was written to
stays, if without rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Final

import sqlalchemy as sa

from loop_dagster.doctor.findings import Finding, mistake, warning
from loop_dagster.doctor.installation import Installation
from loop_dagster.rules.states import TrainingRunState
from loop_dagster.store.intake import LAKE_TABLES
from loop_dagster.store.owner import owner_of
from loop_dagster.store.records import Attempt
from loop_dagster.store.schema import attempt_events
from loop_dagster.tables import (
    ADAPTERS,
    ANSWERS,
    FEEDBACK,
    HOLDOUTS,
    JUDGEMENTS,
    LABELS,
    QUESTIONS,
    REPORTS,
    SAMPLES,
    SELECTIONS,
    TABLES,
    TRAINING_SETS,
    Table,
)

#: State that an attempt has been in → the tables that its steps had read or written by then. A step writes its table
#: also when it has no row for it.
THERE_BY: Final[Mapping[TrainingRunState, tuple[Table, ...]]] = {
    "registering": (SAMPLES, FEEDBACK, SELECTIONS),
    "checkpoint_ready": (TRAINING_SETS, ADAPTERS),
    "reported": (HOLDOUTS, QUESTIONS, ANSWERS, JUDGEMENTS, REPORTS),
}

_IMPORT: Final = "import the files again: it brings back {} of the files, and stores nothing twice"
#: What to do without a copy, and what is lost then.
_WITHOUT: Final[Mapping[str, str]] = {
    SAMPLES.name: "the samples are lost: import their files again",
    FEEDBACK.name: f"what people and the judge said here is lost; {_IMPORT.format('the verdicts')}",
    LABELS.name: f"the tags that were given here are lost; {_IMPORT.format('the tags')}",
    SELECTIONS.name: "nothing says any more what was trained on, so the next attempts count all samples as new and may "
    "test on what they have trained on; the next attempt begins the table anew",
    HOLDOUTS.name: "nothing says any more what was held back, so the next attempts may train on what earlier ones were "
    "tested on; the next attempt begins the table anew",
    TRAINING_SETS.name: "what earlier attempts trained on is lost; the next attempt begins the table anew",
    ADAPTERS.name: "how earlier trainings went is lost, not their weights; the next attempt begins the table anew",
    QUESTIONS.name: "the conversations in earlier reports are lost; the next attempt begins the table anew",
    ANSWERS.name: "the answers in earlier reports are lost; the next attempt begins the table anew",
    JUDGEMENTS.name: "earlier reports cannot be derived again, and an attempt that waits for a decision has to be "
    "tested again; the next attempt begins the table anew",
    REPORTS.name: "earlier reports keep only the numbers that lists show; the next attempt begins the table anew",
}


def lost_tables(installation: Installation, readable: Collection[str]) -> Iterator[Finding]:
    """Tables that must be there and are not; `readable` names those that could be opened, or that are not there.

    One finding where none is left, since then another lake is meant, or the whole of it is gone.
    """
    lake = installation.store.lake
    if _is_foreign(installation):
        return  # lake.py's look at the owner says so
    missing = {table.name: table for table in TABLES if table.name in readable and lake.version(table) is None}
    if not missing:
        return
    evidence = dict(_evidence(installation))
    drained = _drained_nowhere(installation, missing, readable)
    needed = [table for name, table in missing.items() if name in evidence]
    if len(missing) == len(TABLES):
        if needed or drained is not None:
            yield _none_is_there(installation, evidence, drained)
        return
    if SAMPLES.name in missing and SAMPLES.name not in evidence and len(missing) < len(readable):
        needed.append(SAMPLES)  # every row of every other table is about a sample
    for table in needed:
        told = evidence.get(table.name, "the other tables, which are about samples, are there")
        yield mistake(
            "lake_table_missing",
            f"table {table.name}",
            where=lake.path(table),
            found=f"it is not there and reads as an empty one, but {told}",
            mend=_mend(lake.path(table), f"If there is none, {_WITHOUT[table.name]}"),
        )
    if drained is not None and not needed:
        names = [table.name for table in LAKE_TABLES if table.name in missing]
        yield warning(
            "lake_table_missing",
            f"table {' or '.join(names)}",
            where=" or ".join(lake.path(missing[name]) for name in names),
            found=f"not there, and batch {drained} of the inbox, which has been written, is in none of the tables that "
            "are",
            mend=_mend(lake.path(missing[names[0]]), f"If there is none, {_WITHOUT[names[0]]}"),
        )


def _is_foreign(installation: Installation) -> bool:
    mark = installation.store.lake.mark
    with contextlib.suppress(OSError):
        found = mark.read()
        mine = owner_of(installation.registry, installation.root, make=False)
        return found is not None and mark.standing(found, mine) == "other"
    return False


def _mend(path: str, without: str) -> str:
    return f"End what runs, and put {path} back from a copy. {without}."


def _none_is_there(installation: Installation, evidence: Mapping[str, str], drained: int | None) -> Finding:
    told = next(iter(evidence.values()), f"batch {drained} of this registry's inbox was written to one")
    return mistake(
        "lake_empty",
        "lake",
        where=installation.known.lake,
        found=f"no table is there, and {told}",
        mend="Name the lake that belongs to this registry: `export LOOP_LAKE_URL=…` (and LOOP_WORKSPACE, if it was set "
        "when the samples came), or put the lake back from a copy.",
    )


def _evidence(installation: Installation) -> Iterator[tuple[str, str]]:
    """Tables that were there, by name, each with what tells it."""
    reached = _reached(installation)
    by_tags: Attempt | None = None
    newest: dict[TrainingRunState, Attempt] = {}
    for attempt in installation.store.attempts.list():
        for state in reached.get(attempt.run_id, ()):
            newest[state] = attempt
            if state == "registering" and not attempt.frozen.get("datasets"):
                by_tags = attempt  # it found its samples by their tags alone
    for state, tables in THERE_BY.items():
        if state in newest:
            for table in tables:
                use = "took what it needed from it" if table in LAKE_TABLES else "wrote to it"
                yield table.name, f"attempt {newest[state].key} of this registry {use}"
    if by_tags is not None:
        yield LABELS.name, f"attempt {by_tags.key} of this registry found its samples by it"


def _reached(installation: Installation) -> dict[str, set[TrainingRunState]]:
    """States of THERE_BY that attempts have been in, by run id: the timeline keeps them also after a test again."""
    registry = installation.registry
    query = sa.select(attempt_events.c.run_id, attempt_events.c.state).where(
        attempt_events.c.workspace == registry.workspace, attempt_events.c.state.in_(list(THERE_BY))
    )
    found: dict[str, set[TrainingRunState]] = {}
    with registry.read() as connection:
        for row in connection.execute(query):
            found.setdefault(row.run_id, set()).add(row.state)
    return found


def _drained_nowhere(installation: Installation, missing: Mapping[str, Table], readable: Collection[str]) -> int | None:
    """Number of the inbox's newest finished batch, if no table that is there carries it and one of the three is gone.

    A batch whose samples were all deleted before it was written leaves the same picture, so alone it is a warning.
    """
    last = installation.store.inbox.drained()
    gone = [table for table in LAKE_TABLES if table.name in missing]
    if last is None or not gone or any(table.name not in readable for table in LAKE_TABLES):
        return None
    lake = installation.store.lake
    there = [lake.transaction(table, "inbox") or 0 for table in LAKE_TABLES if table.name not in missing]
    return last if all(number < last for number in there) else None
