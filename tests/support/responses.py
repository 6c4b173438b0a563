"""Requests to ``/v1/responses``."""

from typing import Any

import httpx

from tests.support.serving import Served

RESPONSES = "/v1/responses"


def post(service: Served, **fields: Any) -> httpx.Response:
    with service.client() as client:
        return client.post(RESPONSES, json={"model": service.model, "input": "Hello", "max_output_tokens": 8} | fields)


def answer(service: Served, **fields: Any) -> Any:
    response = post(service, **fields)
    assert response.status_code == 200, response.text
    return response.json()
