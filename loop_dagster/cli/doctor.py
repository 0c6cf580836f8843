"""`loop doctor`: prints what the doctor finds; `doctor/` looks."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Annotated, Final

import typer
from rich.markup import escape

from loop_dagster.cli.output import AsJson, emit_json, out
from loop_dagster.doctor import Finding, Level, examine
from loop_dagster.errors import EXIT_FAILED

#: Level → (how it is headed, its colour, how it is counted), the most important first.
_SHOWN: Final[dict[Level, tuple[str, str, str]]] = {
    "mistake": ("MEND", "bold red", "to mend"),
    "warning": ("WARNING", "yellow", "warnings"),
    "note": ("NOTE", "cyan", "notes"),
    "fine": ("ok", "green", "fine"),
}


def doctor(
    as_json: AsJson = False,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no judge and no PostgreSQL of Dagster.")] = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Read every byte of models, kept weights and the lake's files.")
    ] = False,
) -> None:
    """Look for what is wrong and say how to mend it; changes nothing. Exit status 1 if anything is to be mended."""
    findings = list(examine(offline=offline, thorough=thorough))
    well = all(one.ok for one in findings)
    if as_json:
        emit_json({"findings": [one.as_dict() for one in findings], "ok": well})
    else:
        _print(findings)
    if not well:
        sys.exit(EXIT_FAILED)


def _print(findings: list[Finding]) -> None:
    """What is fine in a line each, then what is to be done, the most important last, where the eye is."""
    for level, (head, colour, _) in reversed(_SHOWN.items()):
        for one in findings:
            if one.level != level:
                continue
            if level == "fine":
                out.print(f"[{colour}]{head:<3}[/{colour}] {escape(one.what)}: [dim]{escape(one.found)}[/dim]")
                continue
            out.print(f"\n[{colour}]{head}[/{colour}]  [bold]{escape(one.what)}[/bold]: {escape(one.found)}")
            if one.where:
                out.print(f"      where: {escape(one.where)}", highlight=False, soft_wrap=True)
            out.print(f"      mend:  {escape(one.mend)}", highlight=False, soft_wrap=True)
    counts = Counter(one.level for one in findings)
    said = ", ".join(f"{counts[level]} {words}" for level, (_, _, words) in _SHOWN.items() if counts[level])
    out.print(f"\n{len(findings)} looked at: {said}. Nothing was changed.")
