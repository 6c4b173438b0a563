"""Ends of the control port that answer operators as they are told."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from triptych.clock import SystemClock
from triptych.messages.channel import Channel
from triptych.messages.codec import Message
from triptych.messages.operations import GetStatus, SetRole, StartRollout, StartScale

Question = GetStatus | SetRole | StartRollout | StartScale


@contextmanager
def answering(
    answers: Callable[[Question], Sequence[Message]], secret: bytes | None = None
) -> Iterator[tuple[str, list[Question]]]:
    """A control address, and what it was asked."""
    channel, asked, over = Channel(SystemClock(), secret=secret), list[Question](), threading.Event()

    def serve() -> None:
        while not over.is_set():
            for message in channel.receive(0.05):
                assert isinstance(message, Question)
                asked.append(message)
                for answer in answers(message):
                    channel.send(message.reply_to, answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield channel.address.removeprefix("tcp://"), asked
    finally:
        over.set()
        thread.join(10)
        channel.close(linger=0)


def supervisor(answers: Sequence[Message]) -> AbstractContextManager[tuple[str, list[Question]]]:
    """The control address of a service that answers a change with these messages, and what it was asked."""
    return answering(lambda _: answers)
