"""Kept weights: every live name has its version, and every adapter that one or an attempt under way needs is there.

Belongs here: the artifact folder against the registry. Does not belong here: base models (models.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import sqlalchemy as sa

from loop_dagster.doctor.findings import Finding, fine, mistake, warning
from loop_dagster.doctor.installation import Installation
from loop_dagster.doctor.rows import sql_command
from loop_dagster.errors import ArtifactTorn, NotFound
from loop_dagster.store.schema import live as live_table

#: Weights of live versions are read whole up to this size in all; the rest, and others, only when asked to.
READ_BYTES: Final = 1_000_000_000


def artifacts(installation: Installation) -> Iterator[Finding]:
    """What is needed first, live versions before older ones; then what lies there damaged and is needed by nothing."""
    store = installation.store
    yield from _pointers(installation)
    needed = _needed(installation)
    left = READ_BYTES
    whole = 0
    for digest, (who, live, tag) in needed.items():
        verify = installation.thorough
        try:
            if live and not verify:
                left -= store.artifacts.size(digest)
                verify = left >= 0
            store.artifacts.open(digest, verify=verify)
            whole += 1
        except (NotFound, ArtifactTorn) as error:
            gone = isinstance(error, NotFound)
            torn = error.message.partition("damaged: ")[2].partition(". It is not used")[0]
            place = store.artifacts.root / digest
            again = f"`loop train {tag}`" if tag else "a new attempt"
            yield mistake(
                "artifact_missing" if gone else "artifact_damaged",
                f"adapter of {who}",
                where=str(place),
                found="it is not there" if gone else torn,
                mend=f"Put the folder {place} back from a copy. If there is none, train it again with {again}"
                + (f"; until then loop-{tag} answers 503." if live else "."),
            )
    for digest in store.artifacts.list():
        if digest not in needed and not store.artifacts.has(digest):
            yield warning(
                "artifact_damaged_unneeded",
                "artifacts",
                where=str(store.artifacts.root / digest),
                found="damaged, and needed by nothing",
                mend=f"`rm -r {store.artifacts.root / digest}`",
            )
    if whole == len(needed):
        yield fine("artifacts", "artifacts", where=str(store.artifacts.root), found=f"all {whole} that are needed fit")


def _needed(installation: Installation) -> dict[str, tuple[str, bool, str | None]]:
    """Digest → (who needs it, whether it is live, the pipeline's tag)."""
    store = installation.store
    answering = store.versions.all_live()
    needed: dict[str, tuple[str, bool, str | None]] = {}
    for tag, version in answering.items():
        for digest in version.adapters:
            needed.setdefault(digest, (f"loop-{tag} v{version.version_no}, which is live", True, tag))
    for pipeline in store.pipelines.list():
        for version in store.versions.list(pipeline.pipeline_id):
            for digest in version.adapters:
                needed.setdefault(digest, (f"{pipeline.tag} v{version.version_no}", False, pipeline.tag))
    tags = {pipeline.pipeline_id: pipeline.tag for pipeline in store.pipelines.list()}
    for attempt in store.attempts.active():
        if attempt.adapter_digest is not None:
            tag_of = tags.get(attempt.pipeline_id)
            needed.setdefault(attempt.adapter_digest, (f"attempt {attempt.key}, now {attempt.state}", False, tag_of))
    return needed


def _pointers(installation: Installation) -> Iterator[Finding]:
    """Live names that point at a version which is not there. Its attempt still knows what it was made of."""
    registry = installation.registry
    known = installation.store.versions.all_live()
    query = sa.select(live_table).where(live_table.c.workspace == registry.workspace).order_by(live_table.c.tag)
    with registry.read() as connection:
        pointers = connection.execute(query).mappings().all()
    for row in pointers:
        if row["tag"] in known:
            continue
        name, number = f"loop-{row['tag']}", row["version_no"]
        yield mistake(
            "live_version_missing",
            f"live version of {row['tag']}",
            where=f"registry, live name {name}",
            found=f"it points at v{number} and no version: nothing answers, and no attempt can go live after it",
            mend=f"End what runs, and put the registry back from a copy. If there is none: {_again(installation, row)}",
        )


def _again(installation: Installation, row: sa.RowMapping) -> str:
    registry = installation.registry
    pointed = f"workspace = '{registry.workspace}' AND pipeline_id = '{row['pipeline_id']}'"
    for attempt in installation.store.attempts.list(row["pipeline_id"]):
        if attempt.version_no == row["version_no"] and attempt.base_digest and attempt.adapter_digest:
            array = "json_array" if registry.path is not None else "json_build_array"
            names = "workspace, pipeline_id, version_no, run_id, base_digest"
            again = (
                f"INSERT INTO versions ({names}, adapters, promoted_at) "  # noqa: S608  # shown, not run
                f"SELECT {names}, {array}(adapter_digest), "
                f"coalesce(decided_at, since) FROM attempts WHERE {pointed} AND run_id = '{attempt.run_id}'"
            )
            return f"{sql_command(registry, again)} makes it again of attempt {attempt.key}."
    gone = sql_command(registry, f"DELETE FROM live WHERE {pointed}")  # noqa: S608  # shown, not run
    return f"{gone} takes the name back; it answers again once an attempt has gone live."
