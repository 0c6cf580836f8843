"""Versions: what went live, in the order it did, and what answers now.

Belongs here: the one transaction in which an attempt becomes a version and the live pointer moves. Does not belong
here: whether it may (rules/promotion.py), loading and unloading models (models/serve.py follows the pointer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from loop_dagster.errors import Conflict, LiveMoved, NotFound
from loop_dagster.rules.states import Decision
from loop_dagster.store.attempts import LOOP, Attempts
from loop_dagster.store.records import Attempt
from loop_dagster.store.registry import Registry, put_row
from loop_dagster.store.schema import live, pipelines, versions


@dataclass(frozen=True, slots=True)
class Version:
    """A version *is* a base and its adapters, oldest first, all named by digest; merged weights are only a cache."""

    pipeline_id: str
    version_no: int
    run_id: str
    base_digest: str
    adapters: tuple[str, ...]
    promoted_at: datetime
    rolled_back_at: datetime | None


class Versions:
    """The versions and live pointers of one workspace."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._attempts = Attempts(registry)

    def promote(
        self,
        run_id: str,
        *,
        base_digest: str,
        adapters: Sequence[str],
        expect_live: int | None,
        now: datetime,
        decision: Decision = "auto_promoted",
        sentence: str | None = None,
        actor: str = LOOP,
    ) -> Version:
        """Make an attempt that is `promoting` the pipeline's next version, and let the live name answer with it.

        Numbering, version, pointer and the attempt's end as promoted are one transaction. `expect_live` is the version
        that it was compared with, None for the base: if something else is live by now, LiveMoved is raised and nothing
        changes (compare again). For an attempt that is promoted already its version comes back, so two callers, or one
        that was killed and asks again, make one version. Raises MoveNotAllowed in any other state, NotFound for an
        attempt or pipeline that is not there.
        """
        with self.registry.write() as connection:
            attempt, tag = self._lock(connection, run_id)
            made = self._of_run(connection, run_id)
            if made is not None:
                return made
            if attempt.adapter_digest is not None and attempt.adapter_digest not in adapters:
                raise Conflict(
                    f"Attempt {attempt.key} kept adapter {attempt.adapter_digest}, which is not among the adapters of "
                    "the version to make. Nothing changed.",
                    run_id=run_id,
                )
            now_live = self._live_number(connection, tag)
            if now_live != expect_live:
                raise LiveMoved(tag, expect_live, now_live)
            version = Version(
                attempt.pipeline_id,
                self._next_number(connection, attempt.pipeline_id),
                run_id,
                base_digest,
                tuple(adapters),
                now,
                None,
            )
            self._attempts.move_in(
                connection,
                run_id,
                "promoted",
                sentence or f"Version v{version.version_no} answers as loop-{tag}.",
                now=now,
                expect="promoting",
                actor=actor,
                fields={"version_no": version.version_no, "decision": decision, "decided_at": now},
            )
            self._write(connection, version, tag)
            return version

    def live(self, tag: str) -> Version | None:
        """What answers as `loop-<tag>`; None while nothing is live."""
        return self.all_live().get(tag)

    def all_live(self) -> dict[str, Version]:
        """Everything that answers, by tag: what the serving engine has to hold."""
        query = (
            sa.select(live.c.tag, versions)
            .join(
                versions,
                sa.and_(
                    versions.c.workspace == live.c.workspace,
                    versions.c.pipeline_id == live.c.pipeline_id,
                    versions.c.version_no == live.c.version_no,
                ),
            )
            .where(live.c.workspace == self.registry.workspace)
        )
        with self.registry.read() as connection:
            return {row["tag"]: _version(row) for row in connection.execute(query).mappings()}

    def list(self, pipeline_id: str | None = None) -> tuple[Version, ...]:
        """Every version in the order they went live, of one pipeline or of all."""
        query = sa.select(versions).where(versions.c.workspace == self.registry.workspace)
        if pipeline_id is not None:
            query = query.where(versions.c.pipeline_id == pipeline_id)
        ordered = query.order_by(versions.c.promoted_at, versions.c.pipeline_id, versions.c.version_no)
        with self.registry.read() as connection:
            return tuple(_version(row) for row in connection.execute(ordered).mappings())

    def get(self, pipeline_id: str, version_no: int) -> Version:
        """One version. Raises NotFound."""
        for version in self.list(pipeline_id):
            if version.version_no == version_no:
                return version
        raise NotFound("version", f"{pipeline_id} v{version_no}")

    def of_attempt(self, run_id: str) -> Version | None:
        """The version that an attempt became."""
        with self.registry.read() as connection:
            return self._of_run(connection, run_id)

    # inside one transaction

    def _lock(self, connection: sa.Connection, run_id: str) -> tuple[Attempt, str]:
        """The attempt and its pipeline's tag; the pipeline's row is locked, so promotions of it follow each other."""
        attempt = self._attempts.get_in(connection, run_id, ends=True)
        tag = connection.execute(
            sa.select(pipelines.c.tag).where(
                pipelines.c.workspace == self.registry.workspace,
                pipelines.c.pipeline_id == attempt.pipeline_id,
                pipelines.c.deleted_at.is_(None),
            )
        ).scalar()
        if tag is None:
            raise NotFound("pipeline", attempt.pipeline_id)
        return attempt, tag

    def _live_number(self, connection: sa.Connection, tag: str) -> int | None:
        return connection.execute(
            sa.select(live.c.version_no).where(live.c.workspace == self.registry.workspace, live.c.tag == tag)
        ).scalar()

    def _next_number(self, connection: sa.Connection, pipeline_id: str) -> int:
        newest = connection.execute(
            sa.select(sa.func.max(versions.c.version_no)).where(
                versions.c.workspace == self.registry.workspace, versions.c.pipeline_id == pipeline_id
            )
        ).scalar()
        return int(newest or 0) + 1

    def _of_run(self, connection: sa.Connection, run_id: str) -> Version | None:
        query = sa.select(versions).where(versions.c.workspace == self.registry.workspace, versions.c.run_id == run_id)
        row = connection.execute(query).mappings().one_or_none()
        return None if row is None else _version(row)

    def _write(self, connection: sa.Connection, version: Version, tag: str) -> None:
        row: dict[str, Any] = {
            "workspace": self.registry.workspace,
            "pipeline_id": version.pipeline_id,
            "version_no": version.version_no,
            "run_id": version.run_id,
            "base_digest": version.base_digest,
            "adapters": [*version.adapters],
            "promoted_at": version.promoted_at,
        }
        connection.execute(sa.insert(versions).values(**row))
        pointer = {name: row[name] for name in ("workspace", "pipeline_id", "version_no")}
        put_row(connection, live, {**pointer, "tag": tag, "moved_at": version.promoted_at})


def _version(row: sa.RowMapping) -> Version:
    return Version(
        row["pipeline_id"],
        row["version_no"],
        row["run_id"],
        row["base_digest"],
        tuple(row["adapters"]),
        row["promoted_at"],
        row["rolled_back_at"],
    )
