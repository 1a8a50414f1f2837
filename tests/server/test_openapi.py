"""The OpenAPI description, and what schemathesis makes of it: no answer is a 500."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from headlong.server.app import ENDPOINTS
from support.serving import RunningServer


@pytest.fixture(scope="module")
def running():
    """Few tokens at most: an accepted request must not take long."""
    with RunningServer(max_tokens_limit=4) as server:
        yield server
        usage = server.server.pool.current.client.stats().usage
        assert (usage.running, usage.waiting, usage.pages_used) == (0, 0, 0)
        server.engine.check_integrity()


# The statistics' stream never ends by itself, a loaded model must stay the one under test, and nothing is fetched.
FUZZED = [one for one in ENDPOINTS if not one.path.endswith(("/stream", "/load", "/unload", "/pull"))]


CASES = [(one, GenerationMode.POSITIVE) for one in FUZZED]
CASES += [(one, GenerationMode.NEGATIVE) for one in FUZZED if one.body is not None]


@pytest.mark.parametrize("examples", [30, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("endpoint", "mode"), CASES, ids=lambda part: getattr(part, "path", str(part)))
def test_no_server_error(running, endpoint, mode, examples):
    found = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    operation = found[endpoint.path.replace(":path", "")][endpoint.method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def fuzz(case):
        response = case.call(timeout=30)
        case.validate_response(response, checks=[not_a_server_error])
        if response.status_code >= 400:
            error = response.json()["error"]
            assert error if endpoint.path.startswith("/api/") else error["message"]

    fuzz()


def test_every_endpoint_is_described(running):
    with running.client() as http:
        description = http.get("/openapi.json").json()
    assert {path.replace(":path", "") for _, path, *_ in ENDPOINTS} == set(description["paths"])
    chat = description["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False and "speculative" in chat["properties"]
