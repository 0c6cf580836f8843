"""Puts the commands of `loop` together."""

from __future__ import annotations

import typer

from loop_dagster.cli import (
    attempts,
    datasets,
    demo,
    doctor,
    importing,
    keys,
    pipelines,
    reports,
    running,
    samples,
    sources,
    versions,
)

app = typer.Typer(
    name="loop",
    help="A self-hosted loop that keeps improving a model from what its users did with it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(pipelines.app, name="pipelines", help="Create, edit, pause and delete pipelines.")
app.add_typer(datasets.app, name="datasets", help="Save conditions on samples, see what they select, export it.")
app.add_typer(samples.app, name="samples", help="List samples and see what each one is worth.")
app.add_typer(sources.app, name="sources", help="Say which sources are recorded, for how long and under which tags.")
app.add_typer(attempts.app, name="attempts", help="List attempts, see why one ended as it did, stop one.")
app.add_typer(versions.app, name="versions", help="List what went live.")
app.add_typer(keys.app, name="keys", help="Make, list and revoke keys of the HTTP API.")
app.command("import")(importing.import_)
app.command("feedback")(samples.feedback)
app.command("train")(attempts.train)
app.command("report")(reports.report)
app.command("ask")(versions.ask)
app.command("init")(running.init)
app.command("run")(running.run)
app.command("dev")(running.dev)
app.command("serve")(keys.serve)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
