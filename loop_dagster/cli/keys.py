"""`loop keys` and `loop serve`: keys of the API, and the API itself."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any

import typer

from loop_dagster.cli.context import opened
from loop_dagster.cli.output import AsJson, emit_json, err, out, table
from loop_dagster.store.keys import SCOPES, ApiKey, NewKey
from loop_dagster.store.open import Store
from loop_dagster.wire import timestamp

app = typer.Typer(no_args_is_help=True)

Scopes = Annotated[list[str] | None, typer.Option("--scope", help=f"One of {', '.join(SCOPES)}; all unless given.")]
Workspaces = Annotated[
    list[str] | None,
    typer.Option("--workspace", help="What it may be used for; may be repeated. This one unless given."),
]


@app.command()
def create(
    name: Annotated[str, typer.Option(help="By which people tell it from others.")] = "",
    scope: Scopes = None,
    workspace: Workspaces = None,
    as_json: AsJson = False,
) -> None:
    """Make a key of the API. It is shown this once and kept as a hash alone."""
    made = opened().keys.create(name=name, scopes=scope or SCOPES, workspaces=workspace or ())
    if as_json:
        emit_json(shown(made))
        return
    out.print(made.text, highlight=False)
    err.print(
        f"[dim]It may {', '.join(made.key.scopes)} in {', '.join(made.key.workspaces)}; it is not shown again.[/dim]"
    )


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """Every key made in this workspace, by its first characters."""
    keys = opened().keys.list()
    if as_json:
        emit_json({"keys": [_row(key) for key in keys], "total": len(keys)})
        return
    rows = [
        (key.key_id, key.prefix + "…", key.name, key.scopes, key.workspaces, key.last_used_at, key.revoked_at)
        for key in keys
    ]
    table(("Id", "Begins", "Name", "Scopes", "Workspaces", "Last used", "Revoked"), rows, "Keys")


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="A key's id, from `loop keys list`.")], as_json: AsJson = False
) -> None:
    """Refuse a key from now on, in every process."""
    gone = opened().keys.revoke(key)
    if as_json:
        emit_json({"revoked": True, **_row(gone)})
        return
    out.print(f"Revoked {gone.prefix}…: every call with it is answered 401.")


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; LOOP_API_HOST unless given.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65_535, help="Port; LOOP_API_PORT unless given.")] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes that answer.")] = 1,
) -> None:
    """Serve the HTTP API until Ctrl-C; calls under way are answered first."""
    from loop_dagster.api.serving import serve as run
    from loop_dagster.processes import check_port

    store = opened()
    host, port = host or store.settings.api_host, port or store.settings.api_port
    check_port("The API", host, port, "LOOP_API_PORT")
    store.registry.dispose()
    err.print(f"[dim]The API answers at http://{host}:{port}; its addresses are listed at /docs.[/dim]")
    run(host, port, workers=workers)


def first_key(store: Store) -> NewKey | None:
    """A first key for who develops on this machine: made when the API listens here alone and there is none yet."""
    if store.keys.list() or not _is_loopback(store.settings.api_host):
        return None
    return store.keys.create(name="loop dev")


def shown(made: NewKey) -> dict[str, Any]:
    """A new key for scripts."""
    bound = made.key.workspaces
    return {
        "key": made.text,
        "id": made.key.key_id,
        "scopes": list(made.key.scopes),
        "workspace": bound[0],
        **({"workspaces": list(bound)} if len(bound) > 1 else {}),
    }


def _row(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.key_id,
        "prefix": key.prefix,
        "name": key.name,
        "scopes": list(key.scopes),
        "workspaces": list(key.workspaces),
        "created_at": timestamp(key.created_at),
        "last_used_at": timestamp(key.last_used_at),
        "revoked_at": timestamp(key.revoked_at),
    }


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
