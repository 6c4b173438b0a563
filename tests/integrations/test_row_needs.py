"""The policy of triptych-vllm's connector: what is asked for, kept and given up. No engine, no socket, no clock."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from triptych_vllm.row_needs import GRACE, Need, RowNeeds

from triptych.errors import BadMessage, DeadlineExceeded, PlanMismatch, TriptychError, Unavailable
from triptych.messages.tickets import RowTicket, TicketItem, seal
from triptych.types import Address, RequestId

KEY, FRONTEND = bytes(32), Address("tcp://127.0.0.1:1")
ROW_BYTES = 8


class Source:
    """Fetches nothing by itself."""

    def __init__(self) -> None:
        self.keys = {FRONTEND: KEY}
        self.asked: list[Need] = []
        self.closed: list[Need] = []
        self.failures: list[tuple[RequestId, TriptychError]] = []

    def key_of(self, frontend: Address) -> bytes | None:
        return self.keys.get(frontend)

    def ask(self, need: Need) -> None:
        self.asked.append(need)

    def close(self, need: Need) -> None:
        self.closed.append(need)

    def failed(self, ticket: RowTicket, error: TriptychError) -> None:
        self.failures.append((ticket.request, error))

    def arrive(self) -> None:
        """The rows of all that was asked for."""
        for need in self.asked:
            if need.rows is None and need not in self.closed:
                need.rows = np.zeros((need.item.rows, ROW_BYTES), np.uint8)


def ticket(request: str, *, timeout: float = 60.0, items: Mapping[str, int] | None = None, **named: int) -> str:
    made = {
        name: TicketItem(index, rows, rows) for index, (name, rows) in enumerate({**(items or {}), **named}.items())
    }
    return seal(RowTicket(FRONTEND, RequestId(request), made, timeout), KEY)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def needs(source: Source) -> RowNeeds:
    return RowNeeds(source, ROW_BYTES, max_bytes=20 * ROW_BYTES, cache_bytes=8 * ROW_BYTES)


def test_only_missing_items_are_asked_for_and_once(source: Source, needs: RowNeeds) -> None:
    sealed = ticket("r", a=4, b=4, c=4)
    for _ in range(3):
        assert not needs.ready("1", [("b", 4), ("c", 4)], sealed, 0.0)
    assert [(one.request, one.item.index) for one in source.asked] == [("r", 1), ("r", 2)]
    source.arrive()
    assert needs.ready("1", [("b", 4), ("c", 4)], sealed, 0.0)
    assert needs.rows("b") is source.asked[0].rows and needs.rows("a") is None


def test_requests_share_an_item(source: Source, needs: RowNeeds) -> None:
    assert not needs.ready("1", [("a", 4)], ticket("r", a=4), 0.0)
    assert not needs.ready("2", [("a", 4)], ticket("s", a=4), 0.0)
    assert len(source.asked) == 1
    source.arrive()
    assert needs.ready("2", [("a", 4)], ticket("s", a=4), 0.0)
    needs.forget("1")
    assert needs.rows("a") is not None and not source.closed
    needs.forget("2")
    assert needs.rows("a") is None and needs.num_held == 0


def test_a_shared_item_is_asked_for_again_in_the_others_name(source: Source, needs: RowNeeds) -> None:
    """The frontend gives up what its own request no longer needs."""
    needs.ready("1", [("a", 4)], ticket("r", a=4), 0.0)
    needs.ready("2", [("a", 4)], ticket("s", b=9, a=4), 0.0)
    needs.forget("1")
    assert source.closed == source.asked[:1]
    assert [(one.request, one.item.index) for one in source.asked] == [("r", 0), ("s", 1)]
    source.arrive()
    assert needs.ready("2", [("a", 4)], ticket("s", b=9, a=4), 0.0)


def test_rows_are_kept_for_later_requests_up_to_a_size(source: Source, needs: RowNeeds) -> None:
    for number, name in enumerate("abc"):
        needs.ready(str(number), [(name, 4)], ticket("r", items={name: 4}), 0.0)
        source.arrive()
        needs.release(str(number), name)
        needs.forget(str(number))
    assert needs.ready("x", [("b", 4), ("c", 4)], ticket("s", b=4, c=4), 0.0)
    assert not needs.ready("y", [("a", 4)], ticket("t", a=4), 0.0), "it was the oldest"
    assert len(source.asked) == 4


def test_what_is_on_its_way_is_given_up_with_its_request(source: Source, needs: RowNeeds) -> None:
    needs.ready("1", [("a", 4), ("b", 4)], ticket("r", a=4, b=4), 0.0)
    needs.forget("1")
    assert source.closed == source.asked and needs.num_held == 0
    needs.forget("1")  # nothing


def test_a_request_asks_for_all_its_items_or_none(source: Source, needs: RowNeeds) -> None:
    """Twenty rows at a time: two requests of two items would otherwise wait for each other's memory."""
    needs.ready("1", [("a", 6), ("b", 6)], ticket("r", a=6, b=6), 0.0)
    assert not needs.ready("2", [("c", 6), ("d", 6)], ticket("s", c=6, d=6), 0.0)
    assert len(source.asked) == 2
    assert not needs.ready("3", [("e", 8)], ticket("t", e=8), 0.0)
    assert len(source.asked) == 3, "it fits"
    needs.forget("3")
    source.arrive()
    needs.release("1", "a")
    needs.release("1", "b")  # it generates
    assert not needs.ready("2", [("c", 6), ("d", 6)], ticket("s", c=6, d=6), 0.0)
    assert len(source.asked) == 5


def test_a_request_larger_than_all_is_asked_for_alone(source: Source, needs: RowNeeds) -> None:
    assert not needs.ready("1", [("a", 100)], ticket("r", a=100), 0.0)
    assert not needs.ready("2", [("b", 1)], ticket("s", b=1), 0.0)
    assert len(source.asked) == 1
    source.arrive()
    assert needs.ready("1", [("a", 100)], ticket("r", a=100), 0.0)
    needs.forget("1")
    needs.ready("2", [("b", 1)], ticket("s", b=1), 0.0)
    assert len(source.asked) == 2


Attempt = Callable[[RowNeeds], bool]


@pytest.mark.parametrize(
    ("attempt", "error"),
    [
        (lambda needs: needs.ready("1", [("a", 4)], None, 0.0), BadMessage),
        (lambda needs: needs.ready("1", [("a", 4)], "AAAA", 0.0), BadMessage),
        (lambda needs: needs.ready("1", [("a", 4)], ticket("r", b=4), 0.0), BadMessage),
        (lambda needs: needs.ready("1", [("a", 4)], ticket("r", a=5), 0.0), PlanMismatch),
    ],
)
def test_requests_that_name_no_rows_of_theirs_end(
    source: Source, needs: RowNeeds, attempt: Attempt, error: type[TriptychError]
) -> None:
    with pytest.raises(error):
        attempt(needs)
    assert not source.asked
    needs.forget("1")


def test_a_ticket_that_another_key_signed_is_refused(source: Source, needs: RowNeeds) -> None:
    source.keys = {FRONTEND: bytes([1] * 32)}
    with pytest.raises(BadMessage, match="signed"):
        needs.ready("1", [("a", 4)], ticket("r", a=4), 0.0)
    assert not source.failures, "whose request it is can't be known"


def test_a_frontend_may_be_new(source: Source, needs: RowNeeds) -> None:
    source.keys = {}
    sealed = ticket("r", a=4)
    assert not needs.ready("1", [("a", 4)], sealed, 10.0)
    with pytest.raises(Unavailable):
        needs.ready("1", [("a", 4)], sealed, 10.1 + GRACE)
    source.keys = {FRONTEND: KEY}
    assert not needs.ready("2", [("a", 4)], sealed, 10.0)
    assert len(source.asked) == 1


def test_time_runs_out(source: Source, needs: RowNeeds) -> None:
    sealed = ticket("r", timeout=9.0, a=4)
    assert not needs.ready("1", [("a", 4)], sealed, 1.0)
    with pytest.raises(DeadlineExceeded):
        needs.ready("1", [("a", 4)], sealed, 10.5)
    assert [request for request, _ in source.failures] == ["r"]


def test_an_item_that_fails_ends_its_requests_alone(source: Source, needs: RowNeeds) -> None:
    needs.ready("1", [("a", 4)], ticket("r", a=4), 0.0)
    needs.ready("2", [("b", 4)], ticket("s", b=4), 0.0)
    source.asked[0].error = Unavailable("gone")
    with pytest.raises(Unavailable, match="gone"):
        needs.ready("1", [("a", 4)], ticket("r", a=4), 0.0)
    needs.forget("1")
    assert not needs.ready("2", [("b", 4)], ticket("s", b=4), 0.0)
    needs.ready("3", [("a", 4)], ticket("t", a=4), 0.0)
    assert len(source.asked) == 3, "another request tries again"


def test_an_item_that_fails_for_one_request_is_asked_for_in_the_others_name(source: Source, needs: RowNeeds) -> None:
    """Once for each: the frontend of the first one may have given it up, and the engine may not know yet."""
    items = {name: (ticket(name, a=4), [("a", 4)]) for name in "rst"}

    def ready(name: str) -> bool:
        sealed, missing = items[name]
        return needs.ready(name, missing, sealed, 0.0)

    for name in items:
        assert not ready(name)
    source.asked[0].error = Unavailable("the frontend has given up the request")
    assert not ready("s")
    assert not ready("r"), "it waits, too"
    assert [one.request for one in source.asked] == ["r", "s"]
    needs.forget("r")
    assert not source.closed, "the other request still needs it"
    source.asked[1].error = Unavailable("gone")
    assert not ready("t")
    source.asked[2].error = Unavailable("gone")
    for name in "st":
        with pytest.raises(Unavailable, match="gone"):
            ready(name)
        needs.forget(name)
    assert len(source.asked) == 3
    assert needs.num_held == 0


def test_two_requests_cant_differ_about_an_item(needs: RowNeeds) -> None:
    needs.ready("1", [("a", 4)], ticket("r", a=4), 0.0)
    with pytest.raises(PlanMismatch):
        needs.ready("2", [("a", 5)], ticket("s", a=5), 0.0)
