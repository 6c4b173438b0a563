"""A supervisor that answers operators as it is told."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from triptych.messages.channel import Channel
from triptych.messages.codec import Message
from triptych.messages.operations import StartRollout, StartScale


@contextmanager
def supervisor(answers: Sequence[Message]) -> Iterator[tuple[str, list[StartRollout | StartScale]]]:
    """The control address of a service that answers a change with these messages, and what it was asked."""
    channel, asked, over = Channel(), list[StartRollout | StartScale](), threading.Event()

    def serve() -> None:
        while not over.is_set():
            for message in channel.receive(0.05):
                assert isinstance(message, StartRollout | StartScale)
                asked.append(message)
                for answer in answers:
                    channel.send(message.reply_to, answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield channel.address.removeprefix("tcp://"), asked
    finally:
        over.set()
        thread.join(10)
        channel.close(linger=0)
