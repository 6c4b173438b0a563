"""Which rows an engine's requests need, have and wait for. No engine, no socket; callers pass the time.

An item is asked for once, in the name of one request, however many need it. If that request ends or fails before the
rows are there, the item is asked for again in the name of another: a frontend gives up what its own request no longer
needs.
"""

import logging
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from triptych.errors import BadMessage, DeadlineExceeded, PlanMismatch, TriptychError, Unavailable
from triptych.messages.tickets import RowTicket, TicketItem, frontend_of, unseal
from triptych.transfer.memory import Bytes
from triptych.types import Address, RequestId

log = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds that a request waits for the frontend that its ticket names to accept this engine: it may just have begun."""


@dataclass(eq=False)
class Need:
    """An item that was asked for. The source sets ``rows`` or ``error``, once."""

    frontend: Address
    request: RequestId
    item: TicketItem
    timeout: float
    """Seconds that the request had left."""
    rows: Bytes | None = None
    """uint8 of shape (rows, row_bytes)."""
    error: TriptychError | None = None


class RowSource(Protocol):
    """What fetches rows, in a thread of its own."""

    def key_of(self, frontend: Address) -> bytes | None:
        """Return the key of a frontend's tickets; None if it hasn't accepted this engine."""

    def ask(self, need: Need) -> None:
        """Have an item's rows fetched."""

    def close(self, need: Need) -> None:
        """Give up an item, or do nothing if it has arrived or failed."""

    def failed(self, ticket: RowTicket, error: TriptychError) -> None:
        """Tell the frontend that its request has failed here."""


@dataclass(eq=False)
class _User:
    """A request of the engine."""

    since: float
    ticket: RowTicket | None = None
    held: dict[str, bool] = field(default_factory=dict)
    """Items that are kept for it, each with whether it was asked for in its name."""
    num_bytes: int = 0
    """Size of the items that it may ask for; 0 while it may ask for none."""


@dataclass(eq=False)
class _Item:
    need: Need
    users: dict[str, RowTicket]
    """The requests that need it, the one in whose name it was asked for first."""


class RowNeeds:
    """The rows of all requests in flight. Used by one thread."""

    def __init__(self, source: RowSource, row_bytes: int, *, max_bytes: int, cache_bytes: int) -> None:
        """Requests may have asked for ``max_bytes`` at a time, and one request alone for more. ``cache_bytes`` are kept
        of rows that no request needs any more."""
        self._source = source
        self._row_bytes = row_bytes
        self._max_bytes = max_bytes
        self._cache_bytes = cache_bytes
        self._users: dict[str, _User] = {}
        self._items: dict[str, _Item] = {}
        self._admitted = 0
        """Sum of the users' ``num_bytes``."""
        self._cached: OrderedDict[str, Bytes] = OrderedDict()
        """Rows that no request needs, the least recently used first."""
        self._num_cached = 0
        self.num_asked = 0
        """Items asked for so far."""

    @property
    def users(self) -> Collection[str]:
        """Live view of the requests that have asked, and aren't known to have ended."""
        return self._users.keys()

    @property
    def num_held(self) -> int:
        """Items that requests need: on their way, or here."""
        return len(self._items)

    def ready(self, name: str, missing: Sequence[tuple[str, int]], sealed: object, now: float) -> bool:
        """Return whether a request's ``missing`` items, by name and rows, are all here. Asks for those that aren't.

        ``sealed`` is the request's ticket. Raises TriptychError, after the frontend was told, if they will never be
        here."""
        user = self._users.setdefault(name, _User(now))
        try:
            if user.ticket is None:
                user.ticket = self._open(sealed, waited=now - user.since)
                if user.ticket is None:
                    return False
            return self._hold(name, user, user.ticket, missing, now)
        except TriptychError as error:
            if user.ticket is not None:
                self._source.failed(user.ticket, error)
            raise

    def rows(self, identifier: str) -> Bytes | None:
        """Return an item's rows; None if they aren't here, or no request holds them."""
        item = self._items.get(identifier)
        return item.need.rows if item is not None else None

    def release(self, name: str, identifier: str) -> None:
        """Note that a request doesn't need an item any more."""
        user = self._users.get(name)
        if user is None or identifier not in user.held:
            return
        del user.held[identifier]
        if not user.held:
            self._dismiss(user)
        item = self._items[identifier]
        asked_by = next(iter(item.users))
        del item.users[name]
        if not item.users:
            del self._items[identifier]
            self._keep(identifier, item.need)
        elif asked_by == name and item.need.rows is None:
            self._source.close(item.need)
            self._ask_for(next(iter(item.users)), identifier, item)

    def forget(self, name: str) -> None:
        """Note that a request has ended."""
        if (user := self._users.get(name)) is None:
            return
        for identifier in list(user.held):
            self.release(name, identifier)
        self._dismiss(user)
        del self._users[name]

    def _open(self, sealed: object, waited: float) -> RowTicket | None:
        """Return the ticket; None while its frontend hasn't accepted this engine yet."""
        if (key := self._source.key_of(frontend_of(sealed))) is not None:
            return unseal(sealed, key)
        if waited > GRACE:
            raise Unavailable("the request names a frontend that hasn't accepted this engine")
        return None

    def _hold(self, name: str, user: _User, ticket: RowTicket, missing: Sequence[tuple[str, int]], now: float) -> bool:
        if now - user.since > ticket.timeout:
            raise DeadlineExceeded("the request's time has run out while it waited for rows")
        for identifier, rows in missing:
            if (planned := ticket.items.get(identifier)) is None:
                raise BadMessage(f"the request's ticket names no item {identifier[:100]!r}")
            if planned.rows != rows:
                raise PlanMismatch(f"an item has {planned.rows} rows by its plan, and the engine expects {rows}")
        if not user.num_bytes and not self._admit(user, sum(rows for _, rows in missing) * self._row_bytes):
            return False
        ready = True
        for identifier, _ in missing:
            if identifier not in user.held:
                self._take(name, user, ticket, identifier)
            item = self._items[identifier]
            if (error := item.need.error) is not None:
                if user.held[identifier] or item.need.request == ticket.request:
                    raise error
                self._ask_for(name, identifier, item)  # it may be the other request's fault
            ready &= item.need.rows is not None
        return ready

    def _admit(self, user: _User, num_bytes: int) -> bool:
        """A request asks for all its items, or for none: two of them could otherwise wait for each other's memory."""
        if self._admitted and self._admitted + num_bytes > self._max_bytes:
            return False
        user.num_bytes = num_bytes
        self._admitted += num_bytes
        return True

    def _dismiss(self, user: _User) -> None:
        self._admitted -= user.num_bytes
        user.num_bytes = 0

    def _take(self, name: str, user: _User, ticket: RowTicket, identifier: str) -> None:
        planned = ticket.items[identifier]
        asks = False
        if (item := self._items.get(identifier)) is None:
            rows = self._cached.pop(identifier, None)
            self._num_cached -= 0 if rows is None else rows.nbytes
            if asks := rows is None or len(rows) != planned.rows:
                need = self._ask(ticket, planned)
            else:
                need = Need(ticket.frontend, ticket.request, planned, ticket.timeout, rows)
            item = self._items[identifier] = _Item(need, {})
        elif item.need.item.rows != planned.rows:
            raise PlanMismatch("two requests name an item that has different rows")
        item.users[name] = ticket
        user.held[identifier] = asks

    def _ask_for(self, name: str, identifier: str, item: _Item) -> None:
        """Ask for an item again, in the name of one of its users."""
        ticket = item.users[name]
        item.users = {name: ticket} | item.users
        self._users[name].held[identifier] = True
        item.need = self._ask(ticket, ticket.items[identifier])

    def _ask(self, ticket: RowTicket, item: TicketItem) -> Need:
        need = Need(ticket.frontend, ticket.request, item, ticket.timeout)
        self.num_asked += 1
        self._source.ask(need)
        return need

    def _keep(self, identifier: str, need: Need) -> None:
        if need.rows is None:
            self._source.close(need)
            return
        self._cached[identifier] = need.rows
        self._num_cached += need.rows.nbytes
        while self._num_cached > self._cache_bytes:
            self._num_cached -= self._cached.popitem(last=False)[1].nbytes
