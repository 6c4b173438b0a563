"""What requests hold of the frontend's memory: bodies while they come, and media until the answer is there."""

from collections import Counter
from collections.abc import Callable

from triptych.errors import Overloaded, RateLimited
from triptych.observe.requests import at_end, current_client

SMALL = 2**16
"""Bytes that a request may have whatever others hold, so that texts get by."""


class MemoryBudget:
    """Bytes held by all requests together: ``most`` at a time, of which one client may hold half."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_client: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._by_client.total()

    def for_request(self) -> Callable[[int], None]:
        """What to tell of each further number of bytes that the request being answered holds, to its end. Raises
        Overloaded when all hold too much, and RateLimited when its client does."""
        client, own = current_client(), 0

        def release() -> None:
            nonlocal own
            self._release(client, _counted(own))
            own = 0

        def hold(num_bytes: int) -> None:
            nonlocal own
            before = _counted(own)
            more = _counted(own + num_bytes) - before
            if more:
                if self.total + more > self._most:
                    raise Overloaded("requests hold all the memory that they may", retry_after=1)
                if self._by_client[client] + more > self._most // 2:
                    raise RateLimited("your requests hold all the memory that they may")
                self._by_client[client] += more
            own += num_bytes
            if more and not before:
                at_end(release)  # once, of whatever it is by then: bodies come in many small pieces

        return hold

    def _release(self, client: str, num_bytes: int) -> None:
        self._by_client[client] -= num_bytes
        if not self._by_client[client]:
            del self._by_client[client]


def _counted(num_bytes: int) -> int:
    return max(0, num_bytes - SMALL)
