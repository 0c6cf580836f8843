"""Work under way: leases whose holder is gone, attempts that failed or wait for a person.

Belongs here: the registry's rows about work. Does not belong here: Dagster's view of it (dagster_state.py).
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from typing import Final

from loop_dagster.doctor.clock import words
from loop_dagster.doctor.findings import Finding, fine, note, warning
from loop_dagster.doctor.installation import Installation, is_alive
from loop_dagster.errors import NotFound
from loop_dagster.rules.schedule import wait_after
from loop_dagster.store.leases import Lease
from loop_dagster.store.records import Attempt

#: `<host>:<process>` at the end of who holds a lease, alone or in brackets.
_HOLDER: Final = re.compile(r"([\w.-]+):(\d+)\)?$")


def leases(installation: Installation) -> Iterator[Finding]:
    """Leases that nobody beats any more. They end by themselves; what they stood for may be half done."""
    stale = [lease for lease in installation.store.leases.expired() if not _is_over(installation, lease)]
    for lease in stale:
        process = _process(lease)
        ago = words(installation.now - lease.heartbeat_at)
        hangs = process is not None and is_alive(process)
        if hangs:
            mend = f"Let it go on (`kill -CONT {process}`) or end it (`kill {process}`); its lease is lost either way."
        else:
            mend = f"Nothing is locked by it. {_goes_on(lease)}"
        yield warning(
            "stale_lease",
            "leases",
            where=f"lease {lease.name}, held by {lease.holder}",
            found=f"no sign of life for {ago}" + ("; the process is there and hangs" if hangs else ""),
            mend=mend,
        )
    if not stale:
        yield fine("leases", "leases", found="none is stale")


def _is_over(installation: Installation, lease: Lease) -> bool:
    """Whether a lease is of an attempt that has ended: what a killed worker left of it holds nothing up."""
    kind, _, run_id = lease.name.partition("/")
    if kind != "attempt":
        return False
    with contextlib.suppress(NotFound):
        return installation.store.attempts.get(run_id).ended
    return False


def attempts(installation: Installation) -> Iterator[Finding]:
    """The newest attempt of each pipeline, where a person may want to do something."""
    store = installation.store
    said = 0
    for pipeline in store.pipelines.list():
        newest = store.attempts.list(pipeline.pipeline_id)[-1:]
        for attempt in newest:
            if attempt.state == "failed":
                said += 1
                yield _failed(attempt, pipeline.tag, pipeline.failures)
            elif attempt.state == "awaiting_review":
                said += 1
                until = f" until {attempt.review_until:%Y-%m-%d}" if attempt.review_until else ""
                yield note(
                    "attempt_waits_for_review",
                    f"attempts of {pipeline.tag}",
                    where=f"attempt {attempt.key}",
                    found=f"it waits for a person's decision{until}, and no other attempt starts before",
                    mend=f"`loop attempts show {attempt.key}`, then `loop attempts approve {attempt.key}` or "
                    f"`loop attempts reject {attempt.key}`",
                )
        if not pipeline.enabled:
            said += 1
            yield note(
                "pipeline_paused",
                f"attempts of {pipeline.tag}",
                where=f"pipeline {pipeline.tag}",
                found="it is paused, so no attempt starts",
                mend=f"`loop pipelines resume {pipeline.tag}` when it is to train again",
            )
    if not said:
        yield fine("attempts", "attempts", found="none waits for a person")


def _failed(attempt: Attempt, tag: str, failures: int) -> Finding:
    next_try = ""
    if attempt.finished_at is not None and failures:
        again = attempt.finished_at + wait_after(failures)
        next_try = f" The next one starts by itself after {again:%Y-%m-%d %H:%M} UTC;"
    return note(
        "attempt_failed",
        f"attempts of {tag}",
        where=f"attempt {attempt.key}",
        found=f"it failed with {attempt.error_code or 'no code'}: {attempt.reason or 'no reason'}",
        mend=f"`loop attempts show {attempt.key}` tells how far it came.{next_try} `loop train {tag}` does not wait.",
    )


def _process(lease: Lease) -> int | None:
    """Process that holds a lease, if it is one of this machine."""
    found = _HOLDER.search(lease.holder)
    return int(found[2]) if found is not None and found[1] == socket.gethostname() else None


def _goes_on(lease: Lease) -> str:
    if lease.name.startswith("lake/"):
        return "The next import or drain takes it over; if an import was under way, run `loop import` once more."
    if lease.name.startswith("attempt/"):
        return "A daemon tries the step again within a minute or two: `loop run`, if none runs."
    return "The next process that needs it takes it over: `loop run`, if no daemon runs."
