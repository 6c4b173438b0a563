"""Tickets: what a request to another engine carries, so that the consumer there may ask the frontend for its rows.

A ticket is signed with a key that the frontend gives to consumers alone. So clients that reach the engine themselves
can't name another's request, or have the engine connect to an address.
"""

import base64
import binascii
import hmac
from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from triptych.errors import BadMessage
from triptych.messages.codec import decode_by
from triptych.types import Address, Count, Positive, RequestId

PARAMETER = "triptych"
"""Name of the ticket among a request's transfer parameters."""
MAX_ITEMS, MAX_CUTS = 10_000, 10_000
MAX_TICKET_BYTES = 2**22
_SIGNATURE_BYTES = 32


class TicketItem(Struct, frozen=True, array_like=True):
    """A media item of the request. Its fields are as in PlacedItem."""

    index: Count
    """Index of the item in the frontend's request."""
    rows: Positive
    part_rows: Positive
    cuts: Annotated[tuple[Positive, ...], Meta(max_length=MAX_CUTS)] = ()


class RowTicket(Struct, frozen=True, array_like=True):
    """A request's right to rows."""

    frontend: Address
    request: RequestId
    items: Annotated[dict[str, TicketItem], Meta(max_length=MAX_ITEMS)]
    """By the name that the engine's caches have for the item."""
    timeout: Annotated[float, Meta(gt=0, le=10**9)]
    """Seconds left for the request."""


_decoder = msgspec.msgpack.Decoder(RowTicket)


def seal(ticket: RowTicket, key: bytes) -> str:
    """Return a ticket as text, signed with a key of 32 bytes."""
    body = msgspec.msgpack.encode(ticket)
    return base64.urlsafe_b64encode(_signature(body, key) + body).decode()


def frontend_of(text: object) -> Address:
    """Return the frontend that a ticket names, without a proof: it tells which key to use. Raises BadMessage."""
    return decode_by(_decoder, _raw(text)[_SIGNATURE_BYTES:]).frontend


def unseal(text: object, key: bytes) -> RowTicket:
    """Return the ticket of a text. Raises BadMessage, and no other exception, if ``seal`` didn't make it with this
    key."""
    raw = _raw(text)
    signature, body = raw[:_SIGNATURE_BYTES], raw[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, _signature(body, key)):
        raise BadMessage("a ticket that no frontend has signed")
    return decode_by(_decoder, body)


def _raw(text: object) -> bytes:
    if not isinstance(text, str) or len(text) > MAX_TICKET_BYTES:
        raise BadMessage("a ticket must be text")
    try:
        return base64.b64decode(text.encode(), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise BadMessage("a ticket that isn't base64") from None


def _signature(body: bytes, key: bytes) -> bytes:
    return blake3(body, key=key).digest()
