"""How the command line answers: JSON for scripts, tables for people, one error shape, exit codes.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 a rule of the loop refuses it, 4 not found, 5 unavailable just now.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on standard output.")]

#: Columns that a person copies from: never broken over lines.
_WHOLE = ("Sample", "Attempt", "Version", "Bar", "Needed", "Got", "Met", "State")

#: A pipe has no width: nothing is broken there that a person may want to grep.
_PIPED = 240
out = Console(width=None if sys.stdout.isatty() else _PIPED)
err = Console(stderr=True, width=None if sys.stderr.isatty() else _PIPED)


def emit_json(data: Any) -> None:
    """One JSON document on standard output; times as RFC 3339 in UTC."""
    sys.stdout.write(json.dumps(data, default=_plain, ensure_ascii=False) + "\n")


def emit_error(error: Mapping[str, Any], *, as_json: bool) -> None:
    """An error envelope: as JSON on standard output for scripts, as a sentence on standard error for people."""
    if as_json:
        emit_json(error)
    else:
        err.print(f"[red]{error['error']['code']}[/red] {escape(error['error']['message'])}")


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> None:
    """Rows as a table for people; an empty one says so."""
    if not rows:
        out.print(f"[dim]{title or 'Nothing'}: none yet[/dim]")
        return
    shown = RichTable(title=title, title_justify="left", header_style="bold")
    for column in columns:
        shown.add_column(column, overflow="fold", no_wrap=column in _WHOLE)
    for row in rows:
        shown.add_row(*(_cell(value) for value in row))
    out.print(shown)


@contextmanager
def progress(label: str, *, quiet: bool) -> Iterator[Any]:
    """A bar on standard error; yields `update(done, total)`. Quiet ones (JSON, no terminal) draw nothing."""
    bar = Progress(
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=quiet,
    )
    with bar:
        task = bar.add_task(label, total=None)

        def update(done: int, total: int | None = None) -> None:
            bar.update(task, completed=done, total=total)

        yield update


def flat(fields: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested fields as rows with dotted names, for a table of one thing."""
    rows: list[tuple[str, Any]] = []
    for name, value in fields.items():
        if isinstance(value, Mapping):
            rows += flat(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, value))
    return rows


def _cell(value: Any) -> str:
    if value is None or value == []:
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(_cell(one) for one in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    return escape(str(value))


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if hasattr(value, "as_dict"):
        return value.as_dict()
    raise TypeError(f"{type(value).__name__} has no JSON form here")
