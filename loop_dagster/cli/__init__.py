"""The command line `loop`.

Belongs here: the Typer app and turning errors into exit codes. Each command reads arguments, calls `store`, `rules` or
`processes` and prints; it never imports the Dagster folders.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings

if sys.version_info < (3, 11):  # noqa: UP036  # whoever meets this has not installed the project as it asks to be
    sys.exit(
        f"Python 3.11 or newer is needed, and this is {sys.version.split()[0]} ({sys.executable}). Make the "
        "environment anew in the project's folder: rm -rf .venv && make PYTHON=python3.11 venv"
    )

from typing import cast

from pydantic import ValidationError
from typer import Abort, BadParameter
from yaml import YAMLError

from loop_dagster.errors import (
    EXIT_FAILED,
    EXIT_NOT_FOUND,
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    LoopError,
)
from loop_dagster.rules.wording import sentence_of

#: Typer brings its own click and exports only this child of its usage errors.
UsageError = cast(type[BadParameter], BadParameter.__mro__[1])

#: As a shell reports a process that SIGTERM ended.
EXIT_TERMINATED = 143
EXIT_INTERRUPTED = 130


def main() -> None:
    """Entry point of `loop`."""
    from loop_dagster.cli.app import app
    from loop_dagster.cli.context import close
    from loop_dagster.cli.output import emit_error, err
    from loop_dagster.rules.quoting import answer_without_secrets, without_secrets

    as_json = "--json" in sys.argv
    # What a library plans to rename is of no use to who runs a command.
    warnings.simplefilter("ignore", FutureWarning)
    # A polite end runs every clean-up, so that no daemon is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        sys.exit(app(standalone_mode=False) or EXIT_OK)
    except LoopError as error:
        # What is unavailable is named by the settings of this machine, not by what was given: it stays to be read.
        given = error.exit_code in (EXIT_USAGE, EXIT_REFUSED, EXIT_NOT_FOUND)
        emit_error(answer_without_secrets(error.as_dict()) if given else error.as_dict(), as_json=as_json)
        sys.exit(error.exit_code)
    except UsageError as error:
        said = without_secrets(error.format_message())
        emit_error(_bad_request(f"{said} `loop … -h` shows what there is."), as_json=as_json)
        sys.exit(EXIT_USAGE)
    except (KeyboardInterrupt, Abort):
        err.print("Interrupted. Nothing is lost: run the same command again to go on.")
        sys.exit(EXIT_INTERRUPTED)
    except (ValidationError, YAMLError) as error:
        # Settings of the installation: what a variable or settings.yaml says that no installation could have.
        emit_error(_bad_request(f"A setting cannot be read. {_first_lines(error)}"), as_json=as_json)
        sys.exit(EXIT_USAGE)
    except UnicodeError:
        emit_error(_bad_request("An argument or a file is not text in UTF-8."), as_json=as_json)
        sys.exit(EXIT_USAGE)
    except OSError as error:
        # No space left, read-only folder: named for people, never a stack trace.
        emit_error(
            {"error": {"code": "OS_ERROR", "message": f"{error.strerror or error}: {error.filename or 'LOOP_HOME'}"}},
            as_json=as_json,
        )
        sys.exit(EXIT_FAILED)
    except Exception as error:
        if not type(error).__module__.startswith("polars"):
            raise
        # Bytes inside a data file that are no Parquet any more; what polars says of them may quote a row.
        message = "A data file of the lake is damaged. `loop doctor --thorough` names it and the command that mends it."
        emit_error({"error": {"code": "LAKE_UNREADABLE", "message": message}}, as_json=as_json)
        sys.exit(EXIT_UNAVAILABLE)
    finally:
        close()


def _bad_request(message: str) -> dict[str, dict[str, str]]:
    return {"error": {"code": "BAD_REQUEST", "message": message}}


def _first_lines(error: Exception) -> str:
    """What is wrong and where, without the value: it may be a key."""
    if isinstance(error, ValidationError):
        return " ".join(
            f"{_setting(one['loc'])}: there is no such setting; `loop doctor` names those that are near."
            if one["type"] == "extra_forbidden"
            else sentence_of({**one, "loc": (_setting(one["loc"]),)})
            for one in error.errors()
        )
    return f"settings.yaml is not YAML: {str(error).splitlines()[0]}."


def _setting(where: tuple[int | str, ...]) -> str:
    """A setting as it was given: a variable of the environment if there is one, else a line of settings.yaml."""
    variable = f"LOOP_{'_'.join(map(str, where)).upper()}"
    return variable if variable in map(str.upper, os.environ) else f"{'.'.join(map(str, where))} in settings.yaml"
