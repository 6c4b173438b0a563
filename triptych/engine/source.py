"""What requests need from other instances before they can go on: rows that land in the instance's receive buffer."""

import itertools
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

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
    """The incoming transfers of all requests of an instance, over its receiver."""

    def __init__(self, receiver: Receiver, name: str, address: Address) -> None:
        self._receiver = receiver
        self._address = address
        # random, because two instances may have been given one name
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
    def need(self, request: Request) -> Message | None:
        """Starts over with a request. What to ask the frontend for, if anything. Called when a request has arrived,
        when it was admitted, and when it has lost its pages."""

    @abstractmethod
    def release(self, request_id: RequestId) -> None:
        """Gives up what a request still waits for."""

    @abstractmethod
    def ready_tokens(self, request: Request) -> int:
        """How many tokens, from the first on, can be computed."""

    @abstractmethod
    def take(self, chunks: Sequence[Chunk]) -> MediaEmbeddings:
        """The rows of a step's media tokens."""

    @abstractmethod
    def intervals(self, request_id: RequestId) -> list[Interval]:
        """When the request's rows were on their way."""

    @abstractmethod
    def _note_landed(self, request_id: RequestId, wrote: Wrote) -> None:
        """Rows of one of the request's transfers have landed."""

    def grant(self) -> None:
        """Hands blocks that are free to the line."""
        self._receiver.grant()

    def take_failures(self) -> list[tuple[RequestId, TransferFailure]]:
        """The requests of which a transfer has failed, each once, and why."""
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
        """The blocks that rows land in, and what has landed so far."""
        buffer = self._receiver.buffer
        used = buffer.num_blocks - buffer.pool.num_free
        return ReceivePool(buffer.layout.kind.value, buffer.num_blocks, used, self._receiver.counters)

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return self._receiver.idle

    def close(self) -> None:
        """Takes the receive buffer back from peers."""
        self._receiver.buffer.close()

    def __str__(self) -> str:
        return str(self._receiver.counters)

    def _name(self, request_id: RequestId, number: int) -> TransferId:
        """A transfer of the request's, by a number that no other has."""
        transfer = TransferId(f"{self._prefix}/{number}")
        self._requests[transfer] = request_id
        return transfer

    def _on_wrote(self, wrote: Wrote) -> None:
        self._receiver.on_wrote(wrote)
        if (request_id := self._requests.get(wrote.transfer)) is not None:
            self._note_landed(request_id, wrote)
