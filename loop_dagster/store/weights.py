"""Which adapters anything still needs, over every workspace that shares this installation's artifacts.

Belongs here: reading the registry for it. Does not belong here: how long an adapter is kept (rules/upkeep.py), deleting
it (artifacts.py).
"""

from __future__ import annotations

from datetime import datetime

import sqlalchemy as sa

from loop_dagster.rules.upkeep import Weights, adapter_is_kept
from loop_dagster.store.registry import Registry
from loop_dagster.store.schema import attempts, pipelines, versions


def needed_adapters(registry: Registry, now: datetime) -> set[str]:
    """Digests of every adapter that is kept at `now`, those of the versions that a version is built on among them."""
    same_run = sa.and_(versions.c.workspace == attempts.c.workspace, versions.c.run_id == attempts.c.run_id)
    owner = sa.and_(pipelines.c.workspace == attempts.c.workspace, pipelines.c.pipeline_id == attempts.c.pipeline_id)
    query = (
        sa.select(
            attempts.c.adapter_digest,
            attempts.c.finished_at,
            versions.c.adapters,
            pipelines.c.deleted_at,
        )
        .join(pipelines, owner)
        .outerjoin(versions, same_run)
    )
    needed: set[str] = set()
    with registry.read() as connection:
        for row in connection.execute(query):
            weights = Weights(row.adapter_digest, row.finished_at, row.adapters is not None, row.deleted_at is not None)
            if adapter_is_kept(weights, now):
                needed |= {row.adapter_digest, *(row.adapters or ())}
    return needed
