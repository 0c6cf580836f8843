"""The intake folder: files that were refused, and files that nothing will ever take.

Belongs here: what lies under it. Does not belong here: what is in the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from loop_dagster.doctor.findings import Finding, fine, note, warning
from loop_dagster.doctor.installation import Installation

_WHAT: Final = "intake folder"
_SHOWN: Final = 3


def intake(installation: Installation) -> Iterator[Finding]:
    """Refused files with their reason, files in the wrong place, folders of no pipeline."""
    folder = installation.known.intake
    if not folder.is_dir():
        return
    refused = sorted(path for path in folder.glob("refused/*/*") if path.suffix != ".result")
    if refused:
        yield warning(
            "intake_refused",
            _WHAT,
            where=str(folder / "refused"),
            found=f"{len(refused):,} files were refused; the newest: {refused[-1].name} ({_reason(refused[-1])})",
            mend=f"Read the `.result` beside each, put the mended file into {folder}/<tag>/, and remove both here.",
        )
    stray = sorted(path for path in folder.glob("*") if path.is_file() and not path.name.startswith("."))
    if stray:
        yield warning(
            "intake_stray",
            _WHAT,
            where=str(folder),
            found=f"{len(stray):,} files lie in the folder itself, where nothing takes them: {_names(stray)}",
            mend=f"Move each into the folder of its pipeline: `mv {stray[0]} {folder}/<tag>/`",
        )
    taken = {path for suffix in ("json", "jsonl") for path in folder.glob(f"*/**/*.{suffix}")}
    places = [one for one in folder.iterdir() if one.is_dir() and one.name not in ("done", "refused")]
    odd = sorted(
        path
        for place in places
        for path in (*place.glob("*"), *place.glob("good/*"))
        if path.is_file() and path not in taken and not path.name.startswith(".")
    )
    if odd:
        yield note(
            "intake_other_files",
            _WHAT,
            where=str(folder),
            found=f"{len(odd):,} files are no .json or .jsonl and stay where they are: {_names(odd)}",
            mend="Save them as JSON lines with the ending .jsonl, one conversation a line, or take them away.",
        )
    if installation.readable:
        known = {pipeline.tag for pipeline in installation.store.pipelines.list()}
        known |= {pipeline.pipeline_id for pipeline in installation.store.pipelines.list()}
        unknown = sorted(place.name for place in places if place.name not in known and any(place.glob("**/*.json*")))
        if unknown:
            yield warning(
                "intake_unknown_tag",
                _WHAT,
                where=str(folder / unknown[0]),
                found=f"no pipeline is called {', '.join(unknown[:_SHOWN])}: what lies there will be refused",
                mend=f"Rename the folder to a pipeline's tag ({', '.join(sorted(known)[:_SHOWN]) or 'none yet'}), or "
                f"`loop pipelines create --name {unknown[0]}`",
            )
    if not refused and not stray:
        yield fine("intake", _WHAT, where=str(folder), found="nothing was refused")


def _names(paths: list[Path]) -> str:
    shown = ", ".join(path.name for path in paths[:_SHOWN])
    return shown + (" …" if len(paths) > _SHOWN else "")


def _reason(path: Path) -> str:
    """Code of the refusal: never its sentence, which a later version may let quote the file."""
    try:
        found = json.loads(path.with_suffix(path.suffix + ".result").read_text("utf-8"))
        return str(found["error"]["code"])
    except (OSError, ValueError, KeyError, TypeError):
        return "without a reason beside it"
