"""The command line `loop`.

Belongs here: the Typer app and turning errors into exit codes. Each command reads arguments, calls `store`, `rules` or
`processes` and prints; it never imports the Dagster folders.
"""

from __future__ import annotations

import signal
import sys

from loop_dagster.errors import EXIT_FAILED, LoopError

#: As a shell reports a process that SIGTERM ended.
EXIT_TERMINATED = 143


def main() -> None:
    """Entry point of `loop`."""
    from loop_dagster.cli.app import app
    from loop_dagster.cli.output import emit_error, err

    as_json = "--json" in sys.argv
    # A polite end runs every clean-up, so that no daemon is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        app()
    except LoopError as error:
        emit_error(error.as_dict(), as_json=as_json)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        err.print("Interrupted. Nothing is lost: run the same command again to go on.")
        sys.exit(130)
    except OSError as error:
        # No space left, read-only folder: named for people, never a stack trace.
        emit_error(
            {"error": {"code": "OS_ERROR", "message": f"{error.strerror or error}: {error.filename or 'LOOP_HOME'}"}},
            as_json=as_json,
        )
        sys.exit(EXIT_FAILED)
