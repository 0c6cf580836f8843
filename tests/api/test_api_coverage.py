"""docs/coverage.md says what is there, and gaps.py says of every missing field what the client's types allow."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import bios._types as declared
import pytest
from fastapi.routing import APIRoute
from wire_types import conforms

from loop_dagster.api import coverage
from loop_dagster.api.gaps import FIXED, LEFT_OUT, NULL_FOR_NOW
from loop_dagster.api.routers.not_built import ADDRESSES, router

ROUTES = {(method, path) for method, path, _said in coverage.built()}


def test_the_page_is_what_the_app_says() -> None:
    assert coverage.PAGE.read_text(encoding="utf-8") == coverage.page(), "run python -m loop_dagster.api.coverage"


def test_every_call_of_the_client_is_built_or_said_not_to_be() -> None:
    import bios.loop

    source = Path(str(bios.loop.__file__)).read_text(encoding="utf-8")
    # Each address as the client writes it, ids cut out: "/api/loop/traces/" + … + "/signals".
    said = {re.sub(r"\{[a-z_]+\}", "", path) for _method, path in ROUTES}
    said |= {re.sub(r"\{[a-z_]+\}", "", path) for path in (*ADDRESSES, *coverage.REFUSING)}
    for path in set(re.findall(r'"(/api/loop/[a-z/-]+)"', source)):
        assert any(one.startswith(path.rstrip("/")) for one in said), path


def test_no_address_is_both() -> None:
    missing = {(method, path) for path, methods in ADDRESSES.items() for method in methods}
    assert not missing & ROUTES
    assert missing == {
        (method, route.path) for route in router.routes if isinstance(route, APIRoute) for method in route.methods
    }


@pytest.mark.parametrize("kind", sorted({*NULL_FOR_NOW, *FIXED, *LEFT_OUT}))
def test_a_gap_is_one_that_the_clients_type_allows(kind: str) -> None:
    declaration = getattr(declared, kind)
    hints = typing.get_type_hints(declaration)
    for name in NULL_FOR_NOW.get(kind, ()):
        assert type(None) in typing.get_args(hints[name]), f"{kind}.{name} has no null"
    for name, (value, _why) in FIXED.get(kind, {}).items():
        assert not conforms(value, hints[name], f"{kind}.{name}")
    for name in LEFT_OUT.get(kind, ()):
        assert name not in declaration.__required_keys__
