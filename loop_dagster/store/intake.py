"""How rows reach the lake from the inbox and from the intake folder.

Belongs here: the drain (inbox → Delta, each batch exactly once) and the watched folder. The bulk lane itself, which
reads a file page by page, is importing.py.

The drain, so that a kill at any line loses and doubles nothing:

    1. an unfinished batch is taken up again before a new one opens; membership of a batch is frozen in the registry
    2. its rows go to samples, labels and feedback, each commit carrying (inbox, batch) as application transaction, so
       that a repeated commit writes nothing
    3. only then the batch is deleted from the inbox
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from loop_dagster.errors import LoopError, NotFound
from loop_dagster.store.import_result import ImportResult
from loop_dagster.store.importing import import_file
from loop_dagster.store.open import Store
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.tables import FEEDBACK, LABELS, SAMPLES

LAKE_TABLES = (SAMPLES, LABELS, FEEDBACK)
#: A file is taken up once it has not changed for this long: it may still be on its way into the folder.
SETTLED_S = 2.0


@dataclass(frozen=True, slots=True)
class Drained:
    """Rows that one drain moved, by table."""

    batches: int
    rows: dict[str, int]


@contextmanager
def lake_lease(store: Store, holder: str, *, wait_s: float = 300.0) -> Iterator[None]:
    """One writer of the lake at a time: drain, import, delete and housekeeping all take this lease."""
    with store.leases.hold(f"lake/{store.settings.workspace}", holder=holder, wait_s=wait_s):
        yield


def drain(store: Store, *, holder: str) -> Drained:
    """Move every waiting row of the inbox to the lake; what an earlier drain left unfinished comes first."""
    batches = 0
    moved = dict.fromkeys((table.name for table in LAKE_TABLES), 0)
    if not store.inbox.pending().rows and store.inbox.unfinished() is None:
        return Drained(0, moved)
    with lake_lease(store, holder):
        # Above what the lake knows: a registry put back from a copy would count again numbers that the lake has seen,
        # and their rows would be taken for written.
        floor = max(store.lake.transaction(table, "inbox") or 0 for table in LAKE_TABLES)
        while (batch := store.inbox.open_batch(floor=floor)) is not None:
            frames = store.inbox.rows_of(batch)
            for table in LAKE_TABLES:
                frame = frames[table.name]
                if frame.height:
                    store.lake.append(table, frame, transaction=("inbox", batch), sync=True)
                    moved[table.name] += frame.height
            store.inbox.finish(batch)
            batches += 1
    return Drained(batches, moved)


def drain_is_due(store: Store, now: datetime) -> bool:
    """5,000 rows or 60 s of age (settings), or a batch that somebody left unfinished."""
    rows, oldest = store.inbox.pending()
    if store.inbox.unfinished() is not None:
        return True
    old = oldest is not None and (now - oldest).total_seconds() >= store.settings.drain_age_s
    return bool(rows) and (rows >= store.settings.drain_rows or old)


def import_for_pipeline(
    store: Store,
    path: Path,
    pipeline: Pipeline,
    *,
    holder: str,
    now: datetime,
    source: str | None = None,
    labels: tuple[str, ...] = (),
    default_feedback: str | None = None,
    import_id: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ImportResult:
    """Import a file with the pipeline's own tag on every row; its source is the tag unless said otherwise."""
    return import_file(
        path,
        store.lake,
        source=source or pipeline.tag,
        labels=(pipeline.tag, *labels),
        import_id=import_id,
        default_feedback=default_feedback,
        now=now,
        hold=lambda: lake_lease(store, holder),
        waiting=store.inbox.identities,
        on_progress=on_progress,
    )


def waiting_files(store: Store, now: datetime) -> list[Path]:
    """Settled files of the intake folder, oldest name first: `<tag>/<file>` or `<tag>/good/<file>`, .jsonl or .json."""
    folder = store.settings.intake
    if not folder.is_dir():
        return []
    found = [*folder.glob("*/*.json*"), *folder.glob("*/good/*.json*")]
    limit = now.timestamp() - SETTLED_S
    return sorted(
        path
        for path in found
        if path.suffix in (".json", ".jsonl")
        and path.is_file()
        and path.stat().st_mtime <= limit
        and _is_input(path, folder)
    )


def take_files(store: Store, *, holder: str, now: datetime) -> list[dict[str, object]]:
    """Import every waiting file, then delete it and keep its counts in `done/`; one refused goes to `refused/`.

    The import id is the digest of the file, so a kill between import and delete adds nothing twice. The others go on
    when one is refused.
    """
    results: list[dict[str, object]] = []
    for path in waiting_files(store, now):
        tag = path.relative_to(store.settings.intake).parts[0]
        good = path.parent.name == "good"
        try:
            pipeline = store.pipelines.get(tag)
            imported = import_for_pipeline(
                store, path, pipeline, holder=holder, now=now, default_feedback="good" if good else None
            )
            if not imported.complete:
                continue  # the file stays, and the next run takes it up where this one stopped
            result, target = imported.as_dict(), "done"
        except NotFound as error:
            result, target = error.as_dict(), "refused"
        except LoopError as error:
            if error.code in ("LEASE_BUSY", "LEASE_LOST"):
                raise
            result, target = error.as_dict(), "refused"
        _put_away(store.settings.intake / target / tag, path, result, keep=target == "refused")
        results.append({"file": path.name, "tag": tag, "outcome": target, **_counts(result)})
    return results


def _is_input(path: Path, folder: Path) -> bool:
    return path.relative_to(folder).parts[0] not in ("done", "refused") and not path.name.startswith(".")


def _put_away(folder: Path, path: Path, result: dict[str, object], *, keep: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    target = folder / f"{stamp}-{path.name}"
    target.with_suffix(target.suffix + ".result").write_text(json.dumps(result, indent=2, default=str))
    # The file itself goes: it holds what redaction took out of the samples, and a deleted sample would live on in it.
    # One that was refused whole is somebody's to look at, and stays.
    path.rename(target) if keep else path.unlink()


def _counts(result: dict[str, object]) -> dict[str, object]:
    return {
        key: result[key]
        for key in ("imported", "already_present", "refused", "reviewed", "needs_review")
        if key in result
    }
