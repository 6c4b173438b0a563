"""Rows that requests need from other instances, received into the instance's receive pool."""

import itertools
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

from triptych.engine.request import Request
from triptych.engine.runner import MediaEmbeddings
from triptych.engine.scheduler import Chunk
from triptych.messages.codec import Message
from triptych.messages.rows import Abort, Done, Offer, Wrote
from triptych.messages.stats import ReceivePool
from triptych.observe.timeline import Interval
from triptych.stage_loop import Handlers
from triptych.transfer.receiver import Receiver, TransferFailure
from triptych.types import Address, RequestId, TransferId


class RowSource(ABC):
    """Incoming transfers of all requests of an instance, over its receiver."""

    def __init__(self, receiver: Receiver, name: str, address: Address) -> None:
        self._receiver = receiver
        self._address = address
        # random, since two instances may have the same name
        self._prefix = f"{name}-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._requests: dict[TransferId, RequestId] = {}

    @property
    def handlers(self) -> Handlers:
        return {
            Offer: self._receiver.on_offer,
            Wrote: self._on_wrote,
            Abort: self._receiver.on_abort,
            Done: self._receiver.on_done,
        }

    @abstractmethod
    def expect(self, request: Request) -> Message | None:
        """Start, or restart, a request's transfers. Returns the message that asks the frontend for the rows, or None if
        none are needed. Called when a request has arrived, was admitted, or was preempted."""

    @abstractmethod
    def release(self, request_id: RequestId) -> None:
        """Close a request's open transfers."""

    @abstractmethod
    def ready_tokens(self, request: Request) -> int:
        """Return how many leading tokens of a request can be computed."""

    @abstractmethod
    def gather(self, chunks: Sequence[Chunk]) -> MediaEmbeddings:
        """Return the embeddings of a step's media tokens."""

    @abstractmethod
    def intervals(self, request_id: RequestId) -> list[Interval]:
        """Return when the request's rows were transferred."""

    @abstractmethod
    def _on_rows_landed(self, request_id: RequestId, wrote: Wrote) -> None:
        """Handle newly landed rows of one of the request's transfers."""

    def grant(self) -> None:
        """Grant free blocks to waiting transfers."""
        self._receiver.grant()

    def take_failures(self) -> list[tuple[RequestId, TransferFailure]]:
        """Return the requests that have a failed transfer since the last call, each once, with the failure."""
        self._receiver.check_deadlines()
        failures = self._receiver.take_failures()
        return list({self._requests[f.transfer]: f for f in failures if f.transfer in self._requests}.items())

    def producer_lost(self, producer: Address, offering: Collection[TransferId]) -> None:
        """As ``Receiver.producer_lost``."""
        self._receiver.producer_lost(producer, offering)

    def check_idle(self) -> None:
        """As ``Receiver.check_idle``."""
        self._receiver.check_idle()

    def stats(self) -> ReceivePool:
        """Return the receive pool's usage and counters."""
        buffer = self._receiver.buffer
        used = buffer.num_blocks - buffer.pool.num_free
        return ReceivePool(buffer.layout.kind.value, buffer.num_blocks, used, self._receiver.counters)

    @property
    def transfers(self) -> Mapping[TransferId, RequestId]:
        """The expected transfers, with their requests; a live view."""
        return self._requests

    @property
    def idle(self) -> bool:
        """Whether no transfer is under way."""
        return self._receiver.idle

    def close(self) -> None:
        """Revoke the peers' access to the receive pool."""
        self._receiver.buffer.close()

    def __str__(self) -> str:
        return str(self._receiver.counters)

    def _new_transfer(self, request_id: RequestId) -> TransferId:
        """Return the name of a new transfer for the request."""
        transfer = TransferId(f"{self._prefix}/{next(self._numbers)}")
        self._requests[transfer] = request_id
        return transfer

    def _on_wrote(self, wrote: Wrote) -> None:
        self._receiver.on_wrote(wrote)
        if (request_id := self._requests.get(wrote.transfer)) is not None:
            self._on_rows_landed(request_id, wrote)
