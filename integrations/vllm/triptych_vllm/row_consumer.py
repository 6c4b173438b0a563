"""The thread of an engine's process that speaks Triptych's protocols: it registers with frontends, asks them for items,
and collects the rows that encode instances send."""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from triptych.clock import Clock
from triptych.errors import BadMessage, DeadlineExceeded, InternalError, PlanMismatch, TriptychError, Unavailable
from triptych.job_faults import Culprit
from triptych.messages.channel import Channel, endpoint_of
from triptych.messages.codec import Message
from triptych.messages.consumers import RowConsumer, RowConsumerAccepted, RowConsumerRefused, takes_rows
from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import Abort, Done, Offer, RowLayout, TransferSide, Wrote
from triptych.messages.tickets import RowTicket
from triptych.messages.work import Cancel, EncodeNeeded, Failed, MessagesLost, MissingItem, PeerLost
from triptych.transfer.collector import OpenCollector, RowCollector, RowNeed
from triptych.transfer.memory import Bytes
from triptych.types import Address, TransferId, divided
from triptych_vllm.row_needs import Need

log = logging.getLogger(__name__)

BEAT, MIN_BEAT = 1.0, 0.05
"""Seconds between two registrations with a frontend, and the least that one may ask for."""
BEATS_PER_EXPIRY = 4
"""Registrations in the time after which a frontend gives an engine up: that one is late must not end anything."""
MAX_FRONTENDS = 256
TICK = 0.25
"""Seconds between two looks at deadlines."""

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_REQUESTS_OWN = (BadMessage, PlanMismatch, DeadlineExceeded)
"""Errors of a request that it would end in with another engine, too. Others are this engine's, or an encode
instance's."""


@dataclass(frozen=True)
class EngineRows:
    """What the engine is, and which rows its decoder takes."""

    name: str
    engine: str
    identify: Callable[[], ModelIdentity]
    """Reads the checkpoint: perhaps for minutes. Raises CheckpointError."""
    width: int
    dtype: str

    def difference(self, layout: RowLayout) -> str:
        """Return why rows of a layout don't fit; empty if they do."""
        sizes = (self.width, self.width * _ITEM_BYTES[self.dtype if layout.dtype == self.dtype else "float32"])
        if sizes == (layout.width, layout.row_bytes) and takes_rows(self.dtype, layout.dtype):
            return ""
        return f"{self.width} × {self.dtype} here, {layout.width} × {layout.dtype} of {layout.row_bytes} bytes there"

    def converted(self, rows: Bytes, dtype: str) -> Bytes:
        """Return rows of a dtype in the engine's, rounded to nearest, ties to even."""
        if dtype == self.dtype:
            return rows
        if self.dtype == "float16":
            return rows.view(np.float32).astype(np.float16).view(np.uint8)
        bits = rows.view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16).view(np.uint8)


@dataclass(eq=False)
class _Frontend:
    """A frontend that has accepted this engine."""

    accepted: RowConsumerAccepted
    heard: float


@dataclass(eq=False)
class _Asking:
    """A need whose rows are on their way."""

    need: Need
    rows: "np.ndarray[Any, np.dtype[np.uint8]] | None" = None
    """In the layout's dtype; None before there is a layout."""
    sections: dict[TransferId, int] = field(default_factory=dict)
    """Open transfers, each with the number of its section."""


class ConsumerThread:
    """Registers with frontends and fetches what is asked for: a ``RowSource``."""

    def __init__(
        self, joins: Iterable[str], rows: EngineRows, channel: Channel, open_collector: OpenCollector, clock: Clock
    ) -> None:
        """``joins`` are the ``HOST:PORT`` of frontends. The thread owns the channel from now on."""
        self.news = threading.Event()
        """Set whenever a need has got its rows, or an error, or the engine is about to get a request."""
        self._joins = tuple(joins)
        self._engine = rows
        self._channel = channel
        self._open_collector = open_collector
        self._clock = clock
        self._work: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._identity: ModelIdentity | None = None
        self._collector: RowCollector | None = None
        self._frontends: dict[Address, _Frontend] = {}
        self._asking: dict[Need, _Asking] = {}
        self._of: dict[TransferId, _Asking] = {}
        self._numbers = itertools.count(1)
        self._beat = self._tick = float("-inf")
        self._owed: set[str] = set()
        """The ``HOST:PORT`` of those that haven't answered the last registration."""
        self._refusals: dict[str, str] = {}
        """What each frontend last refused this engine for, by its ``HOST:PORT``."""
        self._thread = threading.Thread(target=self._run, name="triptych-rows", daemon=True)
        self._thread.start()

    # ── for the engine's thread ──────────────────────────────────────────────────────────────────────────────

    def key_of(self, frontend: Address) -> bytes | None:
        found = self._frontends.get(frontend)
        return found.accepted.key if found is not None else None

    def ask(self, need: Need) -> None:
        self._do(lambda: self._begin(need))

    def close(self, need: Need) -> None:
        self._do(lambda: self._close(need, "no request of the engine needs it any more"))

    def failed(self, ticket: RowTicket, error: TriptychError) -> None:
        culprit = None if isinstance(error, _REQUESTS_OWN) else Culprit.HELPER
        message = Failed.of(ticket.request, self._channel.address, error, culprit)
        self._do(lambda: self._send(ticket.frontend, message))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way."""
        collector = self._collector
        return not (self._work or self._asking or self._of) and (collector is None or collector.idle)

    def stop(self) -> None:
        """Give up all that is on its way, and end the thread."""
        self._stopping = True
        self._channel.wake()
        self._thread.join(5.0)

    def _do(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self._channel.wake()

    # ── in the thread ────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            self._identity = self._engine.identify()
        except Exception as error:
            log.exception("the engine's checkpoint can't be identified, so no frontend accepts it")
            self._refusals = dict.fromkeys(self._joins, str(error))
        while not self._stopping:
            try:
                for message in self._channel.receive(min(TICK, self._interval)):
                    self._handle(message)
                while self._work:
                    self._work.popleft()()
                self._pass_time()
                self._advance()
            except Exception:
                log.exception("fetching rows failed, for all requests that wait")
                self._reset(InternalError("the engine's row consumer failed"))
        while self._work:
            self._work.popleft()()
        self._reset(Unavailable("the engine ends"))
        self._channel.close()

    def _handle(self, message: Message) -> None:
        match message:
            case RowConsumerAccepted():
                self._on_accepted(message)
            case RowConsumerRefused():
                self._on_refused(message.join, message.reason)
            case Offer() if self._collector is None:
                self._send(message.producer, Abort(message.transfer, TransferSide.CONSUMER, self._channel.address, ""))
            case Offer() | Wrote() | Abort() | Done():
                if self._collector is not None:
                    self._collector.handlers[type(message)](message)
            case PeerLost():
                if self._collector is not None:
                    self._collector.producer_lost(
                        message.address, message.transfers, message.frontend, suspect=message.suspect
                    )
                is_used = self._collector is not None and self._collector.receives_from(message.address)
                if not message.is_alive and not is_used:  # by transfers of frontends that haven't lost it
                    self._channel.disconnect(message.address)
            case Cancel():
                for need in [one for one in self._asking if one.request == message.request]:
                    self._fail(need, Unavailable("the frontend has given up the request"))
            case MessagesLost():
                self._on_messages_lost(message)
            case _:
                log.warning("%s is not for an engine", type(message).__name__)

    def _on_accepted(self, message: RowConsumerAccepted) -> None:
        if message.join not in self._joins:
            return
        if message.layout is not None:
            others = [one.accepted.layout for one in self._frontends.values() if one.accepted.join != message.join]
            differences = (one.difference(message.layout) for one in others if one is not None)
            if difference := next(filter(None, differences), "") or self._open(message.layout):
                known = [message.frontend] if message.frontend in self._frontends else []
                self._note_refusal(message.join, difference, known)  # another one there may be about to replace one
                return
        if message.frontend not in self._frontends:
            log.info("%s has accepted this engine", message.join)
        if message.join in self._owed and message.frontend in self._frontends:
            self._owed.discard(message.join)
        else:
            self.news.set()  # it may be about to send the engine a request
        self._refusals.pop(message.join, None)
        self._frontends[message.frontend] = _Frontend(message, self._clock.monotonic())
        if len(self._frontends) > MAX_FRONTENDS:
            self._forget(min(self._frontends, key=lambda one: self._frontends[one].heard), "there are too many")

    def _on_refused(self, join: str, reason: str) -> None:
        self._note_refusal(join, reason, [one for one, known in self._frontends.items() if known.accepted.join == join])

    def _note_refusal(self, join: str, reason: str, frontends: Iterable[Address]) -> None:
        """Note why the rows of these frontends at a ``HOST:PORT`` don't fit, and forget them."""
        if self._refusals.get(join) != reason:
            log.error("rows of %s don't fit this engine: %s", join, reason)
        if join in self._joins:
            self._refusals[join] = reason
            for address in frontends:
                self._forget(address, f"rows of the frontend don't fit the engine: {reason}")

    def _on_messages_lost(self, message: MessagesLost) -> None:
        """Ask again for what a frontend may have said something about. What encode instances said is for frontends to
        recover, because transfers have two ends, and only frontends can tell both."""
        if message.sender not in self._frontends:
            for address in self._frontends:
                self._send(address, message)
            return
        for need in [one for one in self._asking if one.frontend == message.sender]:
            self._close(need, "messages of the frontend were lost")
            self._begin(need)

    def _open(self, layout: RowLayout) -> str:
        """Prepare to receive rows of a layout. Return why that can't be; empty if it can."""
        if difference := self._engine.difference(layout):
            return difference
        if self._collector is not None and self._collector.layout != layout:
            if self._asking or not self._collector.idle:
                return f"rows of another format are on their way: {layout.difference(self._collector.layout)}"
            self._shut()
        if self._collector is None:
            self._collector = self._open_collector(layout, self._send)
            for need in list(self._asking):
                self._expect(self._asking[need])
        return ""

    def _pass_time(self) -> None:
        now = self._clock.monotonic()
        if now >= self._tick:
            self._tick = now + TICK
            self._channel.ping()
            if self._collector is not None:
                self._collector.check_deadlines()
            for address, known in list(self._frontends.items()):
                if now - known.heard > known.accepted.expiry:
                    self._forget(address, "the frontend is gone")
        if now >= self._beat + self._interval:
            self._beat = now
            self._register()

    @property
    def _interval(self) -> float:
        """Seconds between two registrations, as the frontend needs them that gives up soonest."""
        wanted = (one.accepted.expiry / BEATS_PER_EXPIRY for one in self._frontends.values())
        return max(MIN_BEAT, min((BEAT, *wanted)))

    def _register(self) -> None:
        if self._identity is None:
            return
        addresses = dict.fromkeys(self._frontends, "")
        addresses |= {address: known.accepted.join for address, known in self._frontends.items()}
        for join in self._joins:
            try:
                addresses.setdefault(endpoint_of(join), join)
            except TriptychError as error:
                log.warning("%s: %s", join, error)
        rows = self._engine
        for address, join in addresses.items():
            registration = RowConsumer(
                self._channel.address, rows.name, rows.engine, self._identity, rows.width, rows.dtype, join
            )
            self._owed.add(join)
            self._send(address, registration)

    def _forget(self, address: Address, reason: str) -> None:
        log.warning("%s: %s", self._frontends.pop(address).accepted.join, reason)
        for need in [one for one in self._asking if one.frontend == address]:
            self._fail(need, Unavailable(reason))
        self._channel.disconnect(address)

    def _begin(self, need: Need) -> None:
        asking = self._asking[need] = _Asking(need)
        if self._collector is not None:
            self._expect(asking)

    def _expect(self, asking: _Asking) -> None:
        """Have the rows of a need collected. It was asked for before there was a format."""
        assert self._collector is not None
        need = asking.need
        rows = asking.rows = np.empty((need.item.rows, self._collector.layout.row_bytes), dtype=np.uint8)
        for number, section in enumerate(divided(need.item.rows, need.item.cuts)):
            transfer = self._collector.expect(
                rows[section.first : section.end],
                part_rows=need.item.part_rows,
                timeout=need.timeout,
                owner=need.frontend,
            )
            asking.sections[transfer] = number
            self._of[transfer] = asking
        self._ask_for(asking, [RowNeed(transfer, 0, 0) for transfer in asking.sections])

    def _ask_for(self, asking: _Asking, needs: Iterable[RowNeed]) -> None:
        need = asking.need
        items = [
            MissingItem(need.item.index, one.transfer, one.first_row, one.attempt, asking.sections[one.transfer])
            for one in needs
        ]
        # of two messages that ask for an item, the frontend ignores the one with the smaller number
        asked = next(self._numbers)
        self._send(need.frontend, EncodeNeeded(need.request, self._channel.address, items, asked=asked))

    def _advance(self) -> None:
        if self._collector is None:
            return
        collected = self._collector.advance()
        for transfer in collected.complete:
            asking = self._of.pop(transfer)
            del asking.sections[transfer]
            if not asking.sections:
                del self._asking[asking.need]
                assert asking.rows is not None, "it was expected"
                asking.need.rows = self._engine.converted(asking.rows, self._collector.layout.dtype)
                self.news.set()
        for one in collected.needed:
            if (found := self._of.get(one.transfer)) is not None:
                self._ask_for(found, [one])
        for failure in collected.failures:
            if (found := self._of.get(failure.transfer)) is not None:
                self._fail(found.need, failure.error.error(failure.reason))

    def _fail(self, need: Need, error: TriptychError) -> None:
        self._close(need, "it failed at its consumer")
        need.error = error
        self.news.set()

    def _close(self, need: Need, reason: str) -> None:
        if (asking := self._asking.pop(need, None)) is not None:
            for transfer in asking.sections:
                del self._of[transfer]
                if self._collector is not None:
                    self._collector.close(transfer, reason)

    def _reset(self, error: TriptychError) -> None:
        for need in list(self._asking):
            try:
                self._fail(need, error)
            except Exception:
                log.exception("closing a transfer failed")
        self._shut()

    def _shut(self) -> None:
        if self._collector is not None:
            self._collector.shut()
            self._collector = None

    def _send(self, to: Address, message: Message) -> None:
        try:
            self._channel.send(to, message)
        except TriptychError as error:
            log.info("%s to %s: %s", type(message).__name__, to, error)
