from __future__ import annotations

from pathlib import Path

import pytest
import tiny


@pytest.fixture(scope="session")
def tiny_model(request: pytest.FixtureRequest) -> Path:
    """Folder of a real tiny chat model; built on first use and kept in pytest's cache."""
    cache = request.config.cache
    assert cache is not None
    return tiny.tiny_model(Path(cache.mkdir("tiny-model")))
