"""Answers to operators who ask for a change."""

import logging
from collections.abc import Callable

from triptych.errors import TriptychError
from triptych.messages.codec import Send
from triptych.messages.operations import ChangeEnded, ChangeProgress, ChangeRefused
from triptych.types import Address

log = logging.getLogger(__name__)


class Answers:
    """Answers operators, who may be gone. The connection is closed after the last answer."""

    def __init__(self, send: Send, disconnect: Callable[[Address], None]) -> None:
        """``send`` reaches operators, and ``disconnect`` closes the connection to one."""
        self._send = send
        self._disconnect = disconnect

    def __call__(self, operator: Address, answer: ChangeRefused | ChangeProgress | ChangeEnded) -> None:
        """Send an answer; more may follow progress alone."""
        try:
            self._send(operator, answer)
        except TriptychError as error:
            log.debug("couldn't answer an operator: %s", error)
        if not isinstance(answer, ChangeProgress):
            self._disconnect(operator)
