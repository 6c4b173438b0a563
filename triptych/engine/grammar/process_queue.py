"""Request queue of a grammar's process: any thread sends requests, one thread receives the answers."""

import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from triptych.engine.grammar.messages import GrammarRequest
from triptych.sandbox import protocol
from triptych.sandbox.protocol import Bulk, ProtocolError, Result, TaskFailed

if TYPE_CHECKING:
    from triptych.engine.grammar.matching import Matching


@dataclass
class PendingRequest:
    """A request to a grammar's process that hasn't been answered."""

    matching: "Matching | None"
    """The matching that it belongs to; None for one about the grammar itself."""
    timeout: float
    """Seconds to wait for the answer once the process has started on the request."""
    started: float
    """When the process started on the request, by ``time.monotonic``."""


class ProcessQueue:
    """Requests to one grammar's process. Its owner holds the service's lock during every call."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.connection = connection
        self.pending: deque[PendingRequest] = deque()
        self.outbox: deque[tuple[protocol.ProcessRequest, bytes]] = deque()
        self.closed = False
        """Whether the process has closed its end of the connection."""
        self.killed_at = 0.0
        """When a kill was ordered because of a timeout, by ``time.monotonic``; 0 for never."""

    def send(
        self,
        request: GrammarRequest,
        matching: "Matching | None",
        *,
        seconds: float,
        timeout: float,
        bulk: bytes = b"",
    ) -> None:
        """Queue a request without blocking; ``flush`` sends what the socket can't take now. Requests to a process that
        has ended are dropped. ``seconds`` is the processor time after which the kernel ends the process."""
        self.pending.append(PendingRequest(matching, timeout, time.monotonic()))
        self.outbox.append((protocol.ProcessRequest(msgspec.msgpack.encode(request), seconds), bulk))
        self.flush()

    def flush(self) -> None:
        """Send as many queued requests as the socket takes."""
        while self.outbox:
            question, content = self.outbox[0]
            bulk = Bulk.of(content) if content else None
            try:
                protocol.send(self.connection, question, bulk)
            except BlockingIOError:
                return
            except OSError:
                pass  # the process has ended; the fork server reports that
            finally:
                if bulk is not None:
                    bulk.close()
            self.outbox.popleft()

    def answers(self) -> Iterator[tuple[PendingRequest, Result | TaskFailed]]:
        """Yield the answers received since the last call. Raises ProtocolError for a malformed one."""
        while True:
            try:
                data, bulk = protocol.receive(self.connection)
            except BlockingIOError:
                return
            except OSError:
                data, bulk = b"", None
            if bulk is not None:
                bulk.close()
            if not data:
                self.closed = True
                return
            if not self.pending:
                raise ProtocolError("an answer without a request")
            try:
                answer = msgspec.msgpack.decode(data, type=Result | TaskFailed)
            except msgspec.MsgspecError as error:
                raise ProtocolError(str(error)) from None
            answered = self.pending.popleft()
            self.restart_timer()
            yield answered, answer

    def restart_timer(self) -> None:
        """Count the timeout of the oldest request from now."""
        if self.pending:
            self.pending[0].started = time.monotonic()

    @property
    def overdue(self) -> bool:
        """Whether the oldest request has exceeded its timeout."""
        return bool(self.pending) and time.monotonic() - self.pending[0].started > self.pending[0].timeout
