"""Rows that requests bring: the frontend sends them to language instances, as an encode instance does."""

import logging
from collections.abc import Callable

import numpy as np

from triptych.errors import TransferError, TriptychError, Unavailable
from triptych.messages.codec import Send
from triptych.messages.rows import Abort, Done, Grant, RowLayout
from triptych.messages.work import time_left
from triptych.router.encode_tasks import EncodeTask
from triptych.transfer.sender import Sender
from triptych.types import Address

log = logging.getLogger(__name__)

OpenSender = Callable[[Send], Sender]
"""Makes a sender, with what sends its messages. Raises StartError or OSError if no fabric can be opened."""


class GivenRows:
    """This frontend's producer of rows."""

    def __init__(self, *, address: Address, open_sender: OpenSender | None, notify: Send) -> None:
        """``address`` is this frontend's. ``open_sender`` makes the producer, None if there is to be none. ``notify``
        sends its messages, and only logs a failure."""
        self._address = address
        self._open_sender = open_sender
        self._notify = notify
        self._sender: Sender | None = None
        """None until a request needs it."""

    def give(self, task: EncodeTask, layout: RowLayout | None, now: float) -> None:
        """Offer an item's rows to the instance that asks for them. Raises Unavailable if they can't be."""
        item = task.item
        if layout is None or len(item.data) != item.plan.rows * layout.row_bytes:
            raise Unavailable("the encode instances' rows have changed")
        rows = np.frombuffer(item.data, dtype=np.uint8).reshape(-1, layout.row_bytes)
        if task.rows is not None:
            rows = rows[task.rows.first : task.rows.end]
        sender = self._opened()
        try:
            sender.offer(
                task.transfer,
                task.consumer,
                len(rows),
                layout,
                timeout=time_left(task.deadline, now),
                attempt=task.attempt,
                owner=self._address,
            )
        except TransferError:
            return  # asked for twice
        sender.provide(task.transfer, rows)

    def _opened(self) -> Sender:
        if self._open_sender is None:
            raise Unavailable("this frontend sends no rows")
        if self._sender is None:
            try:
                self._sender = self._open_sender(self._notify)
            except (TriptychError, OSError) as error:
                log.exception("no rows can be sent")
                raise Unavailable(f"this frontend can't send rows: {error}") from None
        return self._sender

    def on_grant(self, grant: Grant) -> None:
        """Handle a consumer's grant of blocks."""
        if self._sender is not None:
            self._sender.on_grant(grant)

    def takes(self, message: Done | Abort) -> bool:
        """Handle a message about a transfer of this producer; return False for another one."""
        if self._sender is None or message.transfer not in self._sender:
            return False
        if isinstance(message, Done):
            self._sender.on_done(message)
        else:
            self._sender.on_abort(message)
        return True

    def consumer_lost(self, consumer: Address) -> None:
        """End the transfers to an instance that is gone."""
        if self._sender is not None:
            self._sender.consumer_lost(consumer, self._address)

    def advance(self) -> None:
        """Go on with what is being written. Call after each message, and a few times a second."""
        if self._sender is not None:
            self._sender.poll()
            self._sender.check_deadlines()

    @property
    def idle(self) -> bool:
        """Whether no transfer is open."""
        return self._sender is None or self._sender.idle

    def close(self) -> None:
        """End all transfers."""
        if self._sender is not None:
            self._sender.drop_all()
