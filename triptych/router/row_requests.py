"""Requests that are answered by their items' rows: no language instance has them.

The frontend is their consumer. It asks the router for items as language instances do (``EncodeNeeded``), so queues,
fairness, caches, retries and recovery are the same.
"""

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import numpy as np

from triptych.clock import Clock
from triptych.errors import TriptychError, Unavailable
from triptych.messages.codec import Send
from triptych.messages.rows import Abort, Done, Offer, RowLayout, RowMessage, Wrote
from triptych.messages.work import EncodeNeeded, MissingItem, time_left
from triptych.router.request_state import RequestState
from triptych.transfer.collector import OpenCollector, RowCollector, RowNeed
from triptych.transfer.receiver import TransferFailure
from triptych.types import Address, TransferId

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Asking:
    """A request whose rows are on their way."""

    state: RequestState
    sections: dict[TransferId, tuple[int, int]] = field(default_factory=dict)
    """Open transfers, each with the index of its item and the number of its section."""
    num_asked: int = 0


class RowRequests:
    """The requests in flight that are answered by rows, and this frontend's consumer of rows."""

    def __init__(
        self,
        *,
        address: Address,
        open_collector: OpenCollector | None,
        notify: Send,
        ask: Callable[[EncodeNeeded], None],
        clock: Clock,
    ) -> None:
        """``address`` is this frontend's. ``open_collector`` makes the consumer, None if there is to be none.
        ``notify`` sends its messages, and only logs a failure. ``ask`` queues items for encoding."""
        self._address = address
        self._open_collector = open_collector
        self._notify = notify
        self._ask = ask
        self._clock = clock
        self._collector: RowCollector | None = None
        """None until a request needs it: it holds memory."""
        self._requests: dict[RequestState, _Asking] = {}
        self._of: dict[TransferId, _Asking] = {}

    def open(self, layout: RowLayout) -> None:
        """Prepare to receive rows of a layout. Raises Unavailable while rows of another one are on their way, and if
        no fabric can be opened."""
        if self._collector is not None and self._collector.layout != layout:
            if not self._collector.idle:
                raise Unavailable("rows of another format are still on their way")
            self.close()
        if self._open_collector is None:
            raise Unavailable("this frontend takes no rows")
        if self._collector is None:
            try:
                self._collector = self._open_collector(layout, self._notify)
            except (TriptychError, OSError) as error:
                log.exception("no rows can be received")
                raise Unavailable(f"this frontend can't receive rows: {error}") from None

    def begin(self, state: RequestState) -> None:
        """Ask for all items of a request, whose rows are its answer. Earlier transfers of it are closed."""
        self.release(state)
        assert state.rows is not None and self._collector is not None, "it was opened"
        asking = self._requests[state] = _Asking(state)
        timeout = time_left(state.deadline, self._clock.now())
        for index, item in enumerate(state.generate.items):
            rows = np.empty((item.placement.rows, state.rows.layout.row_bytes), dtype=np.uint8)
            state.rows.rows[index] = rows
            for number, section in enumerate(item.sections):
                transfer = self._collector.expect(
                    rows[section.first : section.end],
                    part_rows=item.part_rows,
                    timeout=timeout,
                    owner=self._address,
                )
                asking.sections[transfer] = index, number
                self._of[transfer] = asking
        self._ask_for(asking, [RowNeed(transfer, 0, 0) for transfer in asking.sections])

    def release(self, state: RequestState) -> None:
        """Close what is on its way for a request; nothing for one that isn't answered by rows."""
        if (asking := self._requests.pop(state, None)) is not None:
            for transfer in list(asking.sections):
                self._close(asking, transfer)

    def producer_lost(self, producer: Address, transfers: Collection[TransferId], *, suspect: bool) -> None:
        """Note that an encode instance is gone, with transfers that it may have yet to offer."""
        if self._collector is not None:
            self._collector.producer_lost(producer, transfers, self._address, suspect=suspect)

    @property
    def handled(self) -> tuple[type[RowMessage], ...]:
        """Types of the messages that ``handle`` takes."""
        return Offer, Wrote, Abort, Done

    def handle(self, message: RowMessage) -> None:
        """Handle a message of an encode instance about rows."""
        if self._collector is None:
            log.warning("%s of no transfer of this frontend", type(message).__name__)
        else:
            self._collector.handlers[type(message)](message)

    def tick(self) -> None:
        """Look for transfers without progress. Call a few times a second; ``advance`` must follow."""
        if self._collector is not None:
            self._collector.check_deadlines()

    def advance(self) -> Iterator[tuple[RequestState, TransferFailure | None]]:
        """Take what has arrived. Yields the requests whose answer is complete, with None, and those of which a transfer
        has failed: the caller must end each of these, or begin it again."""
        if self._collector is None:
            return
        collected = self._collector.advance()
        for transfer in collected.complete:
            asking = self._of.pop(transfer)
            del asking.sections[transfer]
            if not asking.sections:
                yield asking.state, None
        needed: dict[_Asking, list[RowNeed]] = {}
        for need in collected.needed:
            needed.setdefault(self._of[need.transfer], []).append(need)
        for asking, needs in needed.items():
            self._ask_for(asking, needs)
        for failure in collected.failures:
            if (failed := self._of.get(failure.transfer)) is not None:
                self._close(failed, failure.transfer)
                yield failed.state, failure

    def close(self) -> None:
        """Release the memory that rows arrive in."""
        if self._collector is not None:
            self._collector.shut()
            self._collector = None

    def check_idle(self) -> None:
        """For tests: raise BlockError if nothing is on its way and memory for rows is taken."""
        if self._collector is not None:
            self._collector.check_idle()

    @property
    def idle(self) -> bool:
        """Whether no rows are on their way."""
        return self._collector is None or self._collector.idle

    def _ask_for(self, asking: _Asking, needs: list[RowNeed]) -> None:
        asking.num_asked += 1
        items = [
            MissingItem(index, need.transfer, need.first_row, need.attempt, section)
            for need in needs
            for index, section in [asking.sections[need.transfer]]
        ]
        self._ask(EncodeNeeded(asking.state.id, self._address, items, asked=asking.num_asked))

    def _close(self, asking: _Asking, transfer: TransferId) -> None:
        assert self._collector is not None
        del asking.sections[transfer], self._of[transfer]
        self._collector.close(transfer, "the request has ended or begins again")
