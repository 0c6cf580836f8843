"""The bulk lane: files and long lists of rows straight into the lake, a page at a time.

Belongs here: what an import is (identity, retry, repair, counts) and its commits. Does not belong here: what a row
becomes (rules/shapes.py), a page's columns (pages.py), cutting files (rowfiles.py), who may import and under which tag.

A page is written under the lake's lease in three commits, always samples, then labels, then feedback. Identity is
matched inside the lease, so a page that is sent again, whole or in part, by this process or by another, after an error
or after a kill between the commits, stores no row twice and writes only the labels and verdicts that are missing.
Feedback from a file never overrules what a person gave here: rules/feedback.py decides that when it is read.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final

import polars as pl
import uuid_utils

from loop_dagster.errors import BadRequest, LeaseBusy, LoopError
from loop_dagster.rules.carrying import IS_ATTRIBUTE
from loop_dagster.rules.quoting import shown
from loop_dagster.rules.shapes import DEFAULT_FEEDBACK, FLAGS
from loop_dagster.rules.tags import Labels
from loop_dagster.rules.tags import labels as checked_labels
from loop_dagster.store.import_result import NAMED_IDS, ImportResult, RowNote, Tally, name
from loop_dagster.store.lake import Lake
from loop_dagster.store.pages import Input, Options, Page, build_page, decode_page
from loop_dagster.store.rowfiles import file_digest, other_form, read_rows
from loop_dagster.tables import FEEDBACK, LABELS, SAMPLES

__all__ = ["ImportResult", "import_file", "import_rows"]

Hold = Callable[[], AbstractContextManager[Any]]
Waiting = Callable[[Collection[str]], Mapping[str, str]]
Progress = Callable[[int, int], None]

#: Rows of one page: three commits a page, and about 4 kB of memory for a chat of 1 kB.
PAGE_ROWS: Final = 20_000
PAGE_BYTES: Final = 64 * 1024 * 1024


def import_rows(
    lake: Lake,
    rows: Iterable[bytes | str | object],
    *,
    source: str,
    now: datetime,
    labels: Iterable[object] = (),
    attributes: Mapping[str, object] | None = None,
    import_id: str | None = None,
    row_offset: int = 0,
    row_ids: Sequence[str] | None = None,
    default_feedback: str | None = None,
    model: str | None = None,
    hold: Hold = nullcontext,
    waiting: Waiting | None = None,
    page_rows: int = PAGE_ROWS,
    on_progress: Progress | None = None,
) -> ImportResult:
    """Import rows in the order given and say what became of each.

    A row is the bytes or the text of one JSON value, in which a number keeps its spelling, or an object that was
    decoded before, in which it has lost it, or the Refusal of one that the caller could not read. `hold` gives the
    lake's lease, taken anew for each page. `waiting` says which identities are stored elsewhere, waiting to reach the
    lake (`Inbox.identities`): they count as present. `now` is when the samples are recorded, `import_id` is drawn when
    left out. `on_progress` gets rows done and known.

    Raises BadRequest or a subclass before anything is stored: labels that cannot be tags, row ids that are not one a
    row or not unique, an unknown `default_feedback`. A page that cannot be written does not raise: the result names
    its rows as not saved and is not `complete`. LeaseBusy is raised only for the first page, with nothing stored.
    """
    settings = _settings(
        source=source,
        labels=labels,
        attributes=attributes,
        import_id=import_id if import_id is not None else str(uuid_utils.uuid7()),
        default_feedback=default_feedback,
        model=model,
        now=now,
    )
    if row_offset < 0:
        raise BadRequest(f"row_offset must be 0 or more, got {row_offset}. Nothing was stored.")
    if row_ids is not None:
        rows = list(rows)
        _check_row_ids(row_ids, len(rows))
    total = len(rows) if isinstance(rows, Sequence) else 0
    inputs = (
        Input(
            position=row_offset + index,
            line=index + 1,
            value=row,
            decoded=not isinstance(row, bytes | str),
            row_id=row_ids[index] if row_ids is not None else None,
        )
        for index, row in enumerate(rows)
    )
    run = _Run(lake, settings, hold, waiting)
    return run.all(_row_pages(inputs, page_rows), total, on_progress)


def import_file(
    path: Path,
    lake: Lake,
    *,
    source: str,
    now: datetime,
    labels: Iterable[object] = (),
    attributes: Mapping[str, object] | None = None,
    import_id: str | None = None,
    default_feedback: str | None = None,
    model: str | None = None,
    hold: Hold = nullcontext,
    waiting: Waiting | None = None,
    page_rows: int = PAGE_ROWS,
    on_progress: Progress | None = None,
) -> ImportResult:
    """Import a file of JSONL or of one JSON array, as `import_rows` does with its rows, in bounded memory.

    `import_id` is by default the digest of the file's content and the source, so that importing the file again adds
    nothing; byte order mark, CRLF, blank lines at the end and the file's name do not count. Lines are the file's own,
    from 1; blank ones are passed over. `on_progress` gets bytes done and in all.

    Raises BadRequest as `import_rows` does, and for a path that is no file or none of text in UTF-8.
    """
    if not path.is_file():
        raise BadRequest(f"There is no file {path.name}. Name a JSONL file or a JSON array; nothing was stored.")
    if (form := other_form(path)) is not None:
        raise BadRequest(
            f"{path.name} is {form.name}, and text in UTF-8 is needed; nothing was stored. Write it again with, say, "
            f"{form.mend}."
        )
    settings = _settings(
        source=source,
        labels=labels,
        attributes=attributes,
        import_id=import_id if import_id is not None else f"file-{file_digest(path, source)}",
        default_feedback=default_feedback,
        model=model,
        now=now,
    )
    run = _Run(lake, settings, hold, waiting)
    return run.all(_file_pages(path, page_rows), path.stat().st_size, on_progress)


def _row_pages(inputs: Iterable[Input], page_rows: int) -> Iterator[tuple[list[Input], int]]:
    given, done = iter(inputs), 0
    while page := list(islice(given, page_rows)):
        done += len(page)
        yield page, done


def _file_pages(path: Path, page_rows: int) -> Iterator[tuple[list[Input], int]]:
    """Pages of the file's rows, at most `page_rows` and about PAGE_BYTES each, with the bytes read so far."""
    page: list[Input] = []
    size = position = read = 0
    for rows, read in read_rows(path):
        for line, data in rows:
            page.append(Input(position, line, data))
            position += 1
            size += len(data or b"")
            if len(page) >= page_rows or size >= PAGE_BYTES:
                yield page, read
                page, size = [], 0
    if page:
        yield page, read


@dataclass(frozen=True, slots=True)
class _Settings:
    options: Options
    labels: Labels


def _settings(
    *,
    source: str,
    labels: Iterable[object],
    attributes: Mapping[str, object] | None,
    import_id: str,
    default_feedback: str | None,
    model: str | None,
    now: datetime,
) -> _Settings:
    """Everything that must be right before the first row is stored."""
    if not isinstance(source, str) or not 1 <= len(source.strip()) <= 200:
        raise BadRequest(
            "source must be a text of 1 to 200 characters that says what the rows come from. Nothing was stored."
        )
    if not isinstance(import_id, str) or not 1 <= len(import_id) <= 80:
        raise BadRequest(
            "import_id must be a text of 1 to 80 characters. Nothing was stored; leave it out for a new one."
        )
    if default_feedback is not None and default_feedback not in DEFAULT_FEEDBACK:
        raise BadRequest(
            f"default_feedback must be 'good' or left out, got {shown(default_feedback, 40)}. Nothing was stored.",
            field="default_feedback",
        )
    if now.tzinfo is None:
        raise ValueError("`now` needs a zone")
    clean = checked_labels(labels, attributes)
    return _Settings(Options(source.strip(), import_id, now, model, default_feedback, clean.names), clean)


def _check_row_ids(row_ids: Sequence[str], rows: int) -> None:
    if len(row_ids) != rows:
        raise BadRequest(f"row_ids must be one a row: needed {rows}, found {len(row_ids)}. Nothing was stored.")
    if not all(isinstance(one, str) and one for one in row_ids):
        raise BadRequest("Every row id must be a text that is not empty. Nothing was stored.")
    repeated = [one for one, count in Counter(row_ids).items() if count > 1]
    if repeated:
        raise BadRequest(f"No two rows of a call may share an id: {len(repeated)} ids do. Nothing was stored.")


class _Run:
    """One import call: pages in, one result out."""

    def __init__(self, lake: Lake, settings: _Settings, hold: Hold, waiting: Waiting | None) -> None:
        self._lake = lake
        self._options = settings.options
        self._labels = settings.labels
        self._hold = hold
        self._waiting = waiting
        self._tally = Tally()
        self._error: LoopError | OSError | None = None
        self._begun = False
        self._given_up = False

    def all(self, pages: Iterable[tuple[list[Input], int]], total: int, on_progress: Progress | None) -> ImportResult:
        """Store page after page: while one is written, the next is redacted and keyed and the one after it decoded.

        Writing and most of the redacting need no Python, so that two processors are busy.
        """
        waiting: deque[tuple[Future[None], int]] = deque()

        def settle(most: int) -> None:
            while len(waiting) > most:
                stored, read = waiting.popleft()
                stored.result()
                if on_progress is not None:
                    on_progress(min(read, total) if total else read, total or read)

        stages = ThreadPoolExecutor(1, "import-build"), ThreadPoolExecutor(1, "import-write")
        with stages[0] as builder, stages[1] as writer, _quick_turns():
            given = iter(pages)
            while True:
                with _without_collection():
                    inputs, read = next(given, ([], 0))
                    decoded = decode_page(inputs, self._options)
                if not inputs:
                    break
                by_row_id = inputs[0].row_id is not None
                settle(1)
                built = builder.submit(build_page, decoded, self._options)
                waiting.append((writer.submit(self._page, built, by_row_id=by_row_id), read))
                del inputs, decoded, built
            settle(0)
        return self._tally.result(self._options.import_id, self._options.source, self._error)

    def _page(self, built: Future[Page], *, by_row_id: bool) -> None:
        """Store one page. After one that could not be written the others are only counted."""
        page = built.result()
        if self._given_up:
            return
        tally = self._tally
        for position, line, refusal in page.refusals:
            tally.refused[refusal] += 1
            name(tally.refused_rows, RowNote(position + 1, line, refusal.code, refusal.sentence))
        stage = _Stage()
        if self._error is None:
            try:
                with self._hold():
                    self._store(page, stage, by_row_id=by_row_id)
            except (LoopError, OSError) as error:
                if not self._begun and isinstance(error, LeaseBusy):
                    self._given_up = True
                    raise  # nothing was stored, so there is nothing to count: come back later
                self._error = error
        self._begun = True
        self._count(page, stage)

    def _store(self, page: Page, stage: _Stage, *, by_row_id: bool) -> None:
        """The three commits; `stage` says afterwards, or after an error, how far they came."""
        if page.samples.is_empty():
            return
        present = self._present(page.samples, by_row_id=by_row_id)
        held_elsewhere: Collection[str] = ()
        if self._waiting is not None:
            elsewhere = self._waiting(page.samples["identity"].to_list())
            held_elsewhere = elsewhere.keys()
            present = {**elsewhere, **present}
        stage.present = page.samples["identity"].is_in(list(present))
        new = page.samples.filter(~stage.present)
        if new.height:
            self._lake.append(SAMPLES, new)
        stage.samples = True

        # Rows found again get the ids they have; what waits outside the lake came with its labels and verdict.
        ids = page.samples.select(
            pl.when(stage.present)
            .then(pl.col("identity").replace_strict(present, default=None, return_dtype=pl.String))
            .otherwise("sample_id")
            .alias("sample_id"),
            elsewhere=pl.col("identity").is_in(list(held_elsewhere)),
        )
        repairable = ids["sample_id"].filter(stage.present & ~ids["elsewhere"])
        stage.verdicts_due = self._missing_verdicts(page, ids, stage.present, repairable)
        labels = self._missing_labels(new["sample_id"], repairable, _with_ids(page.labels, ids["sample_id"]))
        if labels.height:
            self._lake.append(LABELS, labels)
        feedback = self._feedback(page.verdicts.with_columns(ids["sample_id"]).filter(stage.verdicts_due))
        if feedback.height:
            self._lake.append(FEEDBACK, feedback)
        stage.verdicts = True

    def _present(self, samples: pl.DataFrame, *, by_row_id: bool) -> dict[str, str]:
        """Ids of the samples that are in the lake, by identity. Runs under the lease."""
        # What has expired is nobody's any more: its row comes in again, as it does after the next upkeep.
        here = (pl.col("source") == self._options.source) & (pl.col("expires_at") > self._options.now)
        rows = self._lake.scan(SAMPLES).filter(here)
        if not by_row_id:
            # Delta keeps minima and maxima of both, so an import does not read the files of others, nor its own pages.
            low, high = samples["position"].min(), samples["position"].max()
            rows = rows.filter(
                (pl.col("import_id") == self._options.import_id)
                & pl.col("position").is_between(pl.lit(low), pl.lit(high))
            )
        found = rows.filter(pl.col("identity").is_in(samples["identity"].implode())).select("identity", "sample_id")
        return dict(found.collect().iter_rows())

    def _missing_labels(self, new: pl.Series, repairable: pl.Series, own: pl.DataFrame) -> pl.DataFrame:
        """Rows of `labels` for new samples, and for found ones whatever label they never had.

        `own` are those that the rows bring themselves; where the call names the same tag or key, the call's counts.
        """
        words: list[tuple[str, str | None, None]] = [(word, None, None) for word in self._labels.tags]
        words += [(word, value, None) for word, value in self._labels.attributes]
        if not words and own.is_empty():
            return LABELS.empty()
        due = pl.concat([new, repairable]).to_frame("sample_id")
        wanted = due.join(pl.DataFrame(words, schema=own.drop("sample_id").schema, orient="row"), how="cross")
        same = [pl.col("sample_id"), pl.col("label"), IS_ATTRIBUTE]
        if own.height:
            mine = own.join(due, on="sample_id", how="semi").join(wanted, on=same, how="anti")
            wanted = pl.concat([wanted, mine])
        if repairable.len():
            had = self._lake.scan(LABELS).filter(_among(repairable)).select("sample_id", "label", "value").collect()
            wanted = wanted.join(had, on=same, how="anti", maintain_order="left")
        return wanted.select(
            label_id=_ids(wanted.height),
            sample_id="sample_id",
            label="label",
            value="value",
            parent="parent",
            removed=pl.lit(value=False),
            created_at=pl.lit(self._options.now, dtype=LABELS["created_at"].dtype),
        )

    def _missing_verdicts(self, page: Page, ids: pl.DataFrame, present: pl.Series, repairable: pl.Series) -> pl.Series:
        """Which rows bring a verdict that no import has written for their sample yet."""
        brings = page.verdicts["verdict"].is_not_null()
        due = brings & ~present
        if repairable.len():
            had = (
                self._lake.scan(FEEDBACK)
                .filter(_among(repairable) & (pl.col("origin") == "import"))
                .select("sample_id")
                .collect()
            )
            again = (
                brings
                & ids["sample_id"].is_in(repairable.implode())
                & ~ids["sample_id"].is_in(had["sample_id"].implode())
            )
            due = due | again
        return due

    def _feedback(self, verdicts: pl.DataFrame) -> pl.DataFrame:
        return verdicts.select(
            feedback_id=_ids(verdicts.height),
            sample_id="sample_id",
            verdict="verdict",
            origin=pl.lit("import"),
            right_answer="right_answer",
            right_key="right_key",
            right_bytes="right_bytes",
            score=pl.lit(None, dtype=pl.Float64),
            reason=pl.lit(None, dtype=pl.String),
            created_at=pl.lit(self._options.now, dtype=FEEDBACK["created_at"].dtype),
        )

    def _count(self, page: Page, stage: _Stage) -> None:
        tally = self._tally
        present = stage.present if stage.present is not None else pl.repeat(False, page.samples.height, eager=True)
        if not stage.samples and page.samples.height:
            lost = (~present).arg_true()
            tally.not_saved += lost.len()
            for index in lost:
                name(tally.not_saved_rows, page.lines[index])
        tally.already_present += int(present.sum())
        if not stage.samples:
            return
        created = (~present).arg_true().to_list()
        verdict, answered = page.verdicts["verdict"], page.samples["answer_key"].is_not_null()
        due = stage.verdicts_due if stage.verdicts_due is not None else verdict.is_not_null() & ~present
        unreviewed = verdict.is_null() & ~present
        if stage.verdicts:
            tally.reviewed += int(due.sum())
        else:
            lost = due.arg_true()
            tally.verdicts_not_saved += lost.len()
            for index in lost:
                name(tally.verdicts_not_saved_rows, page.lines[index])
        tally.imported += len(created)
        tally.needs_review += int((unreviewed & answered).sum())
        tally.waiting_for_answer += int((unreviewed & ~answered).sum())
        tally.by_shape.update(page.shapes[index] for index in created)
        room = NAMED_IDS - len(tally.trace_ids)
        tally.trace_ids += page.samples["sample_id"].gather(created[:room]).to_list()
        new = set(created)
        for index, counts in page.redactions.items():
            if index in new:
                tally.redacted.update(counts)
        stored = set(page.samples["position"].gather(created)) if page.flags else set()
        for position, line, code in page.flags:
            if position in stored:
                tally.flagged += 1
                name(tally.flagged_rows, RowNote(position + 1, line, code, FLAGS[code]))


@dataclass(slots=True)
class _Stage:
    """How far the commits of a page came."""

    present: pl.Series | None = None
    samples: bool = False
    verdicts_due: pl.Series | None = None
    verdicts: bool = False


def _with_ids(labels: pl.DataFrame, ids: pl.Series) -> pl.DataFrame:
    """The rows' own labels with the ids of their samples: `sample_id`, `label`, `value`, `parent`."""
    return labels.select(ids.gather(labels["row"]).alias("sample_id"), "label", "value", "parent")


def _ids(count: int) -> pl.Series:
    return pl.Series([str(uuid_utils.uuid7()) for _ in range(count)], dtype=pl.String)


def _among(ids: pl.Series) -> pl.Expr:
    """Membership, with the smallest and largest id so that Delta's statistics leave files out."""
    return pl.col("sample_id").is_between(pl.lit(ids.min()), pl.lit(ids.max())) & pl.col("sample_id").is_in(
        ids.implode()
    )


@contextmanager
def _quick_turns() -> Iterator[None]:
    """Stages that need Python for a moment get it after a fifth of the usual wait: a tenth of the whole time."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


@contextmanager
def _without_collection() -> Iterator[None]:
    """A page makes a million small objects and no cycle; looking for cycles among them costs a third of its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
