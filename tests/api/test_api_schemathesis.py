"""schemathesis against /openapi.json: whatever it thinks of, no built route answers 500; errors have one shape."""

from __future__ import annotations

import contextlib

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from report_world import compared, questions
from running_api import Api
from schemathesis.checks import not_a_server_error

EXAMPLES = 4


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_no_call_ends_in_a_500(api: Api, mode: schemathesis.GenerationMode) -> None:
    attempt = compared(api.store, questions(3), name=f"Known {mode.value}", state="awaiting_review")
    dataset = api.store.datasets.create(f"Known {mode.value}")
    known = {
        "pipeline_id": attempt.pipeline_id,
        "run_id": attempt.run_id,
        "evaluation_id": attempt.run_id,
        "dataset_id": dataset.dataset_id,
    }
    schema = schemathesis.openapi.from_url(f"{api.url}/openapi.json")
    called: set[str] = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        called.add(operation.label)

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
        def try_it(case: schemathesis.Case) -> None:
            check(api, case)
            if case.path_parameters and case.method != "DELETE":
                case.path_parameters = {**case.path_parameters, **known}  # beyond the 404 of an id that nobody has
                check(api, case)

        with contextlib.suppress(Unsatisfiable):  # an address without any part that could be wrong
            try_it()
    assert {"POST /api/loop/pipelines", "GET /api/loop/evaluations/{evaluation_id}/items"} <= called
    assert len(called) >= 30
    assert not any("rollback" in label for label in called)


def check(api: Api, case: schemathesis.Case) -> None:
    answered = case.call(headers={"X-API-Key": api.key}, timeout=30)
    case.validate_response(answered, checks=[not_a_server_error])
    if answered.status_code >= 400:
        error = answered.json()["error"]
        assert set(error) - ({"type", "param"} if case.path.startswith("/v1/") else set()) == {"code", "message"}
        assert error["message"].strip()
