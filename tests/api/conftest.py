"""Fixtures of the API's tests: an installation and a running server for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_world import World, gateway
from running_api import Api, serving

from loop_dagster.settings import Settings
from loop_dagster.store.open import Store, open_store


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Stores of a new installation, one for a file of tests."""
    return open_store(Settings(home=tmp_path_factory.mktemp("api-home")))


@pytest.fixture(scope="module")
def api(installation: Store) -> Iterator[Api]:
    with serving(installation) as running:
        yield running


@pytest.fixture
def model(tiny_model: Path) -> dict[str, str]:
    """A base model as a body names it."""
    return {"id": str(tiny_model)}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A gateway in front of an upstream, one for a file of tests."""
    with gateway(tmp_path_factory.mktemp("gateway-home")) as running:
        yield running
