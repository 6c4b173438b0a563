from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from triptych.api.held import SMALL, MemoryBudget
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


def test_pieces_add_up_and_all_is_given_back_at_once() -> None:
    held = MemoryBudget(8 * SMALL)
    with (
        request_of("a") as record,
        patch.object(record.ending, "callback", wraps=record.ending.callback) as to_be_called,
    ):
        hold = held.for_request()
        for _ in range(3 * 64):
            hold(SMALL // 64)
        assert held.total == 2 * SMALL
        assert to_be_called.call_count == 1
    assert held.total == 0
    held.for_request()(2 * SMALL)
    assert held.total == 0, "of no request"


def test_what_is_refused_is_not_held() -> None:
    held = MemoryBudget(8 * SMALL)
    with request_of("a"):
        first = held.for_request()
        first(4 * SMALL)
        for _ in range(2):
            with pytest.raises(RateLimited):
                first(2 * SMALL)
        first(SMALL)
        with request_of("b"):
            held.for_request()(4 * SMALL)
            with request_of("c"), pytest.raises(Overloaded):
                held.for_request()(3 * SMALL)
            assert held.total == 7 * SMALL
        assert held.total == 4 * SMALL
    assert held.total == 0
