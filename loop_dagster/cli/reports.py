"""`loop report`: why an attempt went live or did not, in the terminal, as data, or as one page to read and pass on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from loop_dagster.cli.attempts import print_bars
from loop_dagster.cli.context import opened
from loop_dagster.cli.output import AsJson, emit_json, err, out, table
from loop_dagster.errors import BadRequest
from loop_dagster.report_data import find_attempt, report_of
from loop_dagster.report_page import headline, render
from loop_dagster.report_records import Report
from loop_dagster.report_wire import report_row

#: As `--out`: standard output.
STDOUT = "-"


def report(
    attempt: Annotated[
        str, typer.Argument(help="An attempt's key (support-3f2a/0007), its run id, or with one pipeline its number.")
    ],
    pipeline: Annotated[str | None, typer.Option(help="Of this pipeline: tag, id or name.")] = None,
    as_html: Annotated[bool, typer.Option("--html", help="Write one self-contained page.")] = False,
    to: Annotated[
        str | None,
        typer.Option("--out", help="File of the page; report-<tag>-<number>.html here when left out, - for stdout."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The comparison of an attempt: verdict, bars, warnings; with --html also every held-back conversation."""
    if to is not None and not as_html:
        raise BadRequest("--out says where the page goes; add --html to write it.")
    if to == STDOUT and as_json:
        raise BadRequest("--out - and --json would both write to standard output. Name a file, or leave --json out.")
    store = opened()
    found = report_of(store, find_attempt(store, attempt, pipeline=pipeline))
    if as_html:
        _write_page(found, to, as_json=as_json)
    elif as_json:
        emit_json(report_row(found))
    else:
        _tell(found)


def _write_page(found: Report, to: str | None, *, as_json: bool) -> None:
    page = render(found).encode()
    if to == STDOUT:
        sys.stdout.buffer.write(page)
        return
    path = Path(to or f"report-{found.pipeline.tag}-{found.attempt.attempt_no}.html")
    _replace(path, page)
    if as_json:
        emit_json({"attempt": found.attempt.key, "file": str(path.resolve()), "bytes": len(page)})
        return
    out.print(f"Wrote {path} ({len(page):,} bytes). Open it in a browser; it needs no network.", markup=False)
    err.print("[dim]Whoever has the file can read the conversations in it.[/dim]")


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; what is no ordinary file (a device, a pipe) is written to as it is."""
    if path.is_dir():
        raise BadRequest(f"--out names the folder {str(path)!r}; add the name of a file to it.")
    if not path.absolute().parent.is_dir():
        raise BadRequest(f"There is no folder {str(path.parent)!r}: make it, or name another place with --out.")
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    target = path.resolve()
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _tell(found: Report) -> None:
    result, judged = found.result, found.judged
    out.print(f"[bold]{headline(found)}[/bold]", highlight=False)
    out.print(result.sentence, markup=False, highlight=False)
    print_bars([bar.as_dict() for bar in result.bars])
    rows = [
        ("Won, lost, tied", f"{result.wins:,}, {result.losses:,}, {result.ties:,}"),
        ("Scored", f"{result.rows_scored:,} of {len(found.items):,} held-back samples"),
        ("Failed, gone, not reached", f"{result.rows_failed:,}, {result.rows_gone:,}, {judged.not_reached:,}"),
        ("Passed", f"{_share(result.candidate_pass_rate)}, incumbent {_share(result.incumbent_pass_rate)}"),
        ("Judge", judged.name),
        *([("Scoring unreviewed samples", found.sample_scoring)] if found.sample_scoring else []),
    ]
    table(("What", "How many"), rows, "The comparison")
    out.print(judged.sentence, markup=False, highlight=False)
    for caution in found.warnings:
        out.print(f"Warning: {caution.sentence}", markup=False, highlight=False)
    said = found.explanation
    out.print(f"{said['headline']}. {said['detail']} {said['next'] or ''}".rstrip(), markup=False, highlight=False)
    err.print(f"[dim]`loop report {found.attempt.key} --html` writes every conversation with it as a page.[/dim]")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
