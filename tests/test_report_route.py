"""The report over HTTP: shown to this machine alone, with the page's own policy, and no model loaded for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from report_world import compared, questions
from starlette.testclient import TestClient

from loop_dagster.models.live import LiveModels
from loop_dagster.models.serve import build_app
from loop_dagster.report_data import report_of
from loop_dagster.report_page import content_security_policy, render
from loop_dagster.report_route import page_url
from loop_dagster.settings import Settings
from loop_dagster.store.open import Store, open_store

HERE = "http://127.0.0.1:8766"


@pytest.fixture
def store(home: Path) -> Store:
    return open_store(Settings(home=home))


def client(store: Store, *, url: str = HERE, address: str = "127.0.0.1") -> TestClient:
    return TestClient(build_app(store, LiveModels(store)), base_url=url, client=(address, 50_000))


def test_it_is_the_page_that_the_command_writes(store: Store) -> None:
    attempt = compared(store, questions(100))
    answer = client(store).get(f"/reports/{attempt.key}")
    assert answer.status_code == 200
    assert answer.text == render(report_of(store, attempt))
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == f"{content_security_policy()}; frame-ancestors 'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("url", ["http://localhost:8766", "http://[::1]:8766", "http://127.0.0.2"])
def test_this_machine_may_call_it_by_any_of_its_own_names(store: Store, url: str) -> None:
    attempt = compared(store, questions(1))
    assert client(store, url=url, address="::1").get(f"/reports/{attempt.key}").status_code == 200


@pytest.mark.parametrize(
    ("url", "address"),
    [
        (HERE, "192.0.2.7"),
        (HERE, "testclient"),
        ("http://rebound.example:8766", "127.0.0.1"),
        ("http://127.0.0.1.example", "127.0.0.1"),
        ("http://192.0.2.7:8766", "127.0.0.1"),
    ],
)
def test_nobody_else_learns_even_that_it_is_there(store: Store, url: str, address: str) -> None:
    attempt = compared(store, questions(1))
    answer = client(store, url=url, address=address).get(f"/reports/{attempt.key}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "NOT_FOUND")
    assert "support" not in answer.text


def test_what_is_not_there_is_404_with_a_sentence(store: Store) -> None:
    compared(store, questions(1))
    pipeline = store.pipelines.get("support").pipeline_id
    for path in (f"{pipeline}/0002", "nobody/0001", f"{pipeline}/x", f"{pipeline}/{'9' * 40}"):
        answer = client(store).get(f"/reports/{path}")
        assert answer.status_code == 404, path
        assert answer.json()["error"]["message"]
    assert client(store).post(f"/reports/{pipeline}/0001").status_code == 405


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:1234/reports/a-1/0001"),
        ("localhost", "http://localhost:1234/reports/a-1/0001"),
        ("::1", "http://[::1]:1234/reports/a-1/0001"),
        ("0.0.0.0", "http://127.0.0.1:1234/reports/a-1/0001"),
        ("::", "http://127.0.0.1:1234/reports/a-1/0001"),
        ("192.0.2.7", None),
    ],
)
def test_the_link_leads_where_the_route_answers(home: Path, host: str, url: str | None) -> None:
    assert page_url(Settings(home=home, serve_host=host, serve_port=1234), "a-1/0001") == url


def test_a_report_needs_no_torch(store: Store) -> None:
    attempt = compared(store, questions(3))
    code = (
        "import sys\n"
        "from loop_dagster.settings import Settings\n"
        "from loop_dagster.models import serve\n"
        "from loop_dagster.report_data import find_attempt, report_of\n"
        "from loop_dagster.report_page import render\n"
        "from loop_dagster.store.open import open_store\n"
        f"store = open_store(Settings(home={str(store.settings.root)!r}))\n"
        f"render(report_of(store, find_attempt(store, {attempt.key!r})))\n"
        "print({'torch', 'transformers', 'dagster', 'matplotlib'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
