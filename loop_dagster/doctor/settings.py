"""The settings as they were given: values that cannot be, names that nothing reads, files that nothing reads.

Belongs here: LOOP_ variables and settings.yaml. Does not belong here: whether what they name is there (the other
looks). No value of a setting is ever shown: it may be a key.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from yaml import MarkedYAMLError, YAMLError

from loop_dagster.doctor.findings import Finding, fine, mistake, warning
from loop_dagster.doctor.installation import Installation
from loop_dagster.rules.wording import sentence_of
from loop_dagster.settings import Settings

#: Variables that the project's own processes set for their children, and no settings.
INTERNAL = frozenset({"LOOP_PARENT", "LOOP_BENCH_LINES"})


def settings(installation: Installation) -> Iterator[Finding]:
    """Whether they can be read, and what stands in the way, setting by setting."""
    found = installation.settings_or_error
    file = _file()
    if isinstance(found, Settings):
        text = f"{file} and LOOP_ variables" if file.is_file() else "LOOP_ variables alone"
        yield fine("settings", "settings", found=f"read from {text}")
    elif isinstance(found, ValidationError):
        for error in found.errors(include_input=False, include_url=False):
            yield _refused(dict(error), file)
    else:
        yield _unreadable(found, file)


def names(installation: Installation) -> Iterator[Finding]:
    """Names that look like settings and that nothing reads."""
    known = {f"LOOP_{name.upper()}" for name in Settings.model_fields}
    given = sorted(name for name in os.environ if name.upper().startswith("LOOP_"))
    for name in given:
        if name.upper() not in known | INTERNAL:
            near = nearest(name.upper(), known)
            meant = f"`export {near}=…` if that is what was meant; `unset {name}` otherwise." if near else ""
            yield warning(
                "unknown_variable",
                "names of settings",
                where=f"variable {name}",
                found="no setting has this name; it has no effect",
                mend=meant or f"`unset {name}`; docs/install.md lists the settings.",
            )
    if os.environ.get("LOOP_HOME") == "":
        yield warning(
            "empty_home",
            "names of settings",
            where="variable LOOP_HOME",
            found="it is empty, which means the folder that a command is started in",
            mend="`export LOOP_HOME=/path/to/the/installation`, or `unset LOOP_HOME` for ./.loop.",
        )
    file = _file()
    for other in ("settings.yml", "settings.json", "settings.toml", ".env"):
        if (file.parent / other).is_file():
            yield warning(
                "settings_elsewhere",
                "names of settings",
                where=str(file.parent / other),
                found="nothing reads this file; settings.yaml is read",
                mend=f"Put its settings into {file}, one `name: value` a line, and remove it.",
            )
    yield from _idle_judge(installation)


def nearest(name: str, known: set[str]) -> str | None:
    """The known name that a mistyped one most likely means."""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.7)
    return found[0] if found else None


def _idle_judge(installation: Installation) -> Iterator[Finding]:
    found = installation.settings
    if found is None or found.judge != "reference":
        return
    given = [name for name in ("judge_url", "judge_model", "judge_api_key") if getattr(found, name) is not None]
    if given:
        yield warning(
            "judge_not_used",
            "judge",
            where=" and ".join(f"LOOP_{name.upper()}" for name in given),
            found="set, while LOOP_JUDGE is `reference`, which asks no server",
            mend="`export LOOP_JUDGE=openai` to be judged by that server, or take them out.",
        )


def _file() -> Path:
    return Path(os.environ.get("LOOP_HOME") or ".loop").expanduser() / "settings.yaml"


def _refused(error: dict[str, Any], file: Path) -> Finding:
    name = str(error["loc"][0]) if error["loc"] else "settings"
    if error["type"] == "extra_forbidden":
        near = nearest(name, set(Settings.model_fields))
        return mistake(
            "unknown_setting",
            "settings",
            where=f"{file}, {name}",
            found="no setting has this name",
            mend=f"Write `{near}:` instead of `{name}:`." if near else f"Take the line `{name}:` out.",
        )
    variable = f"LOOP_{name.upper()}"
    from_variable = variable in {one.upper() for one in os.environ}
    field = Settings.model_fields.get(name)
    meaning = f" ({field.description})" if field is not None and field.description else ""
    means = f"`export {variable}=<value>`, or `unset {variable}`" if from_variable else f"edit the line `{name}:` there"
    return mistake(
        "setting_value",
        "settings",
        where=f"variable {variable}" if from_variable else f"{file}, {name}",
        found=sentence_of(error).removesuffix("."),
        mend=f"Give it another value{meaning}: {means}.",
    )


def _unreadable(error: Exception, file: Path) -> Finding:
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        # The problem alone: what YAML quotes around it may be a key.
        found = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: it is not YAML"
    elif isinstance(error, YAMLError):
        found = "it is not YAML"
    elif isinstance(error, UnicodeError):
        found = "it is not text in UTF-8"
    elif isinstance(error, OSError):
        found = f"it cannot be read: {error.strerror}"
    else:
        found = "it holds something else than names with values"
    return mistake(
        "settings_unreadable",
        "settings",
        where=str(file),
        found=found,
        mend="Mend that line (one `name: value` a line), or move the file away: every setting has a default.",
    )
