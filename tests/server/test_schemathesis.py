"""schemathesis makes requests from the OpenAPI description. None gets a status of 500 or more, and
all answers match the description."""

from __future__ import annotations

import hypothesis
import pytest

schemathesis = pytest.importorskip("schemathesis", reason="needs the extra clients")
checks = pytest.importorskip("schemathesis.specs.openapi.checks", reason="needs the extra clients")
GenerationMode = schemathesis.GenerationMode

_FEW_TOKENS = {"max_tokens": 2, "n": 1, "min_tokens": 0}
PATHS = {
    "/tokenize": {},
    "/detokenize": {},
    "/v1/completions": _FEW_TOKENS,
    "/v1/chat/completions": _FEW_TOKENS,
    "/v1/messages": {"max_tokens": 2},
    "/v1/messages/count_tokens": {},
    "/v1/responses": {"max_output_tokens": 2},
}
"""Paths, and fields with which an answer has few tokens."""
CASES = [(path, mode) for path in PATHS for mode in GenerationMode]
# schemathesis cannot make wrong bodies of these descriptions: it fails in an array of theirs.
for path in ("/v1/messages", "/v1/messages/count_tokens"):
    CASES.remove((path, GenerationMode.NEGATIVE))
CASES.append(("/v1/models/{name}", GenerationMode.POSITIVE))  # any name is valid
EXAMPLES = 25  # of each case

SETTINGS = hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.generate],
)


def answerable(body, path):
    """Returns a valid body with the served model and few tokens, so that the server looks at more
    than the name of the model."""
    if isinstance(body, dict) and "model" in body:
        return {**body, "model": "demo", **PATHS.get(path, {})}
    return body


@pytest.mark.slow
@pytest.mark.parametrize(("path", "mode"), CASES)
def test_requests_of_the_description(server, path, mode):
    described = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operation = described[path]["GET" if "{" in path else "POST"]
    statuses: list[int] = []

    def check(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE:
            case.body = answerable(case.body, path)
        response = case.call(base_url=server.url)
        statuses.append(response.status_code)
        # The description does not say everything, such as which token ids there are.
        case.validate_response(response, excluded_checks=[checks.positive_data_acceptance])

    SETTINGS(hypothesis.given(operation.as_strategy(generation_mode=mode))(check))()
    assert len(statuses) >= EXAMPLES
    assert max(statuses) < 500
    server.wait_until_idle()
    server.engine.check_integrity()
