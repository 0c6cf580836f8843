"""Writes docs/coverage.md from the app and from gaps.py: `python -m loop_dagster.api.coverage`.

Belongs here: the page. Does not belong here: what is missing (gaps.py, routers/not_built.py); the page is made from
what answers, so it cannot say anything else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fastapi import APIRouter
from fastapi.routing import APIRoute

from loop_dagster.api.app import ROUTERS
from loop_dagster.api.gaps import FIXED, LEFT_OUT, NOT_KEPT, NULL_FOR_NOW
from loop_dagster.api.routers.not_built import ADDRESSES

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
#: Built addresses that answer 501 all the same.
REFUSING: Final = ("/api/loop/training-runs/{run_id}/rollback",)

_HEAD: Final = """\
# What of the API is there

Made by `python -m loop_dagster.api.coverage` from the app itself; a test fails when this page is another one. What is
not built answers 501 `NOT_BUILT` and does nothing. A field that nothing computes yet is null where its type has that.
"""


def page() -> str:
    """The page as it has to be."""
    parts = [_HEAD, "## Built\n", "| method | address | what it does |\n|---|---|---|", *_built()]
    parts += ["\n## Not built\n", "| method | address |\n|---|---|", *_missing()]
    parts += ["\n## Null for now\n", "| answer | field | what will fill it |\n|---|---|---|"]
    parts += [f"| {kind} | `{name}` | {what} |" for kind, names in NULL_FOR_NOW.items() for name, what in names.items()]
    parts += ["\n## Fixed for now\n", "| answer | field | is | because |\n|---|---|---|---|"]
    parts += [
        f"| {kind} | `{name}` | `{value}` | {why} |"
        for kind, names in FIXED.items()
        for name, (value, why) in names.items()
    ]
    parts += ["\n## Left out for now (optional fields)\n", "| answer | field | what will fill it |\n|---|---|---|"]
    parts += [f"| {kind} | `{name}` | {what} |" for kind, names in LEFT_OUT.items() for name, what in names.items()]
    parts += ["\n## Taken and not kept\n", "| call | field | what will keep it |\n|---|---|---|"]
    parts += [f"| {call} | `{name}` | {what} |" for call, names in NOT_KEPT.items() for name, what in names.items()]
    return "\n".join(parts) + "\n"


def built() -> list[tuple[str, str, str]]:
    """Method, address and first sentence of every built route, in the order of the routers."""
    return [
        (method, route.path_format, (route.description or "").partition("\n")[0])
        for router in ROUTERS
        for route in _routes(router.router)
        for method in sorted(route.methods or ())
        if route.path_format not in REFUSING
    ]


def _built() -> Iterator[str]:
    for method, path, said in built():
        yield f"| {method} | `{path}` | {said} |"


def _missing() -> Iterator[str]:
    for path, methods in {**dict.fromkeys(REFUSING, ("POST",)), **ADDRESSES}.items():
        yield f"| {', '.join(methods)} | `{path}` |"


def _routes(router: APIRouter) -> list[APIRoute]:
    return [route for route in router.routes if isinstance(route, APIRoute)]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
