from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from triptych.api.memory_budget import FREE_BYTES, MemoryBudget
from triptych.errors import Overloaded, RateLimited
from triptych.observe.requests import CURRENT, RequestRecord


@contextmanager
def request_of(client: str) -> Iterator[RequestRecord]:
    token = CURRENT.set(record := RequestRecord("r", "POST", client=client))
    try:
        with record.ending:
            yield record
    finally:
        CURRENT.reset(token)


def test_charges_add_up_and_are_released_together() -> None:
    budget = MemoryBudget(8 * FREE_BYTES)
    with (
        request_of("a") as record,
        patch.object(record.ending, "callback", wraps=record.ending.callback) as callback,
    ):
        charge = budget.for_request()
        for _ in range(3 * 64):
            charge(FREE_BYTES // 64)
        assert budget.total == 2 * FREE_BYTES
        assert callback.call_count == 1
    assert budget.total == 0
    budget.for_request()(2 * FREE_BYTES)
    assert budget.total == 0, "a charge outside of a request is released at once"


def test_a_refused_charge_is_not_counted() -> None:
    budget = MemoryBudget(8 * FREE_BYTES)
    with request_of("a"):
        first = budget.for_request()
        first(4 * FREE_BYTES)
        for _ in range(2):
            with pytest.raises(RateLimited):
                first(2 * FREE_BYTES)
        first(FREE_BYTES)
        with request_of("b"):
            budget.for_request()(4 * FREE_BYTES)
            with request_of("c"), pytest.raises(Overloaded):
                budget.for_request()(3 * FREE_BYTES)
            assert budget.total == 7 * FREE_BYTES
        assert budget.total == 4 * FREE_BYTES
    assert budget.total == 0
