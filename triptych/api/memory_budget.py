"""Limit on the memory that requests in flight hold in the frontend: bodies and media until the answer is complete, and
what of the answer the client hasn't read."""

from collections import Counter
from collections.abc import Callable

from triptych.errors import Overloaded, RateLimited
from triptych.observe.requests import RequestRecord

FREE_BYTES = 2**16
"""Bytes of each request that aren't charged, so that text requests are admitted even when the budget is spent."""


class MemoryBudget:
    """Bytes charged to all requests in flight: at most ``max_bytes``, and at most half of that per client."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_client: Counter[str] = Counter()
        self.total = 0
        """Bytes charged at the moment."""

    def for_request(self, record: RequestRecord) -> Callable[[int], None]:
        """Return a function that charges further bytes to the request until it ends; a negative number takes some back.

        It raises Overloaded when the whole budget is spent, and RateLimited when the client's half is."""
        client, own, has_ended = record.client, 0, False

        def release() -> None:
            nonlocal own, has_ended
            self._add(client, -_charged(own))
            own, has_ended = 0, True

        def charge(num_bytes: int) -> None:
            nonlocal own
            if has_ended:
                return  # tokens of choices that are being cancelled
            more = _charged(own + num_bytes) - _charged(own)
            if more > 0:
                if self.total + more > self._max_bytes:
                    raise Overloaded("the memory for requests in flight is used up", retry_after=1)
                if self._by_client[client] + more > self._max_bytes // 2:
                    raise RateLimited("your requests in flight use all the memory that one client may use")
            own += num_bytes
            if more:
                self._add(client, more)

        record.at_end(release)
        return charge

    def _add(self, client: str, num_bytes: int) -> None:
        self.total += num_bytes
        self._by_client[client] += num_bytes
        if not self._by_client[client]:
            del self._by_client[client]


def _charged(num_bytes: int) -> int:
    return max(0, num_bytes - FREE_BYTES)
