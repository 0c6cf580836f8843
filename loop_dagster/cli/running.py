"""`loop run` and `loop dev`: the daemon, the UI, serving, the API and the intake folder."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from loop_dagster.cli.attempts import attempt_rows
from loop_dagster.cli.context import opened
from loop_dagster.cli.keys import first_key
from loop_dagster.cli.output import AsJson, emit_json, err, out
from loop_dagster.cli.watching import until_idle
from loop_dagster.errors import EXIT_FAILED
from loop_dagster.processes import render_home, running, start_api, start_daemon, start_dagster, start_serving


def run(
    stop_when_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when no attempt moves and nothing is due.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run Dagster's daemon with the loop's sensors; exit status 1 if an attempt failed meanwhile."""
    store = opened()
    daemon = start_daemon(store.settings)
    if not as_json:
        err.print(f"[dim]The daemon runs (process {daemon.pid}); its log is {daemon.log}.[/dim]")
    with running(daemon):
        if not stop_when_idle:
            while True:
                daemon.check()
                time.sleep(1)
        watch = until_idle(store, daemon, quiet=as_json)
    ended = {attempt.run_id for attempt in watch.ended}
    rows = [row for row in attempt_rows(store, None) if row["run_id"] in ended]
    if as_json:
        emit_json({"attempts": rows, "total": len(rows)})
    else:
        for row in rows:
            out.print(f"{row['tag']} attempt {row['attempt']}: {row['outcome']}. {row['explanation']['headline']}")
        out.print("Nothing moves and nothing is due.")
    if watch.failed:
        sys.exit(EXIT_FAILED)


def init(as_json: AsJson = False) -> None:
    """Create or upgrade the installation under LOOP_HOME; every other command does it too when it is needed."""
    store = opened()
    store.settings.intake.mkdir(parents=True, exist_ok=True)
    dagster_home = render_home(store.settings)
    where = {
        "home": str(store.settings.root),
        "registry": store.registry.where,
        "lake": store.settings.lake,
        "intake": str(store.settings.intake),
        "dagster_home": str(dagster_home),
    }
    if as_json:
        emit_json(where)
        return
    for what, place in where.items():
        out.print(f"{what:<13} {place}", highlight=False)


def dev() -> None:
    """Start Dagster's UI, the daemon, the intake folder, serving and the API together; Ctrl-C ends them all."""
    store = opened()
    settings = store.settings
    settings.intake.mkdir(parents=True, exist_ok=True)
    serving = start_serving(settings)
    with running(serving):
        dagster = start_dagster(settings)
        with running(dagster), running(api := start_api(settings)):
            out.print(f"Dagster's UI    http://127.0.0.1:{settings.webserver_port}")
            out.print(f"Live versions   http://{settings.serve_host}:{settings.serve_port}/v1  (model loop-<tag>)")
            out.print(f"The API         http://{settings.api_host}:{settings.api_port}  (its addresses: /docs)")
            out.print(
                f"The gateway     http://{settings.api_host}:{settings.api_port}/v1  (for your app's calls to a model)"
            )
            if (made := first_key(store)) is not None:
                out.print(f"Its first key   {made.text}  (shown this once)", highlight=False)
            out.print(f"Intake folder   {settings.intake}/<tag>/  (…/<tag>/good/ for answers that are good examples)")
            out.print(f"Logs            {dagster.log.parent}")
            out.print("Ctrl-C ends all of them.")
            while True:
                dagster.check()
                serving.check()
                api.check()
                time.sleep(1)
