"""Incoming transfers of an engine loop, over its receiver, each with its request."""

import itertools
import secrets
from collections.abc import Collection
from dataclasses import dataclass

from triptych.clock import Clock
from triptych.engine.active_request import ActiveRequest, TransferTimes
from triptych.messages.rows import Abort, Done, Offer, Wrote
from triptych.messages.stats import ReceivePool
from triptych.stage_loop import Handlers
from triptych.transfer.receiver import Receiver, TransferFailure
from triptych.types import Address, TransferId


@dataclass(frozen=True)
class _OpenTransfer:
    active: ActiveRequest
    times: TransferTimes


class IncomingTransfers:
    """Names the transfers that sources expect, and knows whose they are. The sources hand rows on."""

    def __init__(self, receiver: Receiver, name: str, clock: Clock) -> None:
        self.receiver = receiver
        self.clock = clock
        # random, since two instances may have the same name
        self._prefix = f"{name}-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._open: dict[TransferId, _OpenTransfer] = {}
        self._failures: list[TransferFailure] = []

    @property
    def handlers(self) -> Handlers:
        return {
            Offer: self.receiver.on_offer,
            Wrote: self._on_wrote,
            Abort: self.receiver.on_abort,
            Done: self.receiver.on_done,
        }

    def new_name(self) -> TransferId:
        """Return the name of a new transfer."""
        return TransferId(f"{self._prefix}/{next(self._numbers)}")

    def add(self, transfer: TransferId, active: ActiveRequest, times: TransferTimes) -> None:
        """Record that a transfer is open for the request. ``times`` is updated as its rows land."""
        self._open[transfer] = _OpenTransfer(active, times)

    def remove(self, transfer: TransferId) -> None:
        """Forget a transfer that is complete or closed."""
        del self._open[transfer]

    def request_of(self, transfer: TransferId) -> ActiveRequest | None:
        """Return the request that a transfer is open for."""
        found = self._open.get(transfer)
        return found.active if found else None

    @property
    def requests(self) -> list[ActiveRequest]:
        """The requests of all open transfers, one for each transfer."""
        return [one.active for one in self._open.values()]

    @property
    def transfers(self) -> Collection[TransferId]:
        """Live view of the open transfers."""
        return self._open.keys()

    def fail(self, failure: TransferFailure) -> None:
        """Report a failure that the receiver doesn't see."""
        self._failures.append(failure)

    def take_failures(self) -> list[tuple[ActiveRequest, TransferFailure]]:
        """Return the requests that have a failed transfer since the last call, each once, with the failure."""
        self.receiver.check_deadlines()
        failures, self._failures = [*self._failures, *self.receiver.take_failures()], []
        return list({self._open[f.transfer].active: f for f in failures if f.transfer in self._open}.items())

    def stats(self) -> ReceivePool:
        """Return the receive pool's usage and counters."""
        buffer = self.receiver.buffer
        used = buffer.num_blocks - buffer.pool.num_free
        return ReceivePool(buffer.layout.kind.value, buffer.num_blocks, used, self.receiver.counters)

    def close(self) -> None:
        """Revoke the peers' access to the receive pool."""
        self.receiver.buffer.close()

    def producer_lost(
        self, producer: Address, offering: Collection[TransferId], owner: Address, *, suspect: bool
    ) -> None:
        """Record a lost producer, by ``Receiver.producer_lost``."""
        self.receiver.producer_lost(producer, offering, owner, suspect=suspect)

    def _on_wrote(self, wrote: Wrote) -> None:
        self.receiver.on_wrote(wrote)
        if found := self._open.get(wrote.transfer):
            found.times.landed = self.clock.monotonic()
            found.times.began = found.times.began or found.times.landed - wrote.seconds
