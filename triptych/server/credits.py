"""How an instance divides its capacity among its frontends. Pure: it knows neither messages nor time."""

from collections.abc import Sequence

from triptych.messages.work import Capacity, Credit, Demand


def divide(capacity: Capacity, demands: Sequence[Demand]) -> list[Credit]:
    """Return the credit of each frontend, by what each has for the instance, running and waiting.

    A credit limits the work that a frontend has at the instance at a time, rather than what it may add until the next
    heartbeat: a request that ends makes room for the frontend's next one at once."""
    whole = capacity.whole
    requests = shares(whole.requests, [one.requests for one in demands])
    # an item counts as at most one batch
    patches = shares(whole.patches, [one.items * capacity.encode_batch_patches for one in demands])
    long_items = shares(whole.long_items, [one.items for one in demands])
    return [Credit(*parts) for parts in zip(requests, patches, long_items, strict=True)]


def shares(capacity: int, demands: Sequence[int]) -> list[int]:
    """Divide ``capacity`` in proportion to ``demands``, and what exceeds their sum evenly.

    The shares add up to ``capacity``. Shares of 0 are then raised to 1, so that no frontend waits for another one's
    answer, and the sum exceeds ``capacity`` by less than the number of frontends. Without capacity, all are 0."""
    if capacity == 0 or len(demands) <= 1:
        return [capacity] * len(demands)
    spare = max(0, capacity - sum(demands))
    # a common denominator keeps the arithmetic exact
    if spare:
        scale = len(demands)
        exact = [demand * scale + spare for demand in demands]
    else:
        scale = sum(demands)
        exact = [capacity * demand for demand in demands]
    whole = [part // scale for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: -(exact[index] % scale))
    for index in by_remainder[: capacity - sum(whole)]:
        whole[index] += 1
    return [max(1, part) for part in whole]
