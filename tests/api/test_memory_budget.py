from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.serving import CHAT, SOON, served, wait_for
from triptych.api.memory_budget import FREE_BYTES, MemoryBudget
from triptych.clock import SystemClock
from triptych.errors import Overloaded, RateLimited
from triptych.observe.requests import RequestRecord


@contextmanager
def request_of(client: str) -> Iterator[RequestRecord]:
    record = RequestRecord("r", "POST", SystemClock(), client=client)
    with record.ending:
        yield record


def test_charges_add_up_and_are_released_together() -> None:
    budget = MemoryBudget(8 * FREE_BYTES)
    with (
        request_of("a") as record,
        patch.object(record.ending, "callback", wraps=record.ending.callback) as callback,
    ):
        charge = budget.for_request(record)
        for _ in range(3 * 64):
            charge(FREE_BYTES // 64)
        assert budget.total == 2 * FREE_BYTES
        assert callback.call_count == 1
    assert budget.total == 0


def test_a_refused_charge_is_not_counted() -> None:
    budget = MemoryBudget(8 * FREE_BYTES)
    with request_of("a") as record:
        first = budget.for_request(record)
        first(4 * FREE_BYTES)
        for _ in range(2):
            with pytest.raises(RateLimited):
                first(2 * FREE_BYTES)
        first(FREE_BYTES)
        with request_of("b") as other:
            budget.for_request(other)(4 * FREE_BYTES)
            with request_of("c") as third, pytest.raises(Overloaded):
                budget.for_request(third)(3 * FREE_BYTES)
            assert budget.total == 7 * FREE_BYTES
        assert budget.total == 4 * FREE_BYTES
    assert budget.total == 0


def test_what_is_taken_back_is_free_for_others() -> None:
    budget = MemoryBudget(8 * FREE_BYTES)
    with request_of("a") as record:
        charge = budget.for_request(record)
        for _ in range(100):
            charge(4 * FREE_BYTES)
            charge(-4 * FREE_BYTES)
        assert budget.total == 0
        charge(3 * FREE_BYTES)
    assert budget.total == 0
    charge(3 * FREE_BYTES)
    assert budget.total == 0, "the request has ended"


def test_log_probabilities_are_charged_until_the_client_has_them(folder: Path) -> None:
    settings: dict[str, Any] = {"max_body_mb": 1, "max_inflight_mb": 4}
    many = {"n": 24, "max_tokens": 64, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    with served(folder, "1PD", **settings) as service, service.client() as client:
        response = client.post(CHAT, json=service.body(**many))
        assert response.status_code == 429, "they are kept until the answer is whole"
        assert "memory" in response.json()["error"]["message"]
        with client.stream("POST", CHAT, json=service.body(**many, stream=True)) as stream:
            events = [line for line in stream.iter_lines() if line.startswith("data: ")]
        assert stream.status_code == 200
        assert events[-1] == "data: [DONE]"
        assert not [event for event in events if "error" in event]
        assert client.post(CHAT, json=service.body(**(many | {"n": 2}))).status_code == 200
        wait_for(lambda: service.running.frontend.api.memory_budget.total == 0, SOON)
