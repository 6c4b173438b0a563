"""Requests made from the OpenAPI document, right ones and wrong ones: no failure of the service, and answers as the
document says."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.harness import FLOAT32
from tests.support.serving import Served, served, wait_for

jsonschema_rs = pytest.importorskip("jsonschema_rs")
schemathesis = pytest.importorskip("schemathesis")
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [content_type_conformance, response_schema_conformance, status_code_conformance]
PATHS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/plan"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/version"),
    ("GET", "/health"),
    ("GET", "/ready"),
]
MESSAGES = [{"role": "user", "content": "x"}]
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": "x", "max_tokens": 4},
    "/v1/responses": {"input": "x", "max_output_tokens": 4},
    "/v1/plan": {"messages": MESSAGES, "max_tokens": 4},
    "/tokenize": {"messages": MESSAGES},
    "/detokenize": {"tokens": [1, 2]},
}
GENERATING = 3
"""The first ones get most of the cases."""


@pytest.fixture(scope="module")
def short(folder: Path) -> Iterator[Served]:
    """A service with a short maximum answer."""
    with served(folder, engine=replace(FLOAT32, max_model_len=128)) as service:
        yield service
        wait_for(service.everything_is_back)
        assert service.text("x")


@pytest.fixture(scope="module")
def document(short: Served) -> Any:
    return schemathesis.openapi.from_url(f"{short.url}/openapi.json")


def schema_of_events(document: Any, path: str) -> Any:
    """Return the documented schema of a stream's events."""
    answer = document.raw_schema["paths"][path]["post"]["responses"]["200"]
    return jsonschema_rs.validator_for(answer["content"]["text/event-stream"]["x-event-schema"])


def check_events(text: str, events: Any) -> None:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data
    for one in data:
        if one != "[DONE]" and "error" not in json.loads(one):
            events.validate(json.loads(one))


def check_path(short: Served, document: Any, method: str, path: str, num_cases: int) -> None:
    operation = document[path][method]
    statuses: Counter[int] = Counter()
    events = schema_of_events(document, path) if path in list(RIGHT)[:GENERATING] else None
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE] if method == "POST" else [GenerationMode.POSITIVE]
    cases = st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes])

    @settings(
        max_examples=num_cases,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, choice=st.data())
    def run(case: Any, choice: st.DataObject) -> None:
        if case.body and isinstance(case.body, dict) and choice.draw(st.booleans()):
            # all fields at once are hardly ever right, nor is another model: half of the cases are a right request with
            # at most one other field
            names = choice.draw(
                st.sets(st.sampled_from(sorted({*case.body} - {"model", *RIGHT[path]}) or [""]), max_size=1)
            )
            names.discard("")
            case.body = {"model": short.model} | RIGHT[path] | {name: case.body[name] for name in names}
            case.body |= {"stream": True} if events and choice.draw(st.booleans()) else {}
        response = case.call(base_url=short.url, timeout=30)
        too_late = response.status_code == 504 and "timeout" in case.body
        assert response.status_code < 500 or too_late, (case.body, response.text)
        case.validate_response(response, checks=CHECKS)
        if response.headers["content-type"][0].startswith("text/event-stream"):
            check_events(response.text, events)
        statuses[response.status_code] += 1

    if method == "POST":
        with short.client() as client:
            right = client.post(path, json={"model": short.model} | RIGHT[path])
        assert right.status_code == 200, right.text
        statuses[200] += 1
    if events:
        with short.client() as client:
            check_events(client.post(path, json={"model": short.model, "stream": True} | RIGHT[path]).text, events)
    run()
    assert statuses[200] > num_cases // 20, statuses


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_requests_from_the_document(short: Served, document: Any, method: str, path: str) -> None:
    """About 100 requests in total."""
    check_path(short, document, method, path, 20 if PATHS.index((method, path)) < GENERATING else 8)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), PATHS[:6])
def test_many_requests_from_the_document(short: Served, document: Any, method: str, path: str) -> None:
    """About 10,000 requests in total."""
    check_path(short, document, method, path, 3000 if PATHS.index((method, path)) < GENERATING else 500)


def test_every_endpoint_is_documented(short: Served) -> None:
    with short.client() as client:
        document = client.get("/openapi.json").json()
    app = short.running.frontend.api
    assert app.model_name
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["description"], path
            assert "application/json" in operation["responses"]["200"]["content"], path
            assert (method == "post") == ("requestBody" in operation), path
    assert {path for _, path in PATHS} <= set(document["paths"])
