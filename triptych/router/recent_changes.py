"""Which requests have changed lately, for readers that look now and then."""

from collections import OrderedDict

from triptych.types import RequestId

MAX_REMEMBERED = 1024
"""Requests that are remembered: several times those that change between two looks."""


class RecentChanges:
    """The requests that changed last, in the order of their changes.

    A reader keeps the number that it has seen, and the log knows no reader. One that comes too late must look at all
    requests, so the log needs no more room while there is no reader."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        self._numbers: OrderedDict[RequestId, int] = OrderedDict()
        """The number of each one's last change, the latest last."""
        self._forgotten = 0
        """The number of the latest change that is forgotten."""
        self.number = 0
        """Changes so far."""

    def note(self, request: RequestId) -> None:
        """Note that a request has begun, changed or ended."""
        self.number += 1
        self._numbers[request] = self.number
        self._numbers.move_to_end(request)
        if len(self._numbers) > self._max_remembered:
            _, self._forgotten = self._numbers.popitem(last=False)

    def since(self, number: int) -> list[RequestId] | None:
        """Return the requests that have changed after the change of that number, each once, the latest first; None if
        some of them are forgotten."""
        if number < self._forgotten:
            return None
        found = list[RequestId]()
        for request, changed in reversed(self._numbers.items()):
            if changed <= number:
                break
            found.append(request)
        return found
