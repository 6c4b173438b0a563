"""Engines of other projects that ask for rows themselves, as language instances do: which are registered, and the
tickets by which a request there names its items."""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from blake3 import blake3

from triptych.clock import Clock
from triptych.messages.codec import Message
from triptych.messages.consumers import (
    KEY_BYTES,
    RowConsumer,
    RowConsumerAccepted,
    RowConsumerRefused,
    takes_rows,
)
from triptych.messages.identity import ModelIdentity, update_with_length
from triptych.messages.rows import RowLayout
from triptych.messages.tickets import RowTicket, TicketItem, seal
from triptych.messages.work import time_left
from triptych.router.request_state import RequestState
from triptych.types import Address

log = logging.getLogger(__name__)

MAX_CONSUMERS = 256


@dataclass(eq=False)
class _Registered:
    consumer: RowConsumer
    heard: float
    """When it last said that it is there, by the router's clock."""


class RowConsumers:
    """The registered consumers. ``address in consumers`` is whether one of that address may ask for rows."""

    def __init__(
        self,
        *,
        address: Address,
        identity: ModelIdentity,
        expiry: float,
        layout: Callable[[], RowLayout | None],
        notify: Callable[[Address, Message], None],
        disconnect: Callable[[Address], object],
        clock: Clock,
    ) -> None:
        """``address`` is this frontend's. ``identity`` is what consumers must serve, ``layout`` returns that of rows
        once it is known, and ``expiry`` is in seconds."""
        self._address = address
        self._identity = identity
        self._expiry = expiry
        self._layout = layout
        self._notify = notify
        self._disconnect = disconnect
        self._clock = clock
        self._key = secrets.token_bytes(KEY_BYTES)
        self._registered: dict[Address, _Registered] = {}
        self._refused = ("", "")
        """The one that was refused last, and why."""

    def on_beat(self, message: RowConsumer) -> None:
        """Register a consumer, or keep it registered."""
        layout = self._layout()
        if reason := self._difference(message, layout):
            if self._refused != (refused := (message.name, reason)):  # it asks again and again
                self._refused = refused
                log.warning("refused the connector %s: %s", *refused)
            self._registered.pop(message.address, None)
            self._notify(message.address, RowConsumerRefused(reason, message.join))
            return
        if message.address not in self._registered:
            if len(self._registered) >= MAX_CONSUMERS:
                self._notify(message.address, RowConsumerRefused("there are too many", message.join))
                return
            log.info("the connector %s of %s has registered", message.name, message.engine)
        self._registered[message.address] = _Registered(message, self._clock.now())
        self._accept(message)

    def rouse(self) -> None:
        """Tell consumers that their engines may get a request now: those whose requests all wait for rows rest between
        two looks at what has come."""
        for one in self._registered.values():
            self._accept(one.consumer)

    def _accept(self, consumer: RowConsumer) -> None:
        accepted = RowConsumerAccepted(self._address, self._expiry, self._key, self._layout(), consumer.join)
        self._notify(consumer.address, accepted)

    def expire(self) -> list[Address]:
        """Forget the consumers that have been silent for too long. Returns their addresses."""
        now = self._clock.now()
        gone = [address for address, one in self._registered.items() if now - one.heard > self._expiry]
        for address in gone:
            log.warning("the connector %s is silent", self._registered.pop(address).consumer.name)
            self._disconnect(address)
        return gone

    def serves(self, server: str, *, is_only: bool) -> bool:
        """Return whether the consumer of a server, given as ``HOST:PORT``, is registered: that of its name or, if it
        ``is_only`` server, any."""
        names = [one.consumer.name for one in self._registered.values()]
        return server in names or (is_only and bool(names))

    def addresses(self) -> list[Address]:
        return list(self._registered)

    def __contains__(self, address: object) -> bool:
        return address in self._registered

    def ticket(self, state: RequestState) -> str:
        """Return the ticket of a request whose rows such a consumer takes."""
        items: dict[str, TicketItem] = {}
        salt = state.generate.cache_salt
        for index, item in enumerate(state.generate.items):
            one = TicketItem(index, item.placement.rows, item.part_rows, item.cuts)
            items.setdefault(name_of(item.key, salt), one)
        timeout = time_left(state.deadline, self._clock.now())
        return seal(RowTicket(self._address, state.id, items, timeout), self._key)

    def _difference(self, message: RowConsumer, layout: RowLayout | None) -> str:
        if difference := message.model.difference(self._identity):
            return f"its model is another one: {difference}"
        if layout is not None and not (message.width == layout.width and takes_rows(message.dtype, layout.dtype)):
            return f"it takes rows of {message.width} × {message.dtype}, these have {layout.width} × {layout.dtype}"
        return ""


def name_of(key: str, salt: str) -> str:
    """Return what an engine's caches call an item: they would share its rows among all clients otherwise."""
    if not salt:
        return key
    digest = blake3()
    for field in (key, salt):
        update_with_length(digest, field.encode())
    return digest.hexdigest()
