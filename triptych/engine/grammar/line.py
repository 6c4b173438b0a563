"""The line to a grammar's process: questions go out from any thread, answers come in on one."""

import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from triptych.engine.grammar.messages import Question
from triptych.sandbox import protocol
from triptych.sandbox.protocol import Bulk, ProtocolError, Result, TaskFailed

if TYPE_CHECKING:
    from triptych.engine.grammar.matching import Matching


@dataclass
class Asked:
    """A question that hasn't been answered, of a matching or of the grammar itself. ``since`` is when the process began
    with it, by ``time.monotonic``; ``patience`` in seconds."""

    matching: "Matching | None"
    patience: float
    since: float


class Line:
    """To be used with the service's lock held. ``over``: there is nothing more to come; ``killed``: when its
    end was ordered because it took too long, by ``time.monotonic``; 0 for not."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.connection = connection
        self.asked: deque[Asked] = deque()
        self.outbox: deque[tuple[protocol.ProcessRequest, bytes]] = deque()
        self.over = False
        self.killed = 0.0

    def post(
        self, question: Question, matching: "Matching | None", *, seconds: float, patience: float, bulk: bytes = b""
    ) -> None:
        """Asks without waiting. What can't be sent now waits in ``outbox`` for ``flush``; what can't be sent to a
        process that has ended is lost with it."""
        self.asked.append(Asked(matching, patience, time.monotonic()))
        self.outbox.append((protocol.ProcessRequest(msgspec.msgpack.encode(question), seconds), bulk))
        self.flush()

    def flush(self) -> None:
        while self.outbox:
            question, content = self.outbox[0]
            bulk = Bulk.of(content) if content else None
            try:
                protocol.send(self.connection, question, bulk)
            except BlockingIOError:
                return
            except OSError:
                pass  # the process has ended, which its server tells of
            finally:
                if bulk is not None:
                    bulk.close()
            self.outbox.popleft()

    def answers(self) -> Iterator[tuple[Asked, Result | TaskFailed]]:
        """What has come since the last call. Raises ProtocolError for what no process of ours says."""
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
                self.over = True
                return
            if not self.asked:
                raise ProtocolError("an answer to nothing")
            try:
                answer = msgspec.msgpack.decode(data, type=Result | TaskFailed)
            except msgspec.MsgspecError as error:
                raise ProtocolError(str(error)) from None
            asked = self.asked.popleft()
            if self.asked:
                self.asked[0].since = time.monotonic()
            yield asked, answer

    def restart_clock(self) -> None:
        """The process hasn't begun yet."""
        if self.asked:
            self.asked[0].since = time.monotonic()

    @property
    def late(self) -> bool:
        """Whether an answer takes longer than anybody should wait."""
        return bool(self.asked) and time.monotonic() - self.asked[0].since > self.asked[0].patience
