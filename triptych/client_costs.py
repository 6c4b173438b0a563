"""Costs by client, and how much of them counts when each client counts up to a limit. Holds no device and no socket."""

import math

STEPS_PER_OCTAVE = 4
"""Buckets for each doubling of the cost."""


class ClientCosts:
    """A cost for each client. Every operation takes time that doesn't depend on the number of clients."""

    def __init__(self) -> None:
        self._costs: dict[str, float] = {}
        self._buckets: dict[int, tuple[int, float]] = {}
        """By magnitude: the number of clients with such a cost, and the sum of their costs."""
        self.total = 0.0

    def add(self, client: str, cost: float) -> None:
        """Add to a client's cost; ``cost`` may be negative."""
        before = self._costs.get(client, 0.0)
        after = max(0.0, before + cost)
        self._count(before, -1)
        self._count(after, 1)
        self._costs[client] = after
        self.total = max(0.0, self.total + after - before)

    def drop(self, client: str) -> None:
        """Forget a client, whatever is left of its cost."""
        self.add(client, -math.inf)
        del self._costs[client]
        if not self._costs:
            self.total = 0.0  # sums and differences of floats don't return to exactly 0

    def of(self, client: str) -> float:
        """Return a client's cost."""
        return self._costs.get(client, 0.0)

    def capped(self, limit: float, without: str) -> float:
        """Return the sum of all costs but one client's, where each counts up to ``limit``. Costs of about the size of
        the limit may count for up to a fifth more."""
        own = self._costs.get(without, 0.0)
        own_bucket = _bucket(own)
        capped = 0.0
        for bucket, (clients, cost) in self._buckets.items():
            is_own = bucket == own_bucket and own > 0
            capped += min(cost - own, (clients - 1) * limit) if is_own else min(cost, clients * limit)
        return max(0.0, capped)

    def __bool__(self) -> bool:
        return bool(self._costs)

    def _count(self, cost: float, sign: int) -> None:
        if not cost:
            return
        bucket = _bucket(cost)
        clients, total = self._buckets.get(bucket, (0, 0.0))
        if clients + sign:
            self._buckets[bucket] = clients + sign, total + sign * cost
        else:
            del self._buckets[bucket]


def _bucket(cost: float) -> int:
    mantissa, exponent = math.frexp(cost)
    return exponent * STEPS_PER_OCTAVE + int((mantissa - 0.5) * 2 * STEPS_PER_OCTAVE)
