"""Numbers of messages on links: what a receiver makes of them."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import BadMessage
from triptych.messages import links
from triptych.messages.links import Arrival, Header, Link, Links, decode_header
from triptych.types import Address

SENDER = Address("tcp://127.0.0.1:1")


def sent(link: Link, count: int) -> list[Header]:
    return [decode_header(link.header()) for _ in range(count)]


def test_messages_in_order_are_the_next_ones() -> None:
    receiver, headers = Links(), sent(Link(SENDER), 5)
    assert {header.sender for header in headers} == {SENDER}
    assert [receiver.arrived(header) for header in headers] == [Arrival.NEXT] * 5


@given(st.lists(st.booleans()))
def test_each_gap_is_noticed_once(arrives: list[bool]) -> None:
    """By the first message after it, also at the beginning."""
    receiver, headers = Links(), sent(Link(SENDER), len(arrives))
    found = [receiver.arrived(header) for header, arrived in zip(headers, arrives, strict=True) if arrived]
    gaps = sum(one and not before for before, one in itertools.pairwise([True, *arrives]))
    assert found.count(Arrival.AFTER_LOST) == gaps
    assert found.count(Arrival.NEXT) == len(found) - gaps


@given(st.lists(st.sampled_from(["message", "lost message", "ping", "lost ping"])))
def test_pings_show_the_messages_that_were_lost_before_them_and_are_none(sent: list[str]) -> None:
    receiver, link, expected, is_missing = Links(), Link(SENDER), [], False
    found = []
    for one in sent:
        is_ping = one.endswith("ping")
        header = decode_header(link.ping() if is_ping else link.header())
        if one.startswith("lost"):
            is_missing |= not is_ping
            continue
        found.append(receiver.arrived(header, is_ping=is_ping))
        expected.append(Arrival.AFTER_LOST if is_missing else Arrival.NEXT)
        is_missing = False
    assert found == expected


def test_what_counts_as_lost_stays_lost() -> None:
    receiver, (first, second, third, fourth) = Links(), sent(Link(SENDER), 4)
    arrivals = [receiver.arrived(header) for header in (first, third, second, third, fourth)]
    assert arrivals == [Arrival.NEXT, Arrival.AFTER_LOST, Arrival.LATE, Arrival.LATE, Arrival.NEXT]


def test_links_of_one_sender_have_numbers_of_their_own() -> None:
    receiver, one, other = Links(), sent(Link(SENDER), 3), sent(Link(SENDER), 3)
    order = (one[0], other[0], one[1], one[2], other[1], other[2])
    assert {receiver.arrived(header) for header in order} == {Arrival.NEXT}


def test_the_links_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_LINKS", 2)
    receiver = Links()
    one, two, three = (sent(Link(SENDER), 3) for _ in range(3))
    for header in (one[0], two[0], one[1], three[0]):  # of the second link, nothing came for the longest time
        receiver.arrived(header)
    assert receiver.arrived(one[2]) is Arrival.NEXT
    assert receiver.arrived(two[0]) is Arrival.NEXT, "as for a new link"


@given(st.binary(max_size=40))
def test_other_bytes_are_no_header(data: bytes) -> None:
    try:
        header = decode_header(data)
    except BadMessage:
        return
    assert msgspec.msgpack.decode(data) == [header.sender, header.link, header.number]


@pytest.mark.parametrize("values", [(), ("a", -1, 0), ("a", 0, -1), ("a" * 65, 0, 0), ("a", 0.5, 0), (1, 0, 0)])
def test_headers_of_other_values_are_refused(values: tuple[object, ...]) -> None:
    with pytest.raises(BadMessage):
        decode_header(msgspec.msgpack.encode(values))
