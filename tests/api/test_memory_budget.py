from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from triptych.api.memory_budget import FREE_BYTES, MemoryBudget
from triptych.errors import Overloaded, RateLimited
from triptych.observe.requests import RequestRecord


@contextmanager
def request_of(client: str) -> Iterator[RequestRecord]:
    record = RequestRecord("r", "POST", client=client)
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
