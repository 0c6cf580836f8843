"""Every look at an installation, in order, each within a time limit and none in the way of the next.

Belongs here: the list of looks, their order and what each needs. Does not belong here: what a look finds (one module
per area), printing (cli/doctor.py), and any repair: whoever reads a finding does that.

To add a look, write a function from `Installation` to findings in the module of its area and put it into `CHECKS`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from loop_dagster.doctor import (
    clock,
    dagster_home,
    dagster_state,
    home,
    intake,
    judge,
    kept,
    lake,
    models,
    ports,
    programs,
    registry,
    settings,
    work,
)
from loop_dagster.doctor.findings import Finding, mistake, note, told, warning
from loop_dagster.doctor.installation import Installation
from loop_dagster.errors import LoopError

#: A look that has not answered by then is left alone: a dead network folder answers never.
LIMIT_S: Final = 20.0

Needs = Literal["nothing", "settings", "home", "registry"]


@dataclass(frozen=True, slots=True)
class Check:
    """One look. `needs` is what must be readable before it makes sense."""

    name: str
    look: Callable[[Installation], Iterable[Finding]]
    needs: Needs = "settings"


#: Every look, in the order in which a person would look.
CHECKS: Final[tuple[Check, ...]] = (
    Check("Python", programs.python, "nothing"),
    Check("packages", programs.packages, "nothing"),
    Check("limits", programs.limits, "nothing"),
    Check("settings", settings.settings, "nothing"),
    Check("names of settings", settings.names, "nothing"),
    Check("LOOP_HOME", home.home),
    Check("disk", home.disk),
    Check("file system", home.file_system),
    Check("secrets in files", home.rights),
    Check("DAGSTER_HOME", dagster_home.variable),
    Check("dagster.yaml", dagster_home.config, "home"),
    Check("Dagster's storage", dagster_home.storage),
    Check("registry", registry.registry, "home"),
    Check("workspace", registry.workspace, "registry"),
    Check("clock", clock.clock, "registry"),
    Check("lake", lake.tables, "registry"),
    Check("owner of the lake", lake.owner, "registry"),
    Check("models", models.models, "registry"),
    Check("artifacts", kept.artifacts, "registry"),
    Check("judge", judge.judge),
    Check("ports", ports.ports),
    Check("Dagster's records", dagster_state.records, "home"),
    Check("daemon", dagster_state.daemon, "registry"),
    Check("sensors", dagster_state.sensors, "home"),
    Check("runs", dagster_state.runs, "registry"),
    Check("leases", work.leases, "registry"),
    Check("attempts", work.attempts, "registry"),
    Check("intake", intake.intake),
)


def examine(
    *,
    offline: bool = False,
    thorough: bool = False,
    checks: Sequence[Check] = CHECKS,
    limit_s: float = LIMIT_S,
) -> Iterator[Finding]:
    """Every finding about the installation that the environment names, in a fixed order.

    `offline` asks no judge; `thorough` reads every byte of models, of kept weights and of the lake's files, and each
    look may take ten times as long.
    """
    installation = Installation(offline=offline, thorough=thorough)
    try:
        skipped: list[str] = []
        for check in checks:
            if _missing(installation, check.needs):
                skipped.append(check.name)
                continue
            yield from _within_limit(check, installation, limit_s * 10 if thorough else limit_s)
        if skipped:
            yield note(
                "not_looked_at",
                "what stands behind it",
                found=f"not looked at: {', '.join(skipped)}",
                mend="Mend what is named above, then run `loop doctor` again.",
            )
    finally:
        installation.close()


def _missing(installation: Installation, needs: Needs) -> bool:
    if needs == "nothing":
        return False
    if installation.settings is None:
        return True
    if needs == "home":
        return not installation.is_there
    return needs == "registry" and not installation.readable


def _within_limit(check: Check, installation: Installation, limit_s: float) -> list[Finding]:
    found: list[Finding] = []

    def look() -> None:
        try:
            found.extend(check.look(installation))
        except LoopError as error:
            found.append(told(error.code.lower(), check.name, error.message))
        except OSError as error:
            place = f" ({error.filename})" if error.filename else ""
            found.append(
                mistake(
                    "not_readable",
                    check.name,
                    found=f"{error.strerror or type(error).__name__}{place}",
                    mend="See to the rights and the disk of that place, then run `loop doctor` again.",
                )
            )
        except Exception as error:  # a fault of the doctor must not hide what the other looks find
            found.append(
                warning(
                    "look_failed",
                    check.name,
                    found=f"the look itself failed with {type(error).__name__}",
                    mend="This is a fault of the doctor: report it with the name of the look.",
                )
            )

    thread = threading.Thread(target=look, name=f"doctor {check.name}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        return [
            warning(
                "no_answer",
                check.name,
                found=f"no answer within {limit_s:.0f} s",
                mend="See whether its disk, mount or server hangs (`df -h`, `mount`), then run `loop doctor` again.",
            )
        ]
    return found
