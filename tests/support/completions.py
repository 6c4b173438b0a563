"""Requests to ``/v1/completions`` and the endpoints beside it."""

from typing import Any

import httpx

from tests.support.serving import Served

COMPLETIONS = "/v1/completions"


def post(service: Served, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
    defaults = {"model": service.model} | ({"max_tokens": 8, "ignore_eos": True} if path == COMPLETIONS else {})
    with service.client() as client:
        return client.post(path, json=defaults | fields)


def answer(service: Served, path: str = COMPLETIONS, **fields: Any) -> Any:
    response = post(service, path, **fields)
    assert response.status_code == 200, response.text
    return response.json()
