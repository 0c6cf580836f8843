"""Runs the API with uvicorn: graceful at the end, silent about what it was sent.

Belongs here: the server's settings. Does not belong here: the app. At SIGINT or SIGTERM no further call is taken, those
under way finish, and only then the process ends.
"""

from __future__ import annotations

from typing import Any, Final

import uvicorn

#: Seconds that calls under way get to finish.
GRACE_S: Final = 30
#: A log line names what failed and never an address with its parameters, which may hold what somebody searched for.
LOG_CONFIG: Final[dict[str, Any]] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "loggers": {
        "uvicorn.error": {"handlers": ["stderr"], "level": "INFO"},
        "uvicorn.access": {"handlers": [], "level": "CRITICAL", "propagate": False},
        "loop.api": {"handlers": ["stderr"], "level": "INFO"},
    },
}


def serve(host: str, port: int, *, workers: int = 1) -> None:
    """Serve the API of the installation that the environment names, until a signal ends it."""
    uvicorn.run(
        "loop_dagster.api.app:from_environment",
        factory=True,
        host=host,
        port=port,
        workers=workers,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        log_config=LOG_CONFIG,
    )
