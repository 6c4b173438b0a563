import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import BadMessage
from triptych.messages.tickets import MAX_TICKET_BYTES, RowTicket, TicketItem, frontend_of, seal, unseal
from triptych.types import Address, RequestId

KEY = bytes(range(32))
TICKET = RowTicket(
    Address("tcp://127.0.0.1:7000"),
    RequestId("r"),
    {"a": TicketItem(0, 64, 16), "b": TicketItem(1, 9, 9, (4, 6))},
    30.0,
)


def test_a_ticket_comes_back_by_its_key_alone() -> None:
    text = seal(TICKET, KEY)
    assert unseal(text, KEY) == TICKET
    assert frontend_of(text) == TICKET.frontend
    with pytest.raises(BadMessage, match="signed"):
        unseal(text, bytes(32))


@given(place=st.integers(0, 10_000), flipped=st.integers(1, 255))
def test_no_byte_of_a_ticket_can_be_changed(place: int, flipped: int) -> None:
    raw = bytearray(base64.urlsafe_b64decode(seal(TICKET, KEY)))
    raw[place % len(raw)] ^= flipped
    with pytest.raises(BadMessage):
        unseal(base64.urlsafe_b64encode(raw).decode(), KEY)


@pytest.mark.parametrize("forged", [None, 7, {}, "", "=", "AAAA", "A" * MAX_TICKET_BYTES * 2, "\ud800"])
def test_what_is_no_ticket_is_refused(forged: object) -> None:
    with pytest.raises(BadMessage):
        unseal(forged, KEY)
    with pytest.raises(BadMessage):
        frontend_of(forged)


@pytest.mark.parametrize("changed", [{"timeout": 0.0}, {"items": {"a": TicketItem(0, 0, 1)}}, {"frontend": 3}])
def test_a_signed_ticket_is_checked_as_well(changed: dict[str, object]) -> None:
    """The frontend may be of another version."""
    with pytest.raises(BadMessage):
        unseal(seal(msgspec.structs.replace(TICKET, **changed), KEY), KEY)
